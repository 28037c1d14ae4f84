"""Runs a step over every item of an input: many at a time, restartable, with what it costs counted."""

import asyncio
import contextlib
import errno
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import with_config
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from typing_extensions import TypedDict

from ..output import check_folder, whole_file
from ..results import STORED, Journal, Line, Schema, write_json

JOURNAL = "journal.jsonl"
COSTS = ("requests", "prompt_tokens", "completion_tokens")


class ItemFailed(Exception):
    """Nothing can come of an item; its ledger holds the reasons. It is written down, and the run goes on."""


class RunFailed(Exception):
    """A run that cannot go on, or of which nothing came. What is finished stays in its journal."""


@dataclass
class Ledger:
    """What one item has cost so far."""

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


@dataclass
class Result:
    """The rows that came of an item."""

    kept: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)  # each with its `reason`


Step = Callable[[Item, Ledger], Awaitable[Result]]


@with_config(STORED)
class Entry(TypedDict):
    """An item as the journal has it once it was tried."""

    id: str
    failed: bool
    kept: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    costs: dict[str, int]
    reasons: list[str]


_SCHEMA = Schema(line=Line[int, Entry])


@dataclass(frozen=True)
class Job:
    """A set that is to be made."""

    name: str  # such as "vscq1"; its rows are written to `<name>.jsonl`
    read: Callable[[], Iterable[Any]]  # begins to read the input's records
    step: Step  # what is done with each item; raises [`ItemFailed`]
    teacher: contextlib.AbstractAsyncContextManager[Any]  # entered before the first item and left after the last
    settings: Mapping[str, Any]  # all that decides the rows beside the input; a run goes on only with the same


def run(job: Job, out: Path, concurrency: int = 64, limit: int | None = None) -> Path:
    """
    Runs a job to its end, or goes on where it was stopped: what is finished is in the journal and is not asked again,
    and what failed is tried again. With a `limit` only the first items are taken.

    Memory hardly grows with the input. The files of a run are written when all its items are finished: `<name>.jsonl`,
    which is returned, `dropped.jsonl` and `failed.jsonl` in the input's order, and `summary.json` with all costs.

    Raises:
        ValueError: the folder cannot be written, holds files that no run has made or a run with other settings, or
            another process works in it; what `job` raises.
        RunFailed: one item after another fails, every item failed, or the disk is full.
    """
    folder = check_folder(out)
    if not (folder / JOURNAL).exists():
        _refuse_files(folder, job.name)
    items, digest = _measure(job.read())
    if not items:
        raise ValueError("The input holds no record.")
    settings = {"step": job.name, "input": digest, "items": items, **job.settings}
    total = items if limit is None else min(items, limit)
    with _working_in(folder):
        journal = Journal(folder / JOURNAL, settings, _SCHEMA, begin_anew=False)
        finished = {position for position, entry in _entries(journal) if not entry["failed"]}
        records = enumerate(itertools.islice(job.read(), total))
        unfinished = (
            Item(position, record.id or f"{position:08d}", record)
            for position, record in records
            if position not in finished
        )
        recorder = Recorder(journal, total, len(finished), concurrency)
        with recorder.bar:
            asyncio.run(_finish_all(job, unfinished, concurrency, recorder))
        return write_sets(folder, job.name, journal)


def _files(name: str) -> list[str]:
    return [f"{name}.jsonl", "dropped.jsonl", "failed.jsonl", "summary.json"]


def _refuse_files(folder: Path, name: str) -> None:
    for path in (folder / file for file in _files(name)):
        if path.exists():
            raise ValueError(f"{path} is there already, and not from this run: choose another folder.")


def write_sets(folder: Path, name: str, journal: Journal) -> Path:
    """Writes what a journal holds, in the input's order; see [`run`]. Where all items failed, no set is written."""
    kept, dropped, failed, summary = (folder / file for file in _files(name))
    if all(entry["failed"] for _, entry in _entries(journal)):
        reasons = _write_failed(failed, journal)
        raise RunFailed(
            f"All {len(reasons)} items failed, because {' '.join(list(dict.fromkeys(reasons))[:3])} No set was "
            f"written; {failed} says more. Mend that, and run the same command again."
        )
    counts: Counter[str] = Counter(dict.fromkeys(("finished", "kept", "dropped", *COSTS), 0))
    causes: Counter[str] = Counter()
    with whole_file(kept) as good, whole_file(dropped) as bad:
        for _, entry in _entries(journal):
            counts.update(entry["costs"], finished=1)
            for file, rows, count in ((good, entry["kept"], "kept"), (bad, entry["dropped"], "dropped")):
                file.writelines(json.dumps(row) + "\n" for row in rows)
                counts[count] += len(rows)
            causes.update(row["reason"].partition(":")[0] for row in entry["dropped"])
    failures = len(_write_failed(failed, journal))
    totals = {**journal.settings, **counts, "failed": failures, "dropped_because": dict(sorted(causes.items()))}
    write_json(summary, totals)
    return kept


def _write_failed(path: Path, journal: Journal) -> list[str]:
    """Writes the items that failed, and gives the last reason of each."""
    entries = [entry for _, entry in _entries(journal) if entry["failed"]]
    with whole_file(path) as file:
        file.writelines(json.dumps({"id": entry["id"], "reasons": entry["reasons"]}) + "\n" for entry in entries)
    return [entry["reasons"][-1] for entry in entries]


def _entries(journal: Journal) -> Iterator[tuple[int, Entry]]:
    """All items that were tried by position, one at a time."""
    for position in sorted(journal.done):
        yield position, journal.done[position]


def _measure(records: Iterable[Any]) -> tuple[int, str]:
    """How many records there are, and a digest of them."""
    count, digest = 0, hashlib.sha256()
    for record in records:
        count += 1
        digest.update(json.dumps(record.row(), sort_keys=True).encode() + b"\n")
    return count, digest.hexdigest()[:16]


async def _finish_all(job: Job, items: Iterator[Item], concurrency: int, recorder: "Recorder") -> None:
    """Workers take items from one iterator, so that no more than `concurrency` of them are in memory."""

    async def work() -> None:
        for item in items:
            ledger, result, failed = Ledger(), Result(), False
            try:
                result = await job.step(item, ledger)
            except ItemFailed:
                failed = True
            entry: Any = {"id": item.id, "failed": failed, **vars(result), **vars(ledger)}
            recorder.record(item.position, entry)

    async with job.teacher:
        workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


class Recorder:
    """Writes items that were tried into a journal, and shows on a bar how far a run is, where that is a terminal."""

    def __init__(self, journal: Journal, items: int, finished: int, concurrency: int):
        console = Console(stderr=True)
        self.journal = journal
        self.failed_in_a_row, self.patience = 0, max(20, 2 * concurrency)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task(f"Making {journal.settings['step']}", total=items, completed=finished)

    def record(self, position: int, entry: Entry) -> None:
        """Notes an item; raises [`RunFailed`] where one after another fails."""
        self.journal.add(position, entry)
        self.bar.advance(self.task)
        self.failed_in_a_row = self.failed_in_a_row + 1 if entry["failed"] else 0
        if self.failed_in_a_row >= self.patience:
            raise RunFailed(
                f"The last {self.failed_in_a_row} items failed, the last one because {entry['reasons'][-1]} Mend that, "
                "and run the same command again."
            )


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """One process at a time, which says how to go on after a full disk."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(f"Another process works in {folder}: wait for it, or choose another folder.") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunFailed(
            f"{folder} cannot be written ({error.strerror}). Nothing that was finished is lost: make room, and run the "
            "same command again."
        ) from error
