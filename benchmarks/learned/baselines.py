"""A video as a model reads it whole, and two ways to spend fewer visual tokens without a selector."""

import math
from typing import Any

import numpy as np
import torch

Pixels = dict[str, torch.Tensor]


def full_video(processor: Any, video: str) -> Pixels:
    """`pixel_values_videos`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`, as the processor makes them."""
    inputs = processor(text=[processor.video_token], videos=[video], return_tensors="pt")
    names = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    return {name: torch.as_tensor(inputs[name]) for name in names}


def lower_resolution(processor: Any, video: str, retention: float) -> Pixels:
    """
    All frames, shrunk to the smallest size, of about the same shape, that still gives `retention` of the tokens; see
    [`fewer_frames`].

    Raises:
        ValueError: this backbone makes as many tokens of a frame whatever its size.
    """
    if not processor.native_resolution:
        raise ValueError(f"{type(processor).__name__} has no lower resolution: its frames are all of one size.")
    merge = processor.video_processor.merge_size
    _, height, width = (processor.video_chunks(video).video_grid_thw[0] // merge).tolist()
    return _read_at(processor, video, [side * merge for side in _smallest_grid(height, width, retention)])


def fewer_frames(processor: Any, video: str, retention: float) -> Pixels:
    """
    A video's pixels for a model that keeps all tokens of them: of the fewest frames, evenly spaced and as large as in
    the whole video, that still give `retention` of its tokens. So the comparison never favours a selector by a
    rounding.
    """
    steps, *size = processor.video_chunks(video).video_grid_thw[0].tolist()
    wanted = max(1, math.ceil(retention * steps - 1e-9))
    return _read_at(processor, video, size, num_frames=wanted * processor.video_processor.temporal_patch_size)


def _read_at(processor: Any, video: str, size: list[int], **frames_to_read: Any) -> Pixels:
    """
    A video's pixels with frames of `size`, (height, width) as in the grid.

    Args:
        frames_to_read: which frames, as for the processor's `video_chunks`.
    """
    chunks = processor.video_chunks(video, **frames_to_read)
    frames = np.stack(list(chunks.decode()))
    pixels, grid = processor.preprocess_frames(frames, torch.tensor([[len(frames), *size]]))
    seconds = torch.tensor(chunks.second_per_grid_ts)
    return {"pixel_values_videos": pixels, "video_grid_thw": grid, "second_per_grid_ts": seconds}


def _smallest_grid(height: int, width: int, retention: float) -> tuple[int, int]:
    """Rows and columns of the fewest tokens that are enough; of several, those of the shape nearest to the frame's."""
    wanted = retention * height * width - 1e-9
    enough = [(r, c) for r in range(1, height + 1) for c in range(1, width + 1) if r * c >= wanted]

    def tokens_then_shape(grid: tuple[int, int]) -> tuple:
        rows, columns = grid
        return rows * columns, abs(math.log(rows * width / (columns * height))), grid

    return min(enough, key=tokens_then_shape)
