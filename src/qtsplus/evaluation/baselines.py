"""Two ways to spend fewer visual tokens without a selector: look at fewer frames, or look at smaller ones.

Each returns a video's pixels for a model that keeps all tokens of them; at least the asked fraction of the tokens that
the processor would make of the whole video, so the comparison never favours a selector by a rounding.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..processing_qtsplus import choose_frames, read_video

Pixels = dict[str, torch.Tensor]


def full_video(processor: Any, video: str, **processor_kwargs: Any) -> Pixels:
    """`pixel_values_videos`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`, as the processor makes them."""
    videos = processor_kwargs.pop("videos", [video])
    inputs = processor(text=[processor.video_token], videos=videos, return_tensors="pt", **processor_kwargs)
    names = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    return {name: torch.as_tensor(inputs[name]) for name in names}


def fewer_frames(processor: Any, video: str, retention: float) -> Pixels:
    """The fewest frames, evenly spaced, that still give `retention` of the tokens."""
    steps = int(full_video(processor, video)["video_grid_thw"][0, 0])
    per_step = processor.video_processor.temporal_patch_size
    return full_video(processor, video, num_frames=max(1, math.ceil(retention * steps - 1e-9)) * per_step)


def lower_resolution(processor: Any, video: str, retention: float) -> Pixels:
    """All frames, shrunk to the smallest size, of about the same shape, that still gives `retention` of the tokens."""
    settings = processor.video_processor
    side = settings.patch_size * settings.merge_size
    _, height, width = (full_video(processor, video)["video_grid_thw"][0] // settings.merge_size).tolist()
    rows, columns = _smallest_grid(height, width, retention)
    choose = functools.partial(
        choose_frames,
        fps=settings.fps,
        min_frames=settings.min_frames,
        max_frames=settings.max_frames,
        temporal_patch_size=settings.temporal_patch_size,
    )
    frames, metadata = read_video(video, choose)
    size = (columns * side, rows * side)
    small = np.stack([np.asarray(Image.fromarray(one).resize(size, Image.Resampling.BICUBIC)) for one in frames])
    area = size[0] * size[1]
    return full_video(
        processor,
        video,
        videos=[small],
        video_metadata=[metadata],
        size={"shortest_edge": area, "longest_edge": area},
    )


def _smallest_grid(height: int, width: int, retention: float) -> tuple[int, int]:
    """Rows and columns of the fewest tokens that are enough; of several, those of the shape nearest to the frame's."""
    wanted = retention * height * width - 1e-9
    enough = [(r, c) for r in range(1, height + 1) for c in range(1, width + 1) if r * c >= wanted]
    return min(enough, key=lambda one: (one[0] * one[1], abs(math.log(one[0] * width / (one[1] * height))), one))


__all__ = ["Pixels", "fewer_frames", "full_video", "lower_resolution"]
