"""Draws the frames that a model saw, with the tokens that it kept lit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DIMMED = 0.22  # brightness of what was dropped


def draw_kept_tokens(
    frames: np.ndarray,
    kept: Sequence[tuple[str, torch.Tensor]],
    seconds_per_step: float,
    path: str | Path,
    *,
    max_frames: int = 8,
) -> Path:
    """
    Saves a picture with a row of frames for every answer, in which only the tokens that it kept are lit.

    Args:
        frames: `[T, H', W', 3]` uint8, one frame per grid step.
        kept: per answer a title and the keep map, bool `[T, H, W]`, in tokens; H' and W' are multiples of H and W.
        seconds_per_step: what one grid step lasts.
        path: where the PNG goes.
        max_frames: most frames to show, spread evenly over the video.

    Returns:
        the path.
    """
    steps = len(frames)
    shown = np.unique(np.linspace(0, steps - 1, min(steps, max_frames)).round().astype(int))
    figure = Figure(figsize=(1.5 * len(shown), 2.0 * len(kept)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (title, keep_map) in zip(figure.subfigures(len(kept), squeeze=False)[:, 0], kept, strict=True):
        row.suptitle(title, fontsize=10)
        for axes, step in zip(row.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            axes.imshow(_lit(frames[step], keep_map[step].numpy()))
            axes.set_title(f"{step * seconds_per_step:.0f} s", fontsize=8)
            axes.axis("off")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def _lit(frame: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """`[H', W', 3]` uint8 with the dropped tokens' regions dimmed."""
    cell = (frame.shape[0] // kept.shape[0], frame.shape[1] // kept.shape[1])
    light = np.kron(np.where(kept, 1.0, _DIMMED), np.ones(cell))
    return (frame * light[:, :, None]).astype(np.uint8)
