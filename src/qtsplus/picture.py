"""Draws the frames that a model saw, with the tokens that it kept lit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DIMMED = 0.22  # brightness of what was dropped


def frames_from_patches(
    pixel_values_videos: torch.Tensor,
    grid_thw: Sequence[int],
    *,
    patch_size: int,
    temporal_patch_size: int,
    merge_size: int,
    image_mean: Sequence[float],
    image_std: Sequence[float],
) -> np.ndarray:
    """
    Undoes the video processor's patches: the first frame of every grid step, as the model saw it.

    Args:
        pixel_values_videos: `[T * H * W, 3 * temporal_patch_size * patch_size**2]` of one video.
        grid_thw: (T, H, W) in patches, before the spatial merge.

    Returns:
        `[T, H * patch_size, W * patch_size, 3]` uint8.
    """
    steps, height, width = (int(size) for size in grid_thw)
    patches = (
        pixel_values_videos.float()
        .cpu()
        .reshape(
            *(steps, height // merge_size, width // merge_size, merge_size, merge_size),
            *(3, temporal_patch_size, patch_size, patch_size),
        )
    )
    # [T, h, w, merge_h, merge_w, 3, patch_h, patch_w] -> [T, h, merge_h, patch_h, w, merge_w, patch_w, 3]
    frames = patches[:, :, :, :, :, :, 0].permute(0, 1, 3, 6, 2, 4, 7, 5)
    frames = frames.reshape(steps, height * patch_size, width * patch_size, 3)
    frames = frames * torch.tensor(list(image_std)) + torch.tensor(list(image_mean))
    return (frames.clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def draw_kept_tokens(
    frames: np.ndarray,
    keep_map: torch.Tensor,
    seconds_per_step: float,
    path: str | Path,
    *,
    title: str,
    max_frames: int = 12,
) -> Path:
    """
    Saves a picture of the frames in which only the kept tokens are lit, above the count of kept tokens over time.

    Args:
        frames: `[T, H', W', 3]` uint8, one frame per grid step.
        keep_map: bool `[T, H, W]`, in tokens; H' and W' are multiples of H and W.
        seconds_per_step: what one grid step lasts.
        path: where the PNG goes.
        max_frames: most frames to show, spread evenly over the video.

    Returns:
        the path.
    """
    steps = len(frames)
    shown = np.unique(np.linspace(0, steps - 1, min(steps, max_frames)).round().astype(int))
    columns = -(-len(shown) // -(-len(shown) // 6))  # equally long rows of at most 6
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2 * columns, 2.2 * rows + 1.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[2.0] * rows + [1.1])
    for place, step in enumerate(shown):
        axes = figure.add_subplot(grid[place // columns, place % columns])
        axes.imshow(_lit(frames[step], keep_map[step].numpy()))
        axes.set_title(f"{step * seconds_per_step:.1f} s", fontsize=9)
        axes.axis("off")
    axes = figure.add_subplot(grid[rows, :])
    counts = keep_map.sum((1, 2)).numpy()
    axes.bar(np.arange(steps) * seconds_per_step, counts, width=seconds_per_step * 0.9, align="edge", color="#d9822b")
    axes.set_xlim(0, steps * seconds_per_step)
    axes.set_ylim(0, keep_map[0].numel())
    axes.set_xlabel("seconds")
    axes.set_ylabel(f"kept of {keep_map[0].numel()}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _lit(frame: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """`[H', W', 3]` uint8 with the dropped tokens' regions dimmed."""
    cell = (frame.shape[0] // kept.shape[0], frame.shape[1] // kept.shape[1])
    light = np.kron(np.where(kept, 1.0, _DIMMED), np.ones(cell))
    return (frame * light[:, :, None]).astype(np.uint8)
