"""Work on the machines of a Ray cluster."""

import pickle
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import pyarrow


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
    work: Callable[[list[Any]], list[Any]], blocks: Iterable[list[Any]], workers: int, **resources: float
) -> Iterator[Any]:
    """
    What `work` makes of blocks, on a [`cluster`], as each is finished; the block of a worker that dies is done again.

    Args:
        work: each worker has a copy. A `ValueError` among its results is raised here: raised there, it would come with
            Ray's traces, and without what the block has finished.
        resources: of each worker, such as `num_gpus=1`.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext, from_arrow_refs

    DataContext.get_current().enable_progress_bars = False
    tables = [ray.put(_to_table(block)) for block in blocks]
    finished = from_arrow_refs(tables).map_batches(
        _Worker,
        # An object of Ray's, not an argument: Ray writes arguments into its logs.
        fn_constructor_args=(ray.put(work),),
        batch_size=None,  # a block
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=min(workers, len(tables))),
        **resources,
    )
    for table in finished.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for outcome in _from_table(table):
            if isinstance(outcome, ValueError):
                raise outcome
            yield outcome


class _Worker:
    def __init__(self, work: Any):
        import ray

        self.work = ray.get(work)

    def __call__(self, block: "pyarrow.Table") -> "pyarrow.Table":
        return _to_table(self.work(list(_from_table(block))))


def _to_table(rows: Iterable[Any]) -> "pyarrow.Table":
    import pyarrow

    return pyarrow.table({"row": pyarrow.array([pickle.dumps(row) for row in rows], pyarrow.large_binary())})


def _from_table(table: "pyarrow.Table") -> Iterator[Any]:
    return (pickle.loads(row) for row in table["row"].to_pylist())
