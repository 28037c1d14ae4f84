"""The benchmarks' figures, each as PNG and SVG."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..files import save_figure

_COLOURS = {"stock": "#8c8c8c", "ours": "#0b6e99"}
_SIDES = {"stock": "stock", "ours": "QTSplus"}
_STAGE_COLOURS = {
    "decode": "#c9c9c9",
    "preprocess": "#a3a3a3",
    "reading": "#8f8f8f",
    "vision": "#6a9f58",
    "relevance": "#e49444",
    "gate": "#f1c40f",
    "re-encode": "#d1615d",
    "prefill": "#0b6e99",
}


def draw_stages(document: dict[str, Any], path: Path) -> None:
    """Where the seconds from file to first token go, a bar for each side."""
    sides = [side for side in reversed(_SIDES) if side in document["seconds"]]
    figure = Figure(figsize=(8, 1.4 + 0.6 * len(sides)), layout="constrained")
    axes = figure.subplots()
    for row, side in enumerate(sides):
        left = 0.0
        for stage, colour in _STAGE_COLOURS.items():
            if stage in document["seconds"][side]:
                seconds = document["seconds"][side][stage]["median"]
                axes.barh(row, seconds, left=left, color=colour)
                left += seconds
        axes.text(left, row, f"  {left:.3g} s", va="center")
    axes.set_yticks(range(len(sides)), [_SIDES[side] for side in sides])
    axes.set_xlabel("seconds, medians of the stages up to the first token")
    axes.margins(x=0.12)
    handles = [Patch(color=colour, label=stage) for stage, colour in _STAGE_COLOURS.items()]
    axes.legend(handles=handles, ncols=8, loc="upper center", bbox_to_anchor=(0.5, 1.25), frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_frames(documents: Mapping[str, dict[str, Any]], path: Path) -> None:
    """
    The paper's figure: visual embeddings that reach the language model, and end-to-end latency, against the number of
    frames.

    Args:
        documents: what `python -m benchmarks speed` wrote, by what each is called.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, document), line in zip(documents.items(), cycle(("-", "--", ":", "-.")), strict=False):
        points = sorted(document["frames"], key=lambda point: point["frames"])
        frames = [point["frames"] for point in points]
        for side, colour in _COLOURS.items():
            style = {"color": colour, "marker": "o", "markersize": 4, "linestyle": line}
            left.plot(frames, [point[side]["visual_tokens_to_lm"] for point in points], **style)
            seconds = [point[side]["file_to_first_token"] for point in points]
            median = [value["median"] for value in seconds]
            spread = [
                [value["median"] - value["low"] for value in seconds],
                [value["high"] - value["median"] for value in seconds],
            ]
            right.errorbar(frames, median, yerr=spread, capsize=2, label=f"{_SIDES[side]}, {name}", **style)
    left.set_ylabel("visual embeddings to the language model")
    right.set_ylabel("seconds from file to first token")
    for axes in (left, right):
        axes.set_xlabel("frames")
        axes.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_scaling(document: dict[str, Any], path: Path) -> None:
    """Time and memory of selection against the number of visual tokens, with the fitted power laws."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = zip(figure.subplots(1, 2), ("seconds", "extra_mb"), ("time", "memory"), strict=True)
    tokens = [point["tokens"] for point in document["sizes"]]
    for axes, field, name in panels:
        fit = document["fits"][name]
        axes.loglog(tokens, [point[field]["median"] for point in document["sizes"]], "o", color=_COLOURS["ours"])
        axes.loglog(
            tokens,
            [fit["factor"] * count ** fit["exponent"] for count in tokens],
            color=_COLOURS["stock"],
            label=f"M^{fit['exponent']:.2f}",
        )
        axes.set_xlabel("visual tokens M")
        axes.set_ylabel({"seconds": "seconds of selection", "extra_mb": "peak memory beyond the inputs, MB"}[field])
        axes.legend(frameon=False)
    save_figure(figure, path)
