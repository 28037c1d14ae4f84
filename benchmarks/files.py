"""What a benchmark leaves on disk: one JSON file at its end, and figures."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
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


def write_result(target: Path, document: dict[str, Any], page: str) -> Path:
    """Writes a result of a run that cannot be interrupted, and its page beside it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, document)
    target.with_suffix(".md").write_text(page, encoding="utf-8")
    return target


def save_figure(figure: Figure, path: Path) -> None:
    """Writes `path.png`, the same bytes for the same figures."""
    FigureCanvasAgg(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_name(path.name + ".png"), dpi=150, metadata={"Software": None})


def run_from_command_line(run: Callable[..., Path], description: str | None, *places: str) -> None:
    """`python -m MODULE PLACE ... [--out FOLDER]` in one thread, for a benchmark that is a module of its own."""
    parser = argparse.ArgumentParser(description=description)
    for place in places:
        parser.add_argument(place, type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(run(**vars(arguments)))
