"""Runs a step over every item of an input: many at a time, restartable, with what it costs counted."""

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import with_config
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from typing_extensions import TypedDict

from qtsplus.common.files import check_folder, whole_file, working_in
from qtsplus.common.journals import STORED, Journal, Line, Schema, write_json

JOURNAL = "journal.jsonl"
COSTS = ("requests", "prompt_tokens", "completion_tokens")


class ItemFailed(Exception):
    """Nothing can come of an item; its ledger holds the reasons. It is written down, and the run goes on."""


class RunFailed(Exception):
    """A run of which nothing comes. What is finished stays in its journal."""


@dataclass
class Ledger:
    """What has come of one item so far, and what it has cost."""

    kept: list[dict[str, Any]] = field(default_factory=list)  # rows of the set
    dropped: list[dict[str, Any]] = field(default_factory=list)  # others, each with its `reason`
    costs: Counter[str] = field(default_factory=Counter)  # by the names of [`COSTS`]
    reasons: list[str] = field(default_factory=list)  # what went wrong, one sentence each


@dataclass(frozen=True)
class Item:
    """What the input says at one place."""

    position: int
    id: str  # decides all that is drawn for it
    record: Any

    @property
    def seed(self) -> int:
        """31 bits that only the id decides."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big") >> 1


Step = Callable[[Item, Ledger], Awaitable[None]]


@with_config(STORED)
class Attempt(TypedDict):
    """An item as the journal has it once it was tried."""

    id: str
    failed: bool
    kept: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    costs: dict[str, int]
    reasons: list[str]


_SCHEMA = Schema(line=Line[int, Attempt])


@dataclass(frozen=True)
class Job:
    """A set that is to be made."""

    name: str  # such as "vscq1"; its rows are written to `<name>.jsonl`
    read: Callable[[], Iterable[Any]]  # begins to read the input's records
    step: Step  # what is done with each item; raises [`ItemFailed`]
    teacher: contextlib.AbstractAsyncContextManager[Any]  # entered before the first item and left after the last
    settings: Mapping[str, Any]  # all that decides the rows beside the input; a run goes on only with the same


def run_job(job: Job, out: Path, concurrency: int = 64, limit: int | None = None) -> Path:
    """
    Runs a job to its end, or goes on where it was stopped: what is finished is in the journal and is not asked again,
    and what failed is tried again. With a `limit` only the first items are taken.

    Memory hardly grows with the input. The files of a run are written when all its items are finished: `<name>.jsonl`,
    which is returned, `dropped.jsonl` and `failed.jsonl` in the input's order, and `summary.json` with all costs.
    """
    folder = check_folder(out)
    files = [folder / name for name in (f"{job.name}.jsonl", "dropped.jsonl", "failed.jsonl", "summary.json")]
    if not (folder / JOURNAL).exists() and (there := next(filter(Path.exists, files), None)):
        raise ValueError(f"{there} is there already, and not from this run: choose another folder.")
    items, digest = 0, hashlib.sha256()
    for record in job.read():
        items += 1
        digest.update(json.dumps(record.row(), sort_keys=True).encode() + b"\n")
    if not items:
        raise ValueError("The input holds no record.")
    settings = {"step": job.name, "input": digest.hexdigest()[:16], "items": items, **job.settings}
    with working_in(folder):
        journal = Journal(folder / JOURNAL, settings, _SCHEMA)
        asyncio.run(_finish_all(job, journal, items if limit is None else min(items, limit), concurrency))
        return _write_sets(files, journal)


async def _finish_all(job: Job, journal: Journal, total: int, concurrency: int) -> None:
    """Workers take items from one iterator, so that no more than `concurrency` of them are in memory."""
    finished = {position for position, entry in journal.done.items() if not entry["failed"]}
    records = enumerate(itertools.islice(job.read(), total))
    items = (Item(at, record.id or f"{at:08d}", record) for at, record in records if at not in finished)
    console, patience, in_a_row = Console(stderr=True), max(20, 2 * concurrency), 0
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(f"Making {job.name}", total=total, completed=len(finished))

    async def work() -> None:
        nonlocal in_a_row
        for item in items:
            ledger, failed = Ledger(), False
            try:
                await job.step(item, ledger)
            except ItemFailed:
                failed = True
            journal.add(item.position, {"id": item.id, "failed": failed, **vars(ledger)})
            bar.advance(task)
            in_a_row = in_a_row + 1 if failed else 0
            if in_a_row >= patience:
                raise RunFailed(
                    f"The last {in_a_row} items failed, the last one because {ledger.reasons[-1]} Mend that, and run "
                    "the same command again."
                )

    async with job.teacher:
        with bar:
            workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)


def _write_sets(files: Sequence[Path], journal: Journal) -> Path:
    """Writes what a journal holds, in the input's order; see [`run_job`]. Where all items failed, no set is written."""
    kept, dropped, failed, summary = files
    reasons = []
    with whole_file(failed) as file:
        for entry in map(journal.done.__getitem__, sorted(journal.done)):
            if entry["failed"]:
                file.write(json.dumps({"id": entry["id"], "reasons": entry["reasons"]}) + "\n")
                reasons.append(entry["reasons"][-1])
    if len(reasons) == len(journal.done):
        raise RunFailed(
            f"All {len(reasons)} items failed, because {' '.join(list(dict.fromkeys(reasons))[:3])} No set was "
            f"written; {failed} says more. Mend that, and run the same command again."
        )
    counts: Counter[str] = Counter(dict.fromkeys(("finished", "kept", "dropped", *COSTS), 0))
    causes: Counter[str] = Counter()
    with whole_file(kept) as good, whole_file(dropped) as bad:
        for entry in map(journal.done.__getitem__, sorted(journal.done)):
            counts.update(entry["costs"], finished=1, kept=len(entry["kept"]), dropped=len(entry["dropped"]))
            good.writelines(json.dumps(row) + "\n" for row in entry["kept"])
            bad.writelines(json.dumps(row) + "\n" for row in entry["dropped"])
            causes.update(row["reason"].partition(":")[0] for row in entry["dropped"])
    totals = {**journal.settings, **counts, "failed": len(reasons), "dropped_because": dict(sorted(causes.items()))}
    write_json(summary, totals)
    return kept
