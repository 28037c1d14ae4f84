"""What needles in long videos come to: heat maps of length by depth, and a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..figures import save_figure
from .tables import markdown_table, percent, percent_interval

_MEASURES = {"share": "needle tokens kept", "accuracy": "right answers"}


def write_needle_report(document: Mapping[str, Any], path: Path) -> None:
    """`path.md` and `path.png`."""
    path.with_name(path.name + ".md").write_text("\n".join(_page(document)) + "\n", encoding="utf-8")
    save_figure(_draw(document), path)


def _page(document: Mapping[str, Any]) -> list[str]:
    settings = document["settings"]
    tokens, share = settings["max_visual_tokens"], settings["retention"]
    budget = f"{tokens} visual tokens kept" if tokens is not None else "the model's own budget"
    budget = f"{percent(share)} of the visual tokens kept" if tokens is None and share is not None else budget
    depths = ", ".join(f"{depth:g}" for depth in settings["depths"])
    rows = [
        [
            row["selection"],
            time_of(row["length"]),
            f"{row['kept']:.0f} of {row['visual_tokens']}",
            percent(row["found"]),
            *(percent_interval(row["intervals"][name], row[name]) for name in _MEASURES),
        ]
        for row in document["lengths"]
    ]
    columns = ["selection", "length", "tokens kept", "needles found", "needle tokens kept", "right answers"]
    return [
        f"{settings['needles']} needles, each at the depths {depths}; {budget}. A needle is found where one of its "
        f"tokens is kept. A step of the video is {settings['seconds_per_step']:g} s and has "
        f"{settings['tokens_per_step']} tokens. Intervals: 95%, over needles.",
        *(line for warning in document["warnings"] for line in ("", warning)),
        "",
        f"`{document['command']}`",
        "",
        *markdown_table(columns, rows),
    ]


def time_of(seconds: float) -> str:
    """A length as people say it."""
    if seconds < 120:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} min"


def _draw(document: Mapping[str, Any]) -> Figure:
    """A heat map for each measure, row by row, and selection."""
    settings = document["settings"]
    lengths, depths, selections = (settings[name] for name in ("lengths", "depths", "selections"))
    cells = {(cell["selection"], cell["length"], cell["depth"]): cell for cell in document["cells"]}
    size = (1.2 + len(selections) * (0.9 + 0.42 * len(lengths)), 1.0 + len(_MEASURES) * (0.7 + 0.34 * len(depths)))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(_MEASURES), len(selections), squeeze=False, sharex=True, sharey=True)
    for row, (measure, title) in zip(panels, _MEASURES.items(), strict=True):
        for axes, selection in zip(row, selections, strict=True):
            values = np.array([[cells[selection, length, depth][measure] for length in lengths] for depth in depths])
            image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            for place, value in np.ndenumerate(values):
                colour = "white" if value < 0.6 else "black"
                axes.text(place[1], place[0], f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=7)
            axes.set_title(selection.replace("_", " "), fontsize=9)
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            axes.set_xticks(range(len(lengths)), map(time_of, lengths), rotation=60, fontsize=7)
        row[0].set_ylabel(f"{title}, %\ndepth", fontsize=9)
        figure.colorbar(image, ax=list(row), fraction=0.02)
    for axes in panels[-1]:
        axes.set_xlabel("length of the video", fontsize=8)
    return figure


__all__ = ["time_of", "write_needle_report"]
