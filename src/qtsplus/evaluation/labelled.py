"""Questions about videos, with where their answers can be seen."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.formats import read_records
from ..data.records import VideoRecord
from ..data.scene import Sighting, sighting_tokens


@dataclass(frozen=True)
class LabelledQuestion:
    """
    A question, and where its answer can be seen.

    Args:
        record: with a video.
        needles: what must be found, each a list of [`Sighting`], any one of which will do; none where that is not
            known.
    """

    record: VideoRecord
    needles: list[list[Sighting]]

    def tokens(self, grid: tuple[int, int, int], seconds_per_grid: float) -> np.ndarray:
        """`[k]` int64, ascending: the visual tokens of its needles; see [`sighting_tokens`]."""
        return sighting_tokens([seen for needle in self.needles for seen in needle], grid, seconds_per_grid)


def read_questions(path: Path) -> list[LabelledQuestion]:
    """
    The questions of a JSONL file of records that have a video, with their `evidence` where they have any.

    Raises:
        ValueError: a line that is no record, evidence of another form, or no question about a video.
    """
    records = read_records(path)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = []
    for record, line in zip(records, lines, strict=True):
        try:
            needles = [[Sighting(**seen) for seen in needle] for needle in line.get("evidence") or ()]
        except TypeError as error:
            raise ValueError(
                f"{path}: the evidence of {record.question!r} is not a list of needles, each a list of sightings with "
                "start, end and box."
            ) from error
        if record.video is not None:
            found.append(LabelledQuestion(record, needles))
    if not found:
        raise ValueError(f"{path} holds no question about a video.")
    return found


__all__ = ["LabelledQuestion", "read_questions"]
