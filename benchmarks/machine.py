"""What all measurements share: the machine that they ran on, and their progress."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qtsplus import __version__


@contextmanager
def steps(name: str, total: int, progress: bool = True) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error; what it gives is called with a line to print after each step."""
    console = Console(stderr=True, highlight=False, quiet=not progress)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=total)

        def step(line: str) -> None:
            console.print(f"{name}: {line}", soft_wrap=True)
            bar.advance(task)

        yield step


def environment(device: str) -> dict[str, Any]:
    """The machine and the software, as far as figures depend on them."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "qtsplus": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "device": device,
        # One that keeps freed memory spared stock's vision tower 37 and 49% of its time on a Xeon.
        "allocator": {
            name: os.path.basename(value)  # and not where it lies
            for name, value in os.environ.items()
            if name.startswith(("MALLOC_", "LD_PRELOAD"))
        },
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts.update(gpu=properties.name, gpu_gb=round(properties.total_memory / 2**30, 1), cuda=torch.version.cuda)
    return facts


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    for line in cpu_info.read_text().splitlines() if cpu_info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
