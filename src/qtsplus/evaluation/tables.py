"""Tables of the evaluation's pages, in Markdown."""

from collections.abc import Iterable, Mapping, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> list[str]:
    """The lines of a table whose first columns, `texts` of them, are text and whose others are figures."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * texts + "---:|" * (len(columns) - texts)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


def percent(share: float) -> str:
    return f"{share:.1%}"


def percent_interval(interval: Mapping[str, float], share: float) -> str:
    """A share with its interval, where it has one."""
    if not interval:
        return percent(share)
    return f"{percent(share)} ({percent(max(0.0, interval['low']))} to {percent(min(1.0, interval['high']))})"


__all__ = ["markdown_table", "percent", "percent_interval"]
