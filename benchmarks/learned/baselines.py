"""A video as a model reads it whole, and at a lower resolution, which spends fewer visual tokens without a selector."""

import math
from typing import Any

import torch

from qtsplus.evaluation.baselines import Pixels, read_at


def full_video(processor: Any, video: str) -> Pixels:
    """`pixel_values_videos`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`, as the processor makes them."""
    inputs = processor(text=[processor.video_token], videos=[video], return_tensors="pt")
    names = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    return {name: torch.as_tensor(inputs[name]) for name in names}


def lower_resolution(processor: Any, video: str, retention: float) -> Pixels:
    """
    All frames, shrunk to the smallest size, of about the same shape, that still gives `retention` of the tokens; see
    `fewer_frames` of the library.

    Raises:
        ValueError: this backbone makes as many tokens of a frame whatever its size.
    """
    if not processor.native_resolution:
        raise ValueError(f"{type(processor).__name__} has no lower resolution: its frames are all of one size.")
    merge = processor.video_processor.merge_size
    _, height, width = (processor.video_chunks(video).video_grid_thw[0] // merge).tolist()
    return read_at(processor, video, [side * merge for side in _smallest_grid(height, width, retention)])


def _smallest_grid(height: int, width: int, retention: float) -> tuple[int, int]:
    """Rows and columns of the fewest tokens that are enough; of several, those of the shape nearest to the frame's."""
    wanted = retention * height * width - 1e-9
    enough = [(r, c) for r in range(1, height + 1) for c in range(1, width + 1) if r * c >= wanted]

    def tokens_then_shape(grid: tuple[int, int]) -> tuple:
        rows, columns = grid
        return rows * columns, abs(math.log(rows * width / (columns * height))), grid

    return min(enough, key=tokens_then_shape)


__all__ = ["full_video", "lower_resolution"]
