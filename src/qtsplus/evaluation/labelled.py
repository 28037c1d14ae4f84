"""Questions about videos, with where their answers can be seen."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic.dataclasses import dataclass

from ..data.formats import iter_rows, read_records
from ..data.records import Sighting, VideoRecord, parse_needles

# The least share that the cell of a token has in common with the box of the thing that it shows: a share of the box, or
# of the cell if that is smaller.
LEAST_SHARE = 0.25


def sighting_tokens(
    seen: Sequence[Sighting],
    grid: tuple[int, int, int],
    edges: Sequence[float],
) -> np.ndarray:
    """
    `[k]` int64, ascending: the visual tokens that share at least [`LEAST_SHARE`] with the box of a sighting, or else
    the most. The grid is (time, height, width) of the video's visual tokens, and `edges` `[time + 1]` are when a player
    shows its steps, and when the last one ends.
    """
    steps, rows, columns = grid
    shown = np.zeros((steps, rows, columns), dtype=bool)
    for sighting in seen:
        first = np.searchsorted(edges[1:-1], sighting.start + 1e-6, side="right")
        last = np.searchsorted(edges[:-1], sighting.end - 1e-6)
        shown[first : max(last, first + 1)] |= _cells(sighting, rows, columns)
    return np.flatnonzero(shown)


def _cells(
    sighting: Sighting,
    rows: int,
    columns: int,
) -> np.ndarray:
    """`[rows, columns]` bool: the cells of the grid that share enough with the box of a sighting."""
    left, top, right, bottom = sighting.box
    shares = np.outer(_shares(rows, top, bottom), _shares(columns, left, right))
    box_area = (bottom - top) * (right - left)
    cell_area = 1 / rows / columns
    shares /= min(1.0, cell_area / box_area)
    return shares >= min(LEAST_SHARE, shares.max())


def _shares(
    count: int,
    low: float,
    high: float,
) -> np.ndarray:
    """`[count]`: the shares of [low, high) in equal parts of [0, 1)."""
    edges = np.arange(count + 1) / count
    begins = np.maximum(edges[:-1], low)
    ends = np.minimum(edges[1:], high)
    return np.clip(ends - begins, 0, None) / (high - low)


@dataclass(frozen=True)
class LabelledQuestion:
    """A question about a video, and where its answer can be seen."""

    record: VideoRecord
    needles: list[list[Sighting]]  # each must be found, in any of its sightings
    edges: tuple[float, ...] = ()  # when a player shows the steps of the video, as in [`sighting_tokens`]

    @property
    def video(self) -> tuple[str, float | None]:
        """The place of its video, and the rate at which it is read."""
        return str(self.record.video), self.record.fps

    @property
    def sightings(self) -> list[Sighting]:
        """All of its needles."""
        return sum(self.needles, [])


def labelled_questions(path: Path) -> list[LabelledQuestion]:
    """
    The questions of a set of records that have a video and `evidence`; a `ValueError` for what is no record, and for
    evidence of another form.
    """
    questions = []
    for record, row in zip(read_records(path), iter_rows(path), strict=True):
        needles = parse_needles(row.content, f"{path}: the evidence of {record.question!r}")
        if needles and record.video is not None:
            questions.append(LabelledQuestion(record, needles))
    return questions
