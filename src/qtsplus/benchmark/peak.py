"""Peak memory, measured in a Python process of its own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_WORKER = (
    "import importlib, json, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"  # the parent speaks when both are interrupted
    "module, name, arguments = json.load(sys.stdin)\n"
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

    CUDA: what PyTorch's allocator gave out. CPU: resident memory of the process, by the kernel's own high-water mark on
    Linux and by looking every millisecond elsewhere.
    """
    peak = Peak()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.mb, peak.by = (torch.cuda.max_memory_allocated(device) - before) / 1e6, "CUDA allocator"
    elif _CLEAR.exists():
        _CLEAR.write_text("5")  # the high-water mark starts again from here
        before = _status("VmRSS")
        yield peak
        peak.mb, peak.by = (_status("VmHWM") - before) / 1e6, "kernel's high-water mark"
    else:
        with _sampled() as highest:
            before = highest()
            yield peak
            peak.mb, peak.by = (highest() - before) / 1e6, "samples of the resident memory"


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}; expected a Linux kernel with memory statistics.")


@contextmanager
def _sampled() -> Iterator[Callable[[], int]]:
    """Gives a function for the highest resident memory so far, in bytes."""
    process, stop = psutil.Process(), threading.Event()
    highest = process.memory_info().rss

    def look() -> int:
        nonlocal highest
        highest = max(highest, process.memory_info().rss)
        return highest

    def watch() -> None:
        while not stop.wait(0.001):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield look
    finally:
        stop.set()
        thread.join()


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
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    process = subprocess.run(
        [sys.executable, "-c", _WORKER],
        input=json.dumps([function.__module__, function.__name__, arguments]),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    if process.returncode:
        killed = "was killed (out of memory?)" if process.returncode < 0 else "failed, as said above"
        raise ChildProcessError(f"{function.__name__}({arguments}) {killed}: exit code {process.returncode}.")
    return json.loads(process.stdout.splitlines()[-1])
