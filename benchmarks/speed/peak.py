"""Peak memory, measured in a Python process of its own."""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qtsplus.common.journals import Journal

from ..machine import steps

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_WORKER = (
    "import importlib, json, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"  # the parent speaks when both are interrupted
    "sys.path[:], module, name, arguments = json.load(sys.stdin)\n"  # finds modules as the parent does
    "print(json.dumps(getattr(importlib.import_module(module), name)(**arguments)))"
)


class Peak:
    """`mb`: the peak beyond what was in use at the beginning, in 10^6 bytes; `by`: how it was found."""

    mb: float = float("nan")
    by: str = ""


@contextmanager
def extra_memory(device: str) -> Iterator[Peak]:
    """
    Measures the peak memory of what runs inside, beyond what was in use before.

    CUDA: what PyTorch's allocator gave out. CPU: resident memory of the process, by Linux's own high-water mark.

    Raises:
        ValueError: the CPU of another system.
    """
    peak = Peak()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.mb, peak.by = (torch.cuda.max_memory_allocated(device) - before) / 1e6, "CUDA allocator"
    else:
        if not _CLEAR.exists():
            raise ValueError(
                f"Peak memory of a CPU process is read from Linux's {_CLEAR}, which is not here: use Linux or a GPU."
            )
        _return_freed_memory()
        _CLEAR.write_text("5")  # the high-water mark starts again from here
        before = _status("VmRSS")
        yield peak
        peak.mb, peak.by = (_status("VmHWM") - before) / 1e6, "kernel's high-water mark"


def _return_freed_memory() -> None:
    """To the system: it would hide what is used from now on."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    """A field of the process's status, in bytes."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def in_own_process(function: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """
    Calls a function of a module in a fresh Python process.

    Args:
        function: at the top of a module; returns what JSON can hold.
        arguments: what JSON can hold.

    Raises:
        ChildProcessError: the process failed, out of memory for one; says how.
    """
    # glibc would keep what was freed for later; so every tensor is its own mapping, there as long as it lives.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment = {**inherited, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    process = subprocess.run(
        [sys.executable, "-c", _WORKER],
        input=json.dumps([sys.path, function.__module__, function.__name__, arguments]),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    if process.returncode:
        killed = "was killed (out of memory?)" if process.returncode < 0 else "failed, as said above"
        raise ChildProcessError(f"{function.__name__}({arguments}) {killed}: exit code {process.returncode}.")
    return json.loads(process.stdout.splitlines()[-1])


def measure_missing(
    journal: Journal,
    name: str,
    calls: Mapping[str, Callable[[], dict[str, Any]]],
    told: Callable[[dict[str, Any]], str],
    progress: bool,
) -> None:
    """Makes the calls whose results the journal lacks, so that an interrupted run goes on, and prints what is told."""
    with steps(name, len(calls), progress) as step:
        for key, call in calls.items():
            if key not in journal.done:
                journal.add(key, call())
            step(f"{key}: {told(journal.done[key])}")
