"""What is kept for several questions, beside each other: the pictures of the README."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qtsplus.asking.picture import lit


def draw_kept_tokens(
    frames: np.ndarray,
    kept: Sequence[tuple[str, torch.Tensor]],
    seconds_per_step: float,
    path: Path,
) -> None:
    """
    Saves a PNG with a row of frames for every answer, eight at most, in which only the tokens that it kept are lit.

    Args:
        frames: `[T, H', W', 3]` uint8, one frame per grid step.
        kept: per answer a title and the keep map, bool `[T, H, W]`, in tokens; H' and W' are multiples of H and W.
    """
    steps = len(frames)
    shown = np.unique(np.linspace(0, steps - 1, min(steps, 8)).round().astype(int))
    figure = Figure(figsize=(1.5 * len(shown), 2.0 * len(kept)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (title, keep_map) in zip(figure.subfigures(len(kept), squeeze=False)[:, 0], kept, strict=True):
        row.suptitle(title, fontsize=10)
        for axes, step in zip(row.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            axes.imshow(lit(frames[step], keep_map[step].numpy()))
            axes.set_title(f"{step * seconds_per_step:.0f} s", fontsize=8)
            axes.axis("off")
    figure.savefig(path, dpi=110, metadata={"Software": None})
