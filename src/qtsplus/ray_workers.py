"""Work on the machines of a Ray cluster."""

import pickle
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import pyarrow

TRIES = 3  # of a block of which workers die
DEATH = f"The process that worked on it died {TRIES} times."


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
        # An object of Ray's, not an argument: Ray writes arguments into its logs.
        fn_constructor_args=(ray.put(work), begun),
        batch_size=None,  # a block
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=min(workers, len(tables))),
        **resources,
    )
    for table in finished.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for outcome in _from_table(table):
            match outcome:
                case ValueError():
                    raise outcome
                case _Deadly(block):
                    yield from lost(block)
                case _:
                    yield outcome


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
