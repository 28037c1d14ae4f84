"""
Which seconds and which regions of a video are evidence: for every answer (answers.py), and for the moments that a
search of a library finds (library.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ..model.layout_qtsplus import runs, token_grids
from ..video.encoded import EncodedVideo
from ..video.grids import token_maps

# Every stretch needs a token with this share of the highest relevance. This matters only if the configuration's
# `evidence_share` is lower (0.1 in the trained models, 0.5 by default): then weaker tokens, down to that share, may
# lengthen a stretch, but do not make one.
SURE = 0.4

Box = tuple[float, float, float, float]  # left, top, right and bottom, as fractions of width and height


@dataclass(frozen=True)
class Interval:
    """A stretch of a video that shows what the question asks for, as far as the selection can tell."""

    # Seconds from the video's first frame; in an answer, the seconds that a player shows (`placed` converts them).
    start: float
    end: float
    weight: float  # the share of all relevance, over all videos of the sample, that falls into this stretch
    video: int = 0  # which of the sample's videos, in prompt order
    box: Box = (0.0, 0.0, 1.0, 1.0)  # around the region with the most relevance
    name: str = ""  # in an answer, the video's name
    pixels: tuple[int, int, int, int] | None = None  # in an answer, the box in pixels of the upright frames

    def as_dict(self) -> dict[str, object]:
        """The fields as the JSON of an answer has them: there, `video` is the video's name, not its number."""
        fields = dict(vars(self), video=self.name, box=list(self.box))
        del fields["name"]
        if self.pixels is not None:
            fields["pixels"] = list(self.pixels)
        return fields


def evidence_intervals(
    kept_indices: Tensor,
    relevance: Tensor | None,
    video_grid_thw: Tensor,
    second_per_grid_ts: Sequence[float],
    merge_size: int,
    strong_share: float,
) -> list[Interval]:
    """
    The stretches of the videos that show what the question asks for.

    A stretch is a run of grid steps, each with a strong token. At least one of its tokens has [`SURE`] of the highest
    relevance. Dropped tokens count too, since the selection may keep only a few of the tokens that show the thing.

    Args:
        kept_indices: `[n]`, indices among the sample's video tokens.
        relevance: `[M]`; `None` or empty if the method does not score. Then, or if all relevance is 0, all kept tokens
            count equally, and dropped tokens do not count.
        second_per_grid_ts: seconds that one grid step of each video lasts.
        video_grid_thw, merge_size: as for [`token_grids`].
        strong_share: a token is strong if its relevance is at least this fraction of the highest; `evidence_share` of
            the configuration.

    Returns:
        intervals, the one with the most relevance first; none if nothing was kept.
    """
    if len(kept_indices) == 0:
        return []
    grids = token_grids(video_grid_thw, merge_size)
    weights = torch.zeros(sum(map(math.prod, grids)), dtype=torch.float64, device="cpu")
    if relevance is not None and len(relevance):
        weights = relevance.detach().cpu().double()
    if weights.sum() == 0:
        weights[kept_indices.cpu()] = 1.0
    strong = (weights > 0) & (weights >= strong_share * weights.max())
    weights = weights / weights.sum()
    sure = SURE * weights.max()

    intervals = []
    strong_maps = token_maps(strong, grids)
    weight_maps = token_maps(weights, grids)
    maps = zip(strong_maps, weight_maps, second_per_grid_ts, strict=False)
    for video, (is_strong, weight, seconds) in enumerate(maps):
        # a run of 1s for each run of steps with a strong token; `runs` passes over the 0s
        for _, first, end in runs(is_strong.any(2).any(1).int()):
            stretch = weight[first:end]
            if stretch.max() < sure:
                continue
            interval = Interval(
                start=first * float(seconds),
                end=end * float(seconds),
                weight=float(stretch.sum()),
                video=video,
                box=_bounding_box((stretch * is_strong[first:end]).sum(0)),
            )
            intervals.append(interval)
    return sorted(intervals, key=lambda interval: -interval.weight)


def _bounding_box(weights: Tensor) -> Box:
    """
    The box around the heaviest group of cells, from the weights `[H, W]` of all cells.

    A group is made of cells with a weight above 0 that touch at their sides. A stray cell elsewhere is another group,
    and does not enlarge the box.
    """
    groups = Image.fromarray(weights.gt(0).int().numpy())  # then each cell has the number of its group
    number = 1
    for row, column in reversed(weights.nonzero().tolist()):
        if groups.getpixel((column, row)) == 1:
            number += 1
            ImageDraw.floodfill(groups, (column, row), number)
    numbers = np.asarray(groups)
    sums = np.bincount(numbers.flatten(), weights.flatten())
    bounds: Any = Image.fromarray(numbers == sums.argmax()).getbbox()
    left, top, right, bottom = np.divide(bounds, groups.size * 2).tolist()
    return left, top, right, bottom


def placed(
    interval: Interval,
    name: str,
    video: EncodedVideo,
) -> Interval:
    """The same stretch with the times that a player shows, its video's name, and the box in pixels."""
    width = video.about.metadata.width
    height = video.about.metadata.height
    pixels = None
    if width and height:
        left, top, right, bottom = interval.box
        pixels = (
            math.floor(left * width),
            math.floor(top * height),
            math.ceil(right * width),
            math.ceil(bottom * height),
        )
    # `evidence_intervals` states whole steps in seconds; this finds the steps again.
    first = round(interval.start / video.seconds_per_step)
    start, end = video.span(first, round(interval.end / video.seconds_per_step))
    return replace(interval, start=start, end=end, name=name, pixels=pixels)
