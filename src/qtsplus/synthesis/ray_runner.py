"""Runs a step on the machines of a Ray cluster: the same step, and the same journal here."""

import asyncio
import itertools
import pickle
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .engine import Entry, Item, Job, Ledger, Recorder, finish_all

if TYPE_CHECKING:
    import pyarrow

BLOCK = 4  # items that a worker is given at a time, for each that it works on at a time


@dataclass(frozen=True)
class RayRunner:
    """
    The [`~qtsplus.synthesis.engine.Runner`] of a Ray cluster, with one worker on each of its machines.

    The workers share the concurrency. Finished items come back when all of their block are finished; those of a block
    that was under way when this process was killed are asked again, and what they cost is not counted.
    """

    address: str  # "auto" for the cluster that this machine belongs to, "local" for a new one here

    def __post_init__(self) -> None:
        import ray.data  # noqa: F401

    def __call__(self, job: Job, items: Iterator[Item], concurrency: int, recorder: Recorder) -> None:
        import ray

        first = next(items, None)
        if first is None:  # nothing is left to do
            return
        try:
            _knock(self.address)
            # What workers print stays in Ray's logs on their machines.
            ray.init(address=self.address, log_to_driver=False, logging_level="error")
        except (OSError, ValueError, RuntimeError) as error:
            place = self.address.rpartition("@")[2]  # without a password
            raise ValueError(
                f"--ray is {place!r}, and no Ray cluster answers there; expected an address such as "
                "10.0.0.1:6379, auto or local."
            ) from error
        try:
            for position, entry, ledger in _finished(job, itertools.chain([first], items), concurrency):
                recorder.spend(ledger.costs)
                recorder.record(position, entry, ledger)
        finally:
            ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself tries an address for minutes."""
    place = urlsplit(address if "://" in address else f"ray://{address}")
    if place.port is not None:
        with socket.create_connection((place.hostname, place.port), timeout=10):
            pass


def _finished(job: Job, items: Iterator[Item], concurrency: int) -> Iterator[tuple[int, Entry, Ledger]]:
    """The entries of items as their blocks are finished, with what they cost."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext, from_arrow_refs

    DataContext.get_current().enable_progress_bars = False
    workers = min(concurrency, sum(node["Alive"] for node in ray.nodes()))
    share = concurrency // workers
    # An object of Ray's, not an argument: Ray writes arguments into its logs, and the endpoint holds the key.
    work = ray.put((job.step, job.teacher))
    blocks = [ray.put(_to_table(block)) for block in iter(lambda: list(itertools.islice(items, BLOCK * share)), [])]
    finished = from_arrow_refs(blocks).map_batches(
        _Worker,
        fn_constructor_args=(work, share),
        batch_size=None,  # a block
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=min(workers, len(blocks))),
    )
    for table in finished.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for outcome in _from_table(table):
            if isinstance(outcome, ValueError):
                raise outcome
            yield outcome


class _Worker:
    """Works on blocks, one after another, with one teacher for all of them."""

    def __init__(self, work: Any, concurrency: int):
        import ray

        self.step, teacher = ray.get(work)
        self.concurrency = concurrency
        self.loop = asyncio.new_event_loop()
        # It is left when Ray ends this process.
        self.loop.run_until_complete(teacher.__aenter__())

    def __call__(self, block: "pyarrow.Table") -> "pyarrow.Table":
        rows: list[tuple[int, Entry, Ledger] | ValueError] = []
        work = finish_all(self.step, _from_table(block), self.concurrency, lambda *finished: rows.append(finished))
        try:
            self.loop.run_until_complete(work)
        except ValueError as error:
            # Raised here, it would come with Ray's traces, and without what the block has finished.
            rows.append(ValueError(str(error)))
        return _to_table(rows)


def _to_table(rows: Iterable[Any]) -> "pyarrow.Table":
    import pyarrow

    return pyarrow.table({"row": pyarrow.array([pickle.dumps(row) for row in rows], pyarrow.large_binary())})


def _from_table(table: "pyarrow.Table") -> Iterator[Any]:
    return (pickle.loads(row) for row in table["row"].to_pylist())
