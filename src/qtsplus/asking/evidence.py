"""
Which seconds and which regions of a video are evidence: for every answer (answers.py), and for the moments that a
search of a library finds (library.py). Whether an answer calls them "shown probably" is `Answer.shown`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from ..model.layout_qtsplus import token_grids
from ..video.encoded import EncodedVideo
from ..video.grids import token_maps

# Every stretch needs a token with this share of the highest relevance. Weaker tokens, down to `evidence_share` of the
# configuration, show how long a thing is there, and not that it is.
SURE = 0.4

Box = tuple[float, float, float, float]  # left, top, right and bottom, as fractions of width and height


@dataclass(frozen=True)
class Interval:
    """A stretch of a video that shows what the question asks for, as far as the selection can tell."""

    start: float  # seconds; from the first frame, or on a player's clock in an answer of `qtsplus.asking.session`
    end: float
    weight: float  # share of the sample's relevance that lies in it
    video: int = 0  # which of the sample's videos, in prompt order
    # (left, top, right, bottom) of the region in the frame with the most of it, as fractions of its width and height
    box: Box = (0.0, 0.0, 1.0, 1.0)
    name: str = ""  # in an answer, the video's name
    pixels: tuple[int, int, int, int] | None = None  # in an answer, the box in pixels of the upright frames

    def as_dict(self) -> dict[str, object]:
        """As it stands in the JSON of an answer."""
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
    The stretches of the videos that hold strong tokens, one of them with [`SURE`] of the highest relevance at least.
    Neighbouring grid steps form one stretch.

    What shows a thing may be more than an answer needs: tokens are strong whether or not they were kept.

    Args:
        kept_indices: `[n]`, indices among the sample's video tokens.
        relevance: `[M]`; `None` or empty where the selection did not look (every kept token is then as strong, and no
            other).
        second_per_grid_ts: seconds that one grid step of each video lasts.
        video_grid_thw, merge_size: as for [`token_grids`].
        strong_share: of the highest relevance, what makes a token strong; `evidence_share` of the configuration.

    Returns:
        intervals, the one with the most relevance first; none if nothing was kept.
    """
    if len(kept_indices) == 0:
        return []
    grids = token_grids(video_grid_thw, merge_size)
    weights = torch.zeros(sum(map(math.prod, grids)), dtype=torch.float64)
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
        for first, end in _runs(is_strong.any(2).any(1).tolist()):
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


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The first place of each run of true flags, and the place behind its last."""
    for is_run, group in groupby(range(len(flags)), key=flags.__getitem__):
        places = list(group)
        if is_run:
            yield places[0], places[-1] + 1


def _bounding_box(weights: Tensor) -> Box:
    """
    (left, top, right, bottom) as fractions of the whole, of the group with the most weight among the cells `[H, W]`
    that have some. Cells of a group share sides, so that one cell elsewhere does not make the box thrice the object.
    """
    height, width = weights.shape
    cells = map(tuple, weights.nonzero().tolist())
    ungrouped = dict.fromkeys(cells)  # in the order of the rows
    groups = []
    while ungrouped:
        cell, _ = ungrouped.popitem()
        group = [cell]
        for row, column in group:  # which grows meanwhile
            neighbours = [
                (row - 1, column),
                (row + 1, column),
                (row, column - 1),
                (row, column + 1),
            ]
            for cell in neighbours:
                if cell in ungrouped:
                    del ungrouped[cell]
                    group.append(cell)
        groups.append(group)
    values = weights.tolist()
    heaviest = max(groups, key=lambda group: sum(values[row][column] for row, column in group))
    rows, columns = zip(*heaviest, strict=True)
    left = min(columns) / width
    top = min(rows) / height
    right = (max(columns) + 1) / width
    bottom = (max(rows) + 1) / height
    return left, top, right, bottom


def placed(
    interval: Interval,
    name: str,
    video: EncodedVideo,
) -> Interval:
    """The same stretch on a player's clock, with its video's name and the box in pixels."""
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
    first = round(interval.start / video.seconds_per_step)
    start, end = video.span(first, round(interval.end / video.seconds_per_step))
    return replace(interval, start=start, end=end, name=name, pixels=pixels)
