"""What is asked: questions about TinyWorld's held-out videos."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...data.scene import Sighting
from ...data.tinyworld import QUESTION_KINDS
from ...training.dataset import VideoRecord, read_records

# Asked for rho alone: the widest request there is.
DESCRIPTION = "caption"


@dataclass(frozen=True)
class QuestionSet:
    """
    Questions about TinyWorld's held-out videos.

    Args:
        records: of the kinds in [`QUESTION_KINDS`].
        needles: per record its evidence, see [`Question`].
        descriptions: the requests to describe a video, whose budget is looked at.
        digest: of the file.
    """

    records: list[VideoRecord]
    needles: list[list[list[Sighting]]]
    descriptions: list[VideoRecord]
    digest: str

    @classmethod
    def read(cls, path: Path) -> "QuestionSet":
        """
        Raises:
            ValueError: no question of a known kind, or a split that models are trained on.
        """
        content = path.read_bytes()
        lines = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
        splits = {line.get("split") for line in lines}
        if "train" in splits:
            raise ValueError(
                f"{path} holds the training split: make another with `qtsplus data tinyworld --split test`."
            )
        found = [
            (record, line) for record, line in zip(read_records(path), lines, strict=True) if record.video is not None
        ]
        chosen = [(record, line) for record, line in found if line.get("kind") in QUESTION_KINDS]
        if not chosen:
            raise ValueError(f"{path} holds no question of TinyWorld; expected records of `qtsplus data tinyworld`.")
        return cls(
            [record for record, _ in chosen],
            [[[Sighting(**seen) for seen in needle] for needle in line["evidence"]] for _, line in chosen],
            [record for record, line in found if line.get("kind") == DESCRIPTION],
            hashlib.sha256(content).hexdigest(),
        )

    @property
    def videos(self) -> list[str]:
        return sorted({str(record.video) for record in self.records})


def with_questions_of_others(records: Sequence[VideoRecord], seed: int) -> list[VideoRecord]:
    """Every record with the query of a question about another video; the prompt stays its own."""
    order = np.random.default_rng(seed).permutation(len(records))
    shuffled = list(records)
    for place, index in enumerate(order):
        record = records[index]
        others = (records[order[(place + step) % len(order)]] for step in range(1, len(order)))
        other = next((candidate for candidate in others if candidate.video != record.video), record)
        shuffled[index] = replace(record, query=other.query or other.question)
    return shuffled
