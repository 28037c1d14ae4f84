"""Fewer frames: a way to spend fewer visual tokens without a selector; and a video's frames at any size."""

import math
from typing import Any

import numpy as np
import torch

Pixels = dict[str, torch.Tensor]


def fewer_frames(processor: Any, video: str, retention: float) -> Pixels:
    """
    A video's pixels for a model that keeps all tokens of them: of the fewest frames, evenly spaced and as large as in
    the whole video, that still give `retention` of its tokens. So the comparison never favours a selector by a
    rounding.
    """
    steps, *size = processor.video_chunks(video).video_grid_thw[0].tolist()
    wanted = max(1, math.ceil(retention * steps - 1e-9))
    return read_at(processor, video, size, num_frames=wanted * processor.video_processor.temporal_patch_size)


def read_at(processor: Any, video: str, size: list[int], **frames_to_read: Any) -> Pixels:
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
