"""Questions about videos, with where their answers can be seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.formats import iter_rows, read_records
from ..data.records import VideoRecord

# What the cell of a token that shows something shares with its box at least: of the box, or of the cell if that is the
# smaller one.
LEAST_SHARE = 0.25


@dataclass(frozen=True)
class Sighting:
    """Something seen; a `ValueError` for an empty box, or one in pixels without its frame."""

    start: float  # seconds
    end: float
    box: tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the frame or in shares of it
    frame: tuple[int, int] | None = None  # width, height

    def __post_init__(self) -> None:
        left, top, right, bottom = self.box
        if not (left < right and top < bottom):
            raise ValueError(f"The box {list(self.box)} is empty; expected left, top, right and bottom.")
        if self.frame is None and not 0 <= min(self.box) <= max(self.box) <= 1:
            raise ValueError(
                f"The box {list(self.box)} has no frame; expected shares of the frame from 0 to 1, or as `frame` its "
                "width and height in pixels."
            )


def sighting_tokens(seen: Sequence[Sighting], grid: tuple[int, int, int], seconds_per_grid: float = 1.0) -> np.ndarray:
    """
    `[k]` int64, ascending: the visual tokens that share at least [`LEAST_SHARE`] with the box of a sighting, or else
    the most; none for a box outside the frame. The grid is (time, height, width) of the video's visual tokens.
    """
    steps, rows, columns = grid
    tokens = set()
    for sighting in seen:
        width, height = sighting.frame or (1, 1)
        left, top, right, bottom = sighting.box
        tall = _overlap(np.arange(rows + 1) * height / rows, top, bottom) / (bottom - top)
        wide = _overlap(np.arange(columns + 1) * width / columns, left, right) / (right - left)
        cell_in_boxes = height / rows * width / columns / ((bottom - top) * (right - left))
        shares = np.outer(tall, wide) / min(1.0, cell_in_boxes)
        least = min(LEAST_SHARE, float(np.max(shares)))
        first = min(int(sighting.start / seconds_per_grid + 1e-6), steps - 1)
        last = min(int(np.ceil(sighting.end / seconds_per_grid - 1e-6)), steps)
        for row, column in np.argwhere((shares >= least) & (shares > 0)):
            for step in range(first, max(last, first + 1)):
                tokens.add((step * rows + int(row)) * columns + int(column))
    return np.array(sorted(tokens), dtype=np.int64)


def _overlap(edges: np.ndarray, low: float, high: float) -> np.ndarray:
    """Length of the part of [low, high) in each of the intervals between `edges`."""
    return np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None)


@dataclass(frozen=True)
class LabelledQuestion:
    """A question about a video, and where its answer can be seen."""

    record: VideoRecord
    needles: list[list[Sighting]]  # that must be found, of each any one sighting; none where that is not known


def labelled_questions(path: Path) -> list[LabelledQuestion]:
    """
    The questions of a set of records that have a video, with their `evidence` where they have any; a `ValueError` for
    what is no record, evidence of another form, or no question about a video.
    """
    questions = []
    for record, row in zip(read_records(path), iter_rows(path), strict=True):
        try:
            needles = [[Sighting(**seen) for seen in needle] for needle in row.content.get("evidence") or ()]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: the evidence of {record.question!r} is not a list of needles, each a list of sightings with "
                f"start, end and box: {error}"
            ) from error
        if record.video is not None:
            questions.append(LabelledQuestion(record, needles))
    if not questions:
        raise ValueError(f"{path} holds no question about a video.")
    return questions
