"""What a benchmark leaves on disk: finished measurements while it runs, one JSON file at its end."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import __version__

# What `speed-cpu.json` and `speed-gpu.json` say in short, and how each figure is to be read.
SUMMARY = {
    "first_token_speedup": "stock's seconds from visual features to the first token, over ours",
    "file_to_first_token_speedup": "the same from the mp4 file",
    "selection_share_of_stock_prefill": "our relevance, gate and re-encoding, over stock's prefill",
    "peak_memory_ratio": "our peak memory with the weights, over stock's",
    "vision_speedup": "stock's seconds in the vision tower, over ours",
    "relevance_extra_mb": "memory of relevance at 180,000 tokens beyond its inputs and result",
    "relevance_naive_extra_mb": "the same for the readable twin",
    "growth_exponent_time": "x in: seconds of selection grow as M^x",
    "growth_exponent_memory": "x in: memory of selection grows as M^x",
    "second_question_speedup": "stock's seconds from pixels to the first token, over ours from kept features",
    "train_step_speedup": "stock's seconds of a training step with all tokens, over ours",
    "train_memory_ratio": "our peak memory in a training step, over stock's",
}


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


def spread(values: Iterable[float]) -> dict[str, float]:
    """`{"median", "low", "high"}`."""
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


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


# --------------------------------------------------------------------------------------------------------------------
# The summary
# --------------------------------------------------------------------------------------------------------------------


def label(shape: str) -> str:
    """What the files of a shape are called by: `speed-gpu.json` for "3b"."""
    return "gpu" if shape == "3b" else shape


def summarise(folder: Path, shape: str) -> dict[str, float | None]:
    """
    Gathers the figures of `speed`, `memory`, `scaling` and `train` as the `summary` of the speed file, where there is
    one, and renews the overview of the folder.

    Returns:
        a value for every name of [`SUMMARY`]; `None` where its benchmark has not been run.
    """
    name = label(shape)
    documents = {kind: read_json(folder / f"{kind}-{name}.json") for kind in ("speed", "memory", "scaling", "train")}
    figures: dict[str, float] = {}
    for document in documents.values():
        figures.update((document or {}).get("figures", {}))
    summary = {key: figures.get(key) for key in SUMMARY}
    if documents["speed"] is not None:
        write_json(folder / f"speed-{name}.json", {"summary": summary, **_without(documents["speed"], "summary")})
    write_overview(folder)
    return summary


def _without(document: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


def write_overview(folder: Path) -> None:
    """`summary.md` of a folder of results: the summaries side by side, then the stages beside their cost model."""
    found = sorted(path.stem.removeprefix("speed-") for path in folder.glob("speed-*.json"))
    columns = {name: read_json(folder / f"speed-{name}.json") or {} for name in dict.fromkeys(("cpu", "gpu", *found))}
    lines = [
        "# Results",
        "",
        "Written by `qtsplus bench`; the JSON files hold the environment and every repeat.",
        "",
        "| | " + " | ".join(columns) + " | |",
        "|---|" + "---:|" * len(columns) + "---|",
    ]
    for key, meaning in SUMMARY.items():
        values = (document.get("summary", {}).get(key) for document in columns.values())
        lines.append(f"| {key} | " + " | ".join(_figure(value) for value in values) + f" | {meaning} |")
    for name, document in columns.items():
        lines += ["", f"## {name}", "", *(_stages(document) if document else ["Not measured."])]
    (folder / "summary.md").write_text("\n".join(lines) + "\n")


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"


def _stages(document: dict[str, Any]) -> list[str]:
    """Seconds of every stage, and how far the stages of the model are from the least that this device needs."""
    facts, tokens, reached = document["environment"], document["tokens"], document["device"]
    machine = facts.get("gpu") or f"{facts['processor']}, {facts['threads']} threads"
    lines = [
        f"`{document['command']}` on {machine}; torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{document['settings']['dtype']}, attention {document['settings']['attention']}. "
        f"{tokens['visual_tokens']} visual tokens, {tokens['visual_tokens_to_lm']} to our language model, and "
        f"{tokens['text_tokens']} of text. The floor is what the cost model needs at the "
        f"{reached['flops_per_second'] / 1e12:.3g} TFLOP/s and {reached['bytes_per_second'] / 1e9:.3g} GB/s that a "
        "large matrix product and a large copy reached in the same run.",
        "",
        "| side | stage | seconds | lowest | highest | TFLOP | GB | floor, s | times the floor |",
        "|---|---|" + "---:|" * 7,
    ]
    for side, stages in document["seconds"].items():
        for stage, seconds in stages.items():
            cells = [side, stage.replace("_", " "), *(f"{seconds[name]:.3g}" for name in ("median", "low", "high"))]
            cost = document["cost"][side].get(stage)
            cells += ["", "", "", ""] if cost is None else _cost_cells(cost)
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cost_cells(cost: dict[str, float]) -> list[str]:
    values = cost["flops"] / 1e12, cost["bytes"] / 1e9, cost["floor"], cost["times_floor"]
    return [f"{value:.3g}" for value in values]
