"""What a benchmark leaves on disk: one JSON file at its end, and figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qtsplus.common.journals import Journal, write_json


def begin(path: Path, settings: Mapping[str, Any]) -> Journal:
    """The journal of a benchmark; one with other settings is thrown away."""
    if path.exists() and Journal(path).settings != json.loads(json.dumps(settings)):
        path.unlink()
    return Journal(path, settings)


def finish(journal: Journal, target: Path, document: dict[str, Any]) -> Path:
    """Writes the whole result, or nothing, and forgets the journal's entries."""
    write_json(target, document)
    journal.path.unlink()
    return target


def read_result(path: Path) -> dict[str, Any] | None:
    """A result, or `None` where there is none yet."""
    return json.loads(path.read_text()) if path.exists() else None


def save_figure(figure: Figure, path: Path) -> None:
    """Writes `path.png`, the same bytes for the same figures."""
    FigureCanvasAgg(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_name(path.name + ".png"), dpi=150, metadata={"Software": None})


__all__ = ["finish", "read_result", "save_figure"]
