"""The summary of what speed, memory, growth and training cost, and the overview of a folder of results."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qtsplus.common.journals import write_json

from ..files import read_result

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


def spread(values: Iterable[float]) -> dict[str, float]:
    """`{"median", "low", "high"}`."""
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def label(shape: str) -> str:
    """What the files of a shape are called by: `speed-gpu.json` for "3b"."""
    return "gpu" if shape == "3b" else shape


def device_name(document: dict[str, Any]) -> str:
    """What a result was measured on: the GPU, or "CPU" with its name and threads."""
    facts = document["environment"]
    return facts.get("gpu") or f"CPU ({facts['processor']}, {facts['threads']} threads)"


def summarise(folder: Path, shape: str) -> dict[str, float | None]:
    """
    Gathers the figures of `speed`, `memory`, `scaling` and `train` as the `summary` of the speed file, where there is
    one, and renews the overview of the folder.

    Returns:
        a value for every name of [`SUMMARY`]; `None` where its benchmark has not been run.
    """
    name = label(shape)
    documents = {kind: read_result(folder / f"{kind}-{name}.json") for kind in ("speed", "memory", "scaling", "train")}
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
    columns = {name: read_result(folder / f"speed-{name}.json") or {} for name in dict.fromkeys(("cpu", "gpu", *found))}
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks`; the JSON files hold the environment and every repeat.",
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
            cells = [
                side.replace("_", " "),
                stage.replace("_", " "),
                *(f"{seconds[name]:.3g}" for name in ("median", "low", "high")),
            ]
            cost = document["cost"].get(side, {}).get(stage)
            cells += ["", "", "", ""] if cost is None else _cost_cells(cost)
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cost_cells(cost: dict[str, float]) -> list[str]:
    values = cost["flops"] / 1e12, cost["bytes"] / 1e9, cost["floor"], cost["times_floor"]
    return [f"{value:.3g}" for value in values]
