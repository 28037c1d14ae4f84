"""The questions of a file on the machines of a Ray cluster."""

import pickle
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from .batch import Asker, Results, Task

TRIES = 3  # of a video of which workers die


def answer_on_ray(
    asker: Asker, videos: list[list[Task]], address: str = "local", workers: int | None = None
) -> Results:
    """
    Workers on a Ray cluster, each with a model; when one dies, another asks about its video, twice at most.

    Args:
        address: "auto" for the cluster that this machine belongs to, "local" for a new one here.
        workers: one on each GPU of the cluster, or else on each machine, when absent.
    """
    if not videos:
        return
    import ray
    from ray.data import ActorPoolStrategy, DataContext, from_arrow_refs

    connect(address)
    try:
        gpus, machines = int(ray.cluster_resources().get("GPU", 0)), sum(node["Alive"] for node in ray.nodes())
        resources: dict[str, int] = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        DataContext.get_current().enable_progress_bars = False
        tables = [ray.put(_to_table([block])) for block in enumerate(videos)]
        begun = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Begun).remote()
        finished = from_arrow_refs(tables).map_batches(
            _Worker,
            # An object of Ray's, not an argument: Ray writes arguments into its logs.
            fn_constructor_args=(ray.put(asker), begun),
            batch_size=None,  # a block
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=min(workers or gpus or machines, len(tables))),
            **resources,
        )
        for table in finished.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for outcome in _from_table(table):
                if isinstance(outcome, ValueError):  # raised there, it would come with Ray's traces
                    raise outcome
                yield outcome
    finally:
        ray.shutdown()


def connect(address: str) -> None:
    """Raises `ValueError` where no cluster answers."""
    import ray

    try:
        place = urlsplit(address if "://" in address else f"ray://{address}")
        if place.port is not None:  # Ray itself tries an address for minutes
            socket.create_connection((place.hostname, place.port), timeout=10).close()
        # What workers print stays in Ray's logs on their machines.
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        shown = address.rpartition("@")[2]  # without a password
        raise ValueError(
            f"--ray is {shown!r}, and no Ray cluster answers there; expected an address such as 10.0.0.1:6379, auto "
            "or local."
        ) from error


class _Begun:
    """How often each block was begun. Ray itself would begin one for ever whose workers die."""

    def __init__(self) -> None:
        self.times = Counter[int]()

    def again(self, block: int) -> int:
        self.times[block] += 1
        return self.times[block]


class _Worker:
    def __init__(self, asker: Any, begun: Any):
        import ray

        self.asker, self.begun = ray.get(asker), begun

    def __call__(self, table: Any) -> Any:
        import ray

        ((number, tasks),) = _from_table(table)
        if ray.get(self.begun.again.remote(number)) > TRIES:
            death = {"error": f"The process that worked on it died {TRIES} times."}
            return _to_table([(task.number, death) for task in tasks])
        try:
            return _to_table(self.asker(tasks))
        except (ValueError, OSError) as error:  # such as a model that cannot be loaded
            return _to_table([ValueError(str(error))])


def _to_table(rows: Iterable[Any]) -> Any:
    import pyarrow

    return pyarrow.table({"row": pyarrow.array([pickle.dumps(row) for row in rows], pyarrow.large_binary())})


def _from_table(table: Any) -> Iterator[Any]:
    return (pickle.loads(row) for row in table["row"].to_pylist())
