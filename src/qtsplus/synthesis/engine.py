"""Runs a step over every item of an input: many at a time, restartable, sharded, with what it costs counted."""

import asyncio
import contextlib
import errno
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from ..output import check_folder, whole_file
from ..results import Journal, read_json, write_json

JOURNAL = "journal.jsonl"
SHARD = "shard-{}-of-{}"
COSTS_KEY = "costs"  # of a journal, beside the positions of its items
COSTS = ("requests", "prompt_tokens", "completion_tokens")


class ItemFailed(Exception):
    """Nothing can come of an item; its ledger holds the reasons. It is written down, and the run goes on."""


class RunFailed(Exception):
    """A run that cannot go on, or of which nothing came. What is finished stays in its journal."""


@dataclass
class Ledger:
    """What one item has cost so far."""

    costs: Counter[str] = field(default_factory=Counter)  # by the names of [`COSTS`]
    reasons: list[str] = field(default_factory=list)  # why something had to be asked again, one sentence each
    tell: Callable[[Mapping[str, int]], None] | None = None  # is called with every cost as it comes up

    def spend(self, requests: int = 0, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        """Adds a cost."""
        costs = dict(zip(COSTS, (requests, prompt_tokens, completion_tokens), strict=True))
        self.costs.update(costs)
        if self.tell is not None:
            self.tell(costs)


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
# A finished item as the journal has it: id, failed, kept, dropped, reasons.
Entry = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A set that is to be made."""

    name: str  # such as "vscq1"; its rows are written to `<name>.jsonl`
    read: Callable[[], Iterable[Any]]  # begins to read the input's records
    step: Step  # what is done with each item; raises [`ItemFailed`]
    teacher: contextlib.AbstractAsyncContextManager[Any]  # entered before the first item and left after the last
    settings: Mapping[str, Any]  # all that decides the rows beside the input; a run goes on only with the same


@dataclass(frozen=True)
class Shard:
    """The items of one machine: the `index`-th of `count` parts, counted from 1. A video's questions stay together."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Reads such as "2/8"; raises a `ValueError` for anything else."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise ValueError(f"The shard is {text!r}; expected such as 2/8, the second of eight.")
        return cls(int(index), int(count))

    def positions(self, items: int, limit: int | None = None) -> range:
        """Of its items in an input of `items`, and only the first `limit` of them."""
        part = range((self.index - 1) * items // self.count, self.index * items // self.count)
        return part if limit is None else part[:limit]


def run(
    job: Job,
    out: Path,
    *,
    concurrency: int = 64,
    shard: Shard | None = None,
    limit: int | None = None,
    retry_failed: bool = False,
    progress: bool = False,
) -> Path:
    """
    Runs a job to its end, or goes on where it was stopped: finished items are in the journal and are not asked again.

    Memory hardly grows with the input. The files of a run are written when all its items are finished: `<name>.jsonl`,
    `dropped.jsonl` and `failed.jsonl` in the input's order, and `summary.json`, which counts every request, also those
    of items that were cut off.

    Args:
        out: the folder; each shard has one of its own inside.
        shard, limit: take a part of the items, for [`merge`]; and only the first ones.
        retry_failed: try again what failed in an earlier run.
        progress: show a bar on standard error.

    Returns:
        the file of the kept rows.

    Raises:
        ValueError: the folder cannot be written, holds files that no run has made or a run with other settings, or
            another process works in it; what `job` raises.
        RunFailed: one item after another fails, every item failed, or the disk is full.
    """
    shard = shard or Shard()
    if concurrency < 1 or (limit is not None and limit < 1):
        raise ValueError(f"concurrency={concurrency}, limit={limit}: expected at least 1.")
    folder = check_folder(out) if shard.count == 1 else check_folder(out) / SHARD.format(shard.index, shard.count)
    if not (folder / JOURNAL).exists():
        _refuse_files(folder, job.name)
    items, digest = _measure(job.read())
    if not items:
        raise ValueError("The input holds no record.")
    settings = {"step": job.name, "input": digest, "items": items, "shard": [shard.index, shard.count], **job.settings}
    positions = shard.positions(items, limit)
    with _only_process(folder), _room_on_disk(folder):
        journal = Journal(folder / JOURNAL, settings, begin_anew=False)
        finished = set(journal.done) - {COSTS_KEY}
        if retry_failed:
            finished -= {position for position, entry in _entries([journal]) if entry["failed"]}
        unfinished = (item for item in _mine(job, positions) if item.position not in finished)
        recorder = Recorder(journal, len(positions), len(finished), concurrency, progress)
        with recorder.bar:
            asyncio.run(_finish_all(job, unfinished, concurrency, recorder))
        return write_sets(folder, job.name, [journal])


def merge(out: Path) -> Path:
    """
    Puts the shards in a folder together, as if one machine had made them; see [`run`].

    Raises:
        ValueError: there is no shard; one is missing, unfinished, or of another run; the folder holds another set.
    """
    journals = [Journal(path) for path in out.glob(f"shard-*/{JOURNAL}")]
    if not journals:
        raise ValueError(f"There is no shard in {out}; expected folders such as {SHARD.format(1, 8)}.")
    journals.sort(key=lambda journal: journal.settings["shard"])
    _check_shards(journals)
    settings = _shared(journals[0])
    summary = read_json(out / "summary.json") or {}
    if any(summary.get(name) != value for name, value in settings.items()):
        _refuse_files(out, settings["step"])
    return write_sets(out, settings["step"], journals)


def _files(name: str) -> list[str]:
    return [f"{name}.jsonl", "dropped.jsonl", "failed.jsonl", "summary.json"]


def _refuse_files(folder: Path, name: str) -> None:
    for path in (folder / file for file in _files(name)):
        if path.exists():
            raise ValueError(f"{path} is there already, and not from this run: choose another folder.")


def write_sets(folder: Path, name: str, journals: Sequence[Journal]) -> Path:
    """Writes what journals hold, in the input's order; see [`run`]. Where all items failed, no set is written."""
    kept, dropped, failed, summary = (folder / file for file in _files(name))
    if all(entry["failed"] for _, entry in _entries(journals)):
        reasons = _write_failed(failed, journals)
        raise RunFailed(
            f"All {len(reasons)} items failed, because {' '.join(list(dict.fromkeys(reasons))[:3])} No set was "
            f"written; {failed} says more. Mend that, and run the same command with --retry-failed."
        )
    counts, causes = dict.fromkeys(("finished", "kept", "dropped"), 0), Counter[str]()
    with whole_file(kept) as good, whole_file(dropped) as bad:
        for _, entry in _entries(journals):
            counts["finished"] += 1
            for file, rows, count in ((good, entry["kept"], "kept"), (bad, entry["dropped"], "dropped")):
                file.writelines(json.dumps(row) + "\n" for row in rows)
                counts[count] += len(rows)
            causes.update(row["reason"].partition(":")[0] for row in entry["dropped"])
    failures = {"failed": len(_write_failed(failed, journals))}
    totals = {**_shared(journals[0]), **counts, **failures, **_total_costs(journals)}
    write_json(summary, {**totals, "dropped_because": dict(sorted(causes.items()))})
    return kept


def _write_failed(path: Path, journals: Sequence[Journal]) -> list[str]:
    """Writes the items that failed, and gives the last reason of each."""
    entries = [entry for _, entry in _entries(journals) if entry["failed"]]
    with whole_file(path) as file:
        file.writelines(json.dumps({"id": entry["id"], "reasons": entry["reasons"]}) + "\n" for entry in entries)
    return [entry["reasons"][-1] for entry in entries]


def _entries(journals: Sequence[Journal]) -> Iterator[tuple[int, Entry]]:
    """All finished items by position, one at a time."""
    for journal in journals:
        for position in sorted(key for key in journal.done if isinstance(key, int)):
            yield position, journal.done[position]


def _total_costs(journals: Sequence[Journal]) -> dict[str, int]:
    costs = [journal.done.get(COSTS_KEY, {}) for journal in journals]
    return {name: sum(cost.get(name, 0) for cost in costs) for name in COSTS}


def _shared(journal: Journal) -> dict[str, Any]:
    """The settings that all shards of a run have."""
    return {name: value for name, value in journal.settings.items() if name != "shard"}


def _measure(records: Iterable[Any]) -> tuple[int, str]:
    """How many records there are, and a digest of them."""
    count, digest = 0, hashlib.sha256()
    for record in records:
        count += 1
        digest.update(json.dumps(record.row(), sort_keys=True).encode() + b"\n")
    return count, digest.hexdigest()[:16]


def _mine(job: Job, positions: range) -> Iterator[Item]:
    records = itertools.islice(job.read(), positions.start, positions.stop)
    for position, record in zip(positions, records, strict=True):
        yield Item(position, record.id or f"{position:08d}", record)


async def _finish_all(job: Job, items: Iterator[Item], concurrency: int, recorder: "Recorder") -> None:
    """Workers take items from one iterator, so that no more than `concurrency` of them are in memory."""

    async def work() -> None:
        for item in items:
            ledger, result, failed = Ledger(tell=recorder.spend), Result(), False
            try:
                result = await job.step(item, ledger)
            except ItemFailed:
                failed = True
            entry = {"id": item.id, "failed": failed, **vars(result), "reasons": ledger.reasons}
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
    """Writes costs and finished items into a journal, and shows on a bar how far a run is, where that is a terminal."""

    def __init__(self, journal: Journal, items: int, finished: int, concurrency: int, progress: bool):
        console = Console(stderr=True)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[cost]}"))
        self.journal = journal
        self.costs = Counter(_total_costs([journal]))
        self.failed_in_a_row, self.patience = 0, max(20, 2 * concurrency)
        self.bar = Progress(*columns, console=console, disable=not (progress and console.is_terminal))
        name = journal.settings["step"]
        self.task = self.bar.add_task(f"Making {name}", total=items, completed=finished, cost=self._cost())

    def spend(self, costs: Mapping[str, int]) -> None:
        """Notes a cost, also of an item that is never finished."""
        self.costs.update(costs)
        self.journal.add(COSTS_KEY, self.costs)

    def record(self, position: int, entry: Entry) -> None:
        """Notes a finished item; raises [`RunFailed`] where one item after another fails."""
        self.journal.add(position, entry)
        self.bar.update(self.task, advance=1, cost=self._cost())
        self.failed_in_a_row = self.failed_in_a_row + 1 if entry["failed"] else 0
        if self.failed_in_a_row >= self.patience:
            raise RunFailed(
                f"The last {self.failed_in_a_row} items failed, the last one because {entry['reasons'][-1]} Mend that, "
                "and run the same command with --retry-failed."
            )

    def _cost(self) -> str:
        tokens = (self.costs["prompt_tokens"] / 1e6, self.costs["completion_tokens"] / 1e6)
        return f"{tokens[0]:.2f}M tokens read, {tokens[1]:.2f}M written"


@contextlib.contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(f"Another process works in {folder}: wait for it, or choose another folder.") from error


@contextlib.contextmanager
def _room_on_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunFailed(
            f"{folder} cannot be written ({error.strerror}). Nothing that was finished is lost: make room, and run the "
            "same command again."
        ) from error


def _check_shards(journals: Sequence[Journal]) -> None:
    first = journals[0]
    folder, settings = first.path.parent, first.settings
    for journal in journals:
        if _shared(journal) != _shared(first) or journal.settings["shard"][1] != settings["shard"][1]:
            raise ValueError(f"{journal.path.parent} and {folder} are shards of different runs: remove one of them.")
    shards = [Shard(*journal.settings["shard"]) for journal in journals]
    missing = sorted(set(range(1, shards[0].count + 1)) - {shard.index for shard in shards})
    if missing:
        raise ValueError(f"{folder.parent} lacks the shard {missing[0]}/{shards[0].count}: run it first.")
    if len(shards) != shards[0].count:
        raise ValueError(f"{folder.parent} holds a shard twice: remove one of its folders.")
    for journal, shard in zip(journals, shards, strict=True):
        items, finished = len(shard.positions(settings["items"])), len(set(journal.done) - {COSTS_KEY})
        if finished != items:
            raise ValueError(
                f"{journal.path.parent} has finished {finished} of {items} items: run that shard to its end first."
            )
