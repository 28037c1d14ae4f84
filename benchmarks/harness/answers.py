"""Answers on disk as they are given, so that a run that was killed goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from qtsplus.common.journals import STORED, Journal, Line, Schema


class SampleAnswer(BaseModel):
    """One answer of the model."""

    model_config = STORED

    text: str  # empty where the sample failed
    output_tokens: int = 0
    video: str = ""  # the file names of its videos, joined by commas
    frames: int = 0  # that were looked at
    visual_tokens: int = 0
    kept_visual_tokens: int = 0  # those of them that the language model read
    failed: str | None = None  # why there is no answer, such as a video that cannot be read; it counts as wrong


_SCHEMA = Schema(line=Line[str, SampleAnswer])


class AnswerLog:
    """
    A folder of journals, one per process; without a folder nothing is kept. A process adds to its own, by its rank, and
    reads all of them once, when it begins, so that a run may go on with another number of processes. What failed is
    tried again then. Answers with other settings are not found.
    """

    def __init__(self, folder: str | os.PathLike | None, rank: int, settings: Mapping[str, Any]):
        self.settings = json.dumps(settings, sort_keys=True, default=str)
        self.found: dict[str, SampleAnswer] = {}
        self.journal: Journal | None = None
        if folder is None:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.journal = Journal(Path(folder) / f"answers-{rank}.jsonl", {}, _SCHEMA)
        for path in sorted(Path(folder).glob("answers-*.jsonl")):
            answers = Journal(path, {}, _SCHEMA).done.items()
            self.found |= {str(key): answer for key, answer in answers if answer.failed is None}

    def key(self, task: str, doc_id: Any, asked: Mapping[str, Any], generation: Mapping[str, Any]) -> str:
        """What an answer is found by: another video or another wording is another question."""
        parts = [self.settings, *(json.dumps(part, sort_keys=True, default=str) for part in (asked, generation))]
        return f"{task}:{doc_id}:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"

    def add(self, answers: Mapping[str, SampleAnswer]) -> None:
        """Keeps answers, on disk before this returns."""
        self.found.update(answers)
        if self.journal is not None:
            for key, answer in answers.items():
                self.journal.add(key, answer.model_dump())
