"""What is asked: questions about TinyWorld's held-out videos, and the wrong questions to select by."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qtsplus.data.formats import read_records
from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.labelled import Sighting

from ..world.crowd import record_world
from ..world.scene import World, make_world
from ..world.tinyworld import QUESTION_KINDS

# Asked for rho alone: the widest request there is.
DESCRIPTION = "caption"


@dataclass(frozen=True)
class QuestionSet:
    """
    Questions about TinyWorld's held-out videos.

    Args:
        records: of the kinds in [`QUESTION_KINDS`].
        needles: per record its evidence, see [`Question`].
        worlds: by video what it shows.
        crowd: whether they are crowded.
        descriptions: the requests to describe a video, whose budget is looked at.
        digest: of the file.
    """

    records: list[VideoRecord]
    needles: list[list[list[Sighting]]]
    worlds: dict[str, World]
    crowd: bool
    descriptions: list[VideoRecord]
    digest: str

    @classmethod
    def read(cls, path: Path) -> "QuestionSet":
        """
        Raises:
            ValueError: no question of a known kind, a split that models are trained on, or crowded and sparse videos in
                one file.
        """
        content = path.read_bytes()
        lines = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
        splits = {line.get("split") for line in lines}
        if "train" in splits:
            raise ValueError(
                f"{path} holds the training split: make another with `python -m benchmarks tinyworld --split test`."
            )
        found = [
            (record, line) for record, line in zip(read_records(path), lines, strict=True) if record.video is not None
        ]
        chosen = [(record, line) for record, line in found if line.get("kind") in QUESTION_KINDS]
        if not chosen:
            raise ValueError(
                f"{path} holds no question of TinyWorld; expected what `python -m benchmarks tinyworld` wrote."
            )
        crowds = {line.get("crowd") is True for _, line in chosen}
        if len(crowds) > 1:
            raise ValueError(f"{path} holds crowded and sparse videos: ask about each in a file of its own.")
        return cls(
            records=[record for record, _ in chosen],
            needles=[[[Sighting(**seen) for seen in needle] for needle in line["evidence"]] for _, line in chosen],
            worlds={
                video: _world(line) for video, line in {str(record.video): line for record, line in chosen}.items()
            },
            crowd=crowds.pop(),
            descriptions=[record for record, line in found if line.get("kind") == DESCRIPTION],
            digest=hashlib.sha256(content).hexdigest(),
        )

    @classmethod
    def read_any(cls, path: Path) -> "QuestionSet":
        """
        Questions about any videos; of TinyWorld's with their evidence, as [`read`] does.

        Raises:
            ValueError: as [`read`]; a line that is no record, or none with a video.
        """
        records = [record for record in read_records(path) if record.video is not None]
        content = path.read_bytes()
        lines = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
        if any("evidence" in line and "seed" in line for line in lines):
            return cls.read(path)
        if not records:
            raise ValueError(f"{path} holds no question about a video.")
        unknown: list[list[list[Sighting]]] = [[] for _ in records]
        return cls(records, unknown, {}, False, [], hashlib.sha256(content).hexdigest())

    @property
    def videos(self) -> list[str]:
        return sorted({str(record.video) for record in self.records})


def _world(line: Mapping[str, Any]) -> World:
    """What a record's video shows, made again from its seed."""
    if line.get("crowd") is True:
        return record_world(line)
    try:
        return make_world(line["seed"], line["seconds"], line["max_objects"])
    except KeyError as error:
        raise ValueError(
            f"record {line.get('id')!r} lacks {error}, from which its video was made; write the file again with "
            "`python -m benchmarks tinyworld`."
        ) from error


def with_options(records: Sequence[VideoRecord]) -> list[VideoRecord | None]:
    """Every record whose question stands with its options, selected by all of that. `None` for the others."""
    return [
        replace(record, query=record.question) if record.query not in (None, record.question) else None
        for record in records
    ]


def with_questions_of_others(records: Sequence[VideoRecord], seed: int) -> list[VideoRecord | None]:
    """
    Every record with the query of a question about another video; the prompt stays its own. `None` without such a one.
    """
    order = np.random.default_rng(seed).permutation(len(records))
    shuffled: list[VideoRecord | None] = [None] * len(records)
    for place, index in enumerate(order):
        record = records[index]
        others = (records[order[(place + step) % len(order)]] for step in range(1, len(order)))
        shuffled[index] = _with_query(record, (other for other in others if other.video != record.video))
    return shuffled


def with_other_questions(
    records: Sequence[VideoRecord], needles: Sequence[Sequence[np.ndarray]], seed: int
) -> list[VideoRecord | None]:
    """
    Every record with the query of another question about its video, that looks at other tokens; the prompt stays its
    own. `None` without such a one.

    Args:
        needles: per record the tokens of each of its needles. Another question has some, and none of the record's own.
    """
    by_video: dict[str, list[int]] = {}
    for index in np.random.default_rng(seed).permutation(len(records)):
        by_video.setdefault(str(records[index].video), []).append(int(index))
    joined = [{int(token) for needle in found for token in needle} for found in needles]
    return [
        _with_query(
            record,
            (
                records[other]
                for other in by_video[str(record.video)]
                if other != index and joined[other] and not joined[other] & joined[index]
            ),
        )
        for index, record in enumerate(records)
    ]


def _with_query(record: VideoRecord, others: Any) -> VideoRecord | None:
    other = next(others, None)
    return None if other is None else replace(record, query=other.query or other.question)
