"""What a long measurement leaves on disk: finished parts while it runs, one JSON file at its end."""

import json
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

from . import __version__


class Journal:
    """
    Finished measurements of a benchmark, a JSON line each, so that an interrupted run goes on where it stopped.

    Args:
        path: the file; hidden, and gone once the benchmark is finished.
        settings: what the measurements depend on. Lines of a run with other settings are thrown away.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.done: dict[str, Any] = {}
        settings = json.loads(json.dumps(settings))
        lines = _read_lines(path)
        if lines and lines[0] == settings:
            self.done = {line["key"]: line["value"] for line in lines[1:]}
        whole = "".join(json.dumps(line) + "\n" for line in [settings, *self._entries()])
        # Written anew where an interruption cut the last line. Else left alone: another process may be adding to it.
        if not path.exists() or path.read_text() != whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(whole)

    def _entries(self) -> list[dict[str, Any]]:
        return [{"key": key, "value": value} for key, value in self.done.items()]

    def add(self, key: str, value: Any) -> None:
        """Keeps a measurement, on disk before this returns."""
        self.done[key] = value
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")

    def finish(self, target: Path, document: dict[str, Any]) -> Path:
        """Writes the whole result, or nothing, and forgets the measurements."""
        write_json(target, document)
        self.path.unlink()
        return target


def _read_lines(path: Path) -> list[Any]:
    lines: list[Any] = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return lines


def write_json(path: Path, document: dict[str, Any] | list[Any]) -> None:
    """Writes a file that is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.writing")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A result, or `None` where there is none yet."""
    return json.loads(path.read_text()) if path.exists() else None


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


__all__ = ["Journal", "environment", "read_json", "steps", "write_json"]
