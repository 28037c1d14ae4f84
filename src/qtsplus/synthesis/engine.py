"""Runs a step over every item of an input: many at a time, restartable, sharded, with what it costs counted."""

import asyncio
import contextlib
import hashlib
import heapq
import itertools
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .journal import JOURNAL, Entry, Journal, Ledger
from .progress import Price, ProgressBar

SHARD = "shard-{}-of-{}"


class ItemFailed(Exception):
    """Nothing can come of an item; its ledger holds the reasons. It is written down, and the run goes on."""


@dataclass(frozen=True)
class Item:
    """
    Args:
        position: in the input.
        id: decides all that is drawn for it.
        record: what the input says.
    """

    position: int
    id: str
    record: Any

    @property
    def seed(self) -> int:
        """31 bits that only the id decides."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big") >> 1


@dataclass
class Result:
    """The rows that came of an item: those that go on, and those that are kept apart, each with its `reason`."""

    kept: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)


Step = Callable[[Item, Ledger], Awaitable[Result]]
Record = Callable[[Entry], None]


@dataclass(frozen=True)
class Job:
    """
    Args:
        name: of the set that is made, such as "vscq1"; its rows are written to `<name>.jsonl`.
        read: begins to read the input's records.
        step: what is done with each item; raises [`ItemFailed`].
        teacher: what the step asks; entered before the first item and left after the last.
        settings: all that decides the rows beside the input. A run goes on only with the same.
    """

    name: str
    read: Callable[[], Iterable[Any]]
    step: Step
    teacher: contextlib.AbstractAsyncContextManager[Any]
    settings: Mapping[str, Any]


# Does a job's step with the items, so many at a time, and has each recorded as soon as it is finished.
Runner = Callable[[Job, Iterator[Item], int, Record], None]


@dataclass(frozen=True)
class Shard:
    """The items of one machine: the `index`-th of `count` parts, counted from 1. A video's questions stay together."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """
        Reads such as "2/8".

        Raises:
            ValueError: anything else.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise ValueError(f"The shard is {text!r}; expected such as 2/8, the second of eight.")
        return cls(int(index), int(count))

    def positions(self, items: int, limit: int | None = None) -> range:
        """Of its items in an input of `items`, and only the first `limit` of them."""
        part = range((self.index - 1) * items // self.count, self.index * items // self.count)
        return part if limit is None else part[:limit]

    def folder(self, out: Path) -> Path:
        return out if self.count == 1 else out / SHARD.format(self.index, self.count)


def run(
    job: Job,
    out: Path,
    *,
    concurrency: int = 64,
    shard: Shard | None = None,
    limit: int | None = None,
    retry_failed: bool = False,
    price: Price | None = None,
    progress: bool = False,
    runner: Runner | None = None,
) -> Path:
    """
    Runs a job to its end, or goes on where it was stopped: finished items are in the journal and are not asked again.

    Memory does not grow with the input, but for a Ray runner, which holds all that is left to do. The files of a run
    are written when all its items are finished: `<name>.jsonl`,
    `dropped.jsonl` and `failed.jsonl` in the input's order, and `summary.json`.

    Args:
        out: the folder; each shard has one of its own inside.
        concurrency: items at a time.
        shard: takes a part of the items, for [`merge`].
        limit: only the first items, of the shard where there is one.
        retry_failed: try again what failed in an earlier run.
        price: of the teacher's tokens, for what is told and for the summary.
        progress: show a bar on standard error.
        runner: where the work is done, such as [`~qtsplus.synthesis.ray_runner.RayRunner`]; here when absent.

    Returns:
        the file of the kept rows.

    Raises:
        ValueError: the folder holds a run with other settings, or another process works in it; what `job` raises.
    """
    shard = shard or Shard()
    for name, value in (("concurrency", concurrency), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: expected at least 1.")
    items, digest = _measure(job.read())
    if not items:
        raise ValueError("The input holds no record.")
    folder = shard.folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"step": job.name, "input": digest, "items": items, "shard": [shard.index, shard.count], **job.settings}
    positions = shard.positions(items, limit)
    with _only_process(folder), contextlib.closing(Journal(folder)) as journal:
        journal.require_settings(wanted)
        if retry_failed:
            journal.forget_failed()
        bar = ProgressBar(f"Making {job.name}", len(positions), journal.totals(), price, enabled=progress)
        unfinished = (item for item in _mine(job, positions) if not journal.has(item.position))
        with bar:
            (runner or run_here)(job, unfinished, concurrency, _recorder(journal, bar, concurrency))
        return write_sets(folder, job.name, [journal], price)


def merge(out: Path, price: Price | None = None) -> Path:
    """
    Puts the shards of a run together, as if one machine had made them.

    Args:
        out: the folder with the folders of the shards.

    Returns:
        the file of the kept rows.

    Raises:
        ValueError: there is no shard; one is missing, unfinished, or of another run.
    """
    folders = sorted(path.parent for path in out.glob(f"shard-*/{JOURNAL}"))
    if not folders:
        raise ValueError(f"There is no shard in {out}; expected folders such as {SHARD.format(1, 8)}.")
    with contextlib.ExitStack() as stack:
        journals = [stack.enter_context(contextlib.closing(Journal(folder))) for folder in folders]
        settings = [journal.settings() for journal in journals]
        _check_shards(folders, journals, settings)
        return write_sets(out, settings[0]["step"], journals, price)


def write_sets(folder: Path, name: str, journals: Sequence[Journal], price: Price | None) -> Path:
    """Writes what journals hold, in the input's order; see [`run`]."""
    paths = [folder / f"{name}.jsonl", folder / "dropped.jsonl", folder / "failed.jsonl"]
    counts, reasons = [0] * len(paths), Counter[str]()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(f"{path}.part", "w", encoding="utf-8")) for path in paths]
        for entry in heapq.merge(*(journal.entries() for journal in journals), key=attrgetter("position")):
            failed = [{"id": entry.id, "reasons": entry.ledger.reasons}] if entry.failed else []
            for index, rows in enumerate((entry.kept, entry.dropped, failed)):
                files[index].writelines(json.dumps(row) + "\n" for row in rows)
                counts[index] += len(rows)
            reasons.update(row["reason"].partition(":")[0] for row in entry.dropped)
    for path in paths:
        os.replace(f"{path}.part", path)
    told = {"kept": counts[0], "dropped": counts[1], "dropped_because": dict(sorted(reasons.items()))}
    summary = {**_sum_up(journals, price), **told}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return paths[0]


def _sum_up(journals: Sequence[Journal], price: Price | None) -> dict[str, Any]:
    """The settings of a run, and the totals of its journals."""
    settings = {name: value for name, value in journals[0].settings().items() if name != "shard"}
    totals = Counter[str]()
    for journal in journals:
        totals.update(journal.totals())
    cost = {} if price is None else {"cost": round(price.of(totals["prompt_tokens"], totals["completion_tokens"]), 4)}
    return {**settings, "finished": totals.pop("items"), **totals, **cost}


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


def run_here(job: Job, items: Iterator[Item], concurrency: int, record: Record) -> None:
    """The [`Runner`] of this process."""

    async def run_all() -> None:
        async with job.teacher:
            await finish_all(job.step, items, concurrency, record)

    asyncio.run(run_all())


async def finish_all(step: Step, items: Iterator[Item], concurrency: int, record: Record) -> None:
    """Workers take items from one iterator, so that no more than `concurrency` of them are in memory."""

    async def work() -> None:
        for item in items:
            ledger, result, failed = Ledger(), Result(), False
            try:
                result = await step(item, ledger)
            except ItemFailed:
                failed = True
            record(Entry(item.position, item.id, failed, result.kept, result.dropped, ledger))

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _recorder(journal: Journal, bar: ProgressBar, concurrency: int) -> Record:
    """Writes items down; stops a run in which one after another fails."""
    in_a_row = 0

    def record(entry: Entry) -> None:
        nonlocal in_a_row
        journal.write(entry)
        bar.advance(entry.ledger, entry.failed)
        in_a_row = in_a_row + 1 if entry.failed else 0
        if in_a_row >= max(20, 2 * concurrency):
            raise ValueError(
                f"The last {in_a_row} items failed, the last one because {entry.ledger.reasons[-1]} Mend that, and run "
                "the same command with --retry-failed."
            )

    return record


@contextlib.contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(f"Another process works in {folder}: wait for it, or choose another folder.") from error


def _check_shards(folders: Sequence[Path], journals: Sequence[Journal], settings: Sequence[Mapping[str, Any]]) -> None:
    for folder, found in zip(folders, settings, strict=True):
        if not found:
            raise ValueError(f"{folder} holds a run that never began: run its shard first.")
        other = {**found, "shard": None} != {**settings[0], "shard": None}
        if other or found["shard"][1] != settings[0]["shard"][1]:
            raise ValueError(f"{folder} and {folders[0]} are shards of different runs: remove one of them.")
    shards = [Shard(*found["shard"]) for found in settings]
    missing = sorted(set(range(1, shards[0].count + 1)) - {shard.index for shard in shards})
    if missing:
        raise ValueError(f"{folders[0].parent} lacks the shard {missing[0]}/{shards[0].count}: run it first.")
    if len(shards) != shards[0].count:
        raise ValueError(f"{folders[0].parent} holds a shard twice: remove one of its folders.")
    for folder, journal, shard in zip(folders, journals, shards, strict=True):
        wanted, found_items = len(shard.positions(settings[0]["items"])), journal.totals()["items"]
        if found_items != wanted:
            raise ValueError(f"{folder} has finished {found_items} of {wanted} items: run that shard to its end first.")


__all__ = [
    "Item",
    "ItemFailed",
    "Job",
    "Record",
    "Result",
    "Runner",
    "Shard",
    "Step",
    "finish_all",
    "merge",
    "run",
    "run_here",
    "write_sets",
]
