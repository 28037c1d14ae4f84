"""Answers on disk as they are given, so that a run that was killed goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answered:
    """One answer of the model."""

    text: str  # empty where the sample failed
    output_tokens: int = 0
    video: str = ""  # the file names of its videos, joined by commas
    frames: int = 0  # that were looked at
    visual_tokens: int = 0
    kept_visual_tokens: int = 0  # those of them that the language model read
    failed: str | None = None  # why there is no answer, such as a video that cannot be read; it counts as wrong


_FIELDS = {field.name for field in fields(Answered)}


class AnswerLog:
    """
    A folder of JSONL files, one per process. A process adds to its own file and reads all of them once, when it begins,
    so that a run may go on with another number of processes. What failed is tried again then.

    Args:
        folder: where they are; made when it is missing. Without one nothing is kept.
        rank: of this process.
        settings: what an answer depends on beside the question. Answers with other settings are not found.
    """

    def __init__(self, folder: str | os.PathLike | None, rank: int, settings: Mapping[str, Any]):
        self.settings = json.dumps(settings, sort_keys=True, default=str)
        self.found: dict[str, Answered] = {}
        self.path: Path | None = None
        if folder is None:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(folder).glob("answers-*.jsonl")):
            self.found.update(_read(path))
        self.path = Path(folder) / f"answers-{rank}.jsonl"
        _end_line(self.path)

    def key(self, task: str, doc_id: Any, asked: Mapping[str, Any], generation: Mapping[str, Any]) -> str:
        """What an answer is found by: another video or another wording is another question."""
        parts = [self.settings, *(json.dumps(part, sort_keys=True, default=str) for part in (asked, generation))]
        return f"{task}:{doc_id}:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"

    def add(self, answers: Mapping[str, Answered]) -> None:
        """Keeps answers, on disk before this returns."""
        self.found.update(answers)
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"key": key, **asdict(answer)}) + "\n" for key, answer in answers.items())
            file.flush()
            os.fsync(file.fileno())


def _end_line(path: Path) -> None:
    """Ends the last line where a kill has cut it, so that the next one begins a line of its own."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def _read(path: Path) -> dict[str, Answered]:
    found = {}
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut by a kill: that question is asked again
        key = entry.pop("key")
        if entry["failed"] is None:  # a video that could not be read may have been mended
            found[key] = Answered(**{name: entry[name] for name in _FIELDS & entry.keys()})
    return found
