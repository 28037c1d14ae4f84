"""Work on the machines of a Ray cluster: the same steps, and the same journal here."""

import asyncio
import itertools
import pickle
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .engine import Entry, Item, Job, Ledger, Recorder, Result, finish_all

if TYPE_CHECKING:
    import pyarrow

BLOCK = 4  # items that a worker is given at a time, for each that it works on at a time
TRIES = 3  # of a block of which workers die
DEATH = f"The process that worked on it died {TRIES} times."


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
        first = next(items, None)
        if first is None:  # nothing is left to do
            return
        left = itertools.chain([first], items)
        with cluster(self.address) as machines:
            workers = min(concurrency, machines)
            steps = _Steps(job, concurrency // workers)
            blocks = iter(lambda: list(itertools.islice(left, BLOCK * steps.concurrency)), [])

            def lost(block: list[Item]) -> Iterator[Any]:
                if len(block) > 1:
                    yield from spread(steps, ([item] for item in block), workers, lost)
                else:
                    entry = {"id": block[0].id, "failed": True, **vars(Result()), "reasons": [DEATH]}
                    yield block[0].position, entry, Ledger()

            for position, entry, ledger in spread(steps, blocks, workers, lost):
                recorder.spend(ledger.costs)
                recorder.record(position, entry, ledger)


class _Steps:
    """A job's step with blocks, one after another, with one teacher for all of them."""

    def __init__(self, job: Job, concurrency: int):
        self.step, self.teacher, self.concurrency = job.step, job.teacher, concurrency
        self.loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, block: list[Item]) -> list[tuple[int, Entry, Ledger] | ValueError]:
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            # It is left when Ray ends this process.
            self.loop.run_until_complete(self.teacher.__aenter__())
        rows: list[tuple[int, Entry, Ledger] | ValueError] = []
        work = finish_all(self.step, iter(block), self.concurrency, lambda *finished: rows.append(finished))
        try:
            self.loop.run_until_complete(work)
        except ValueError as error:
            rows.append(ValueError(str(error)))
        return rows


@contextmanager
def cluster(address: str) -> Iterator[int]:
    """
    A connection to a Ray cluster, which gives how many machines it has.

    Raises:
        ValueError: no cluster answers.
    """
    import ray

    try:
        _knock(address)
        # What workers print stays in Ray's logs on their machines.
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        place = address.rpartition("@")[2]  # without a password
        raise ValueError(
            f"--ray is {place!r}, and no Ray cluster answers there; expected an address such as "
            "10.0.0.1:6379, auto or local."
        ) from error
    try:
        yield sum(node["Alive"] for node in ray.nodes())
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself tries an address for minutes."""
    place = urlsplit(address if "://" in address else f"ray://{address}")
    if place.port is not None:
        with socket.create_connection((place.hostname, place.port), timeout=10):
            pass


def spread(
    work: Callable[[list[Any]], Iterable[Any]],
    blocks: Iterable[list[Any]],
    workers: int,
    lost: Callable[[list[Any]], Iterable[Any]],
    **resources: float,
) -> Iterator[Any]:
    """
    What `work` makes of blocks, on a [`cluster`], as each is finished; the block of a worker that dies is done again.

    Args:
        work: each worker has a copy. A `ValueError` that it raises, or has among its results, is raised here: raised
            there, it would come with Ray's traces.
        lost: the results of a block of which [`TRIES`] workers have died.
        resources: of each worker, such as `num_gpus=1`.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext, from_arrow_refs

    DataContext.get_current().enable_progress_bars = False
    tables = [ray.put(_to_table([block])) for block in enumerate(blocks)]
    begun = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Begun).remote()
    finished = from_arrow_refs(tables).map_batches(
        _Worker,
        # An object of Ray's, not an argument: Ray writes arguments into its logs, and an endpoint holds the key.
        fn_constructor_args=(ray.put(work), begun),
        batch_size=None,  # a block
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=min(workers, len(tables))),
        **resources,
    )
    deadly = []
    for table in finished.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for outcome in _from_table(table):
            match outcome:
                case ValueError():
                    raise outcome
                case _Deadly(block):
                    deadly.append(block)
                case _:
                    yield outcome
    for block in deadly:  # now that the workers have left the cluster
        yield from lost(block)


@dataclass(frozen=True)
class _Deadly:
    block: list[Any]


class _Begun:
    """How often each block was begun. Ray itself would begin one for ever whose workers die."""

    def __init__(self) -> None:
        self.times = Counter[int]()

    def again(self, block: int) -> int:
        self.times[block] += 1
        return self.times[block]


class _Worker:
    def __init__(self, work: Any, begun: Any):
        import ray

        self.work, self.begun = ray.get(work), begun

    def __call__(self, table: "pyarrow.Table") -> "pyarrow.Table":
        import ray

        ((number, block),) = _from_table(table)
        if ray.get(self.begun.again.remote(number)) > TRIES:
            return _to_table([_Deadly(block)])
        try:
            return _to_table(self.work(block))
        except (ValueError, OSError) as error:  # such as a model that cannot be loaded
            return _to_table([ValueError(str(error))])


def _to_table(rows: Iterable[Any]) -> "pyarrow.Table":
    import pyarrow

    return pyarrow.table({"row": pyarrow.array([pickle.dumps(row) for row in rows], pyarrow.large_binary())})


def _from_table(table: "pyarrow.Table") -> Iterator[Any]:
    return (pickle.loads(row) for row in table["row"].to_pylist())
