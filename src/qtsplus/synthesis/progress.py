"""What a run tells while it goes: how far it is, when it ends, what it has cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .journal import Ledger


@dataclass(frozen=True)
class Price:
    """Of a million tokens that are read, and of a million that are written, in any currency."""

    prompt: float
    completion: float

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


class ProgressBar:
    """
    A bar with the time that is left, on standard error where that is a terminal.

    Args:
        title: in front of the bar.
        items: that the run has in all.
        totals: of what is finished, see [`Journal.totals`].
        price: of the tokens.
        enabled: show it.
    """

    def __init__(
        self, title: str, items: int, totals: Mapping[str, int], price: Price | None = None, enabled: bool = True
    ):
        console = Console(stderr=True)
        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            *(TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[cost]}")),
        )
        self.bar = Progress(*columns, console=console, disable=not (enabled and console.is_terminal))
        self.price = price
        self.totals = dict(totals)
        self.task = self.bar.add_task(title, total=items, completed=self.totals["items"], cost=self._cost())

    def advance(self, ledger: Ledger, failed: bool) -> None:
        """One item more."""
        for name in ("requests", "prompt_tokens", "completion_tokens"):
            self.totals[name] += getattr(ledger, name)
        self.totals["failed"] += failed
        self.bar.update(self.task, advance=1, cost=self._cost())

    def _cost(self) -> str:
        read, written = self.totals["prompt_tokens"], self.totals["completion_tokens"]
        told = [f"{read / 1e6:.2f}M tokens read, {written / 1e6:.2f}M written"]
        if self.price is not None:
            told.append(f"cost {self.price.of(read, written):.2f}")
        if self.totals["failed"]:
            told.append(f"{self.totals['failed']} failed")
        return ", ".join(told)

    def __enter__(self) -> "ProgressBar":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


__all__ = ["Price", "ProgressBar"]
