"""`qtsplus data stats`: what a set holds, counted in one pass."""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..output import markdown_table
from .formats import iter_records, printable
from .media import media_key
from .records import LETTERS, Caption, Record, VideoRecord, media_name, to_video_record

_KINDS = {"mcq": "single choice", "vqa": "free answer", "caption": "caption"}
NOT_SAID = "not said"


@dataclass
class Statistics:
    """What a set holds."""

    videos: int = 0
    files: Counter[str] = field(default_factory=Counter)  # records of each
    kinds: Counter[str] = field(default_factory=Counter)  # captions, single-choice items and free answers
    types: Counter[str] = field(default_factory=Counter)  # of questions
    difficulties: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)  # how often each is the right answer
    texts: Counter[str] = field(default_factory=Counter)  # by their kind: captions, questions, options, answers
    words: Counter[str] = field(default_factory=Counter)  # in all texts of a kind

    @property
    def records(self) -> int:
        """How many there are."""
        return self.files.total()

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it; of the texts of a kind how many there are, and their mean number of words."""
        names = ("files", "kinds", "types", "difficulties", "letters")
        counts = {name: dict(sorted(getattr(self, name).items())) for name in names}
        texts = {name: {"number": n, "mean words": self.words[name] / n} for name, n in sorted(self.texts.items())}
        return {"records": self.records, "videos": self.videos, **counts, "texts": texts}

    def lines(self) -> list[str]:
        """As Markdown has it."""
        figures = self.as_dict()
        lines = [f"{self.records:,} records about {self.videos:,} videos.", ""]
        titles = {"file": "files", "records": "kinds", "type": "types", "difficulty": "difficulties"}
        for title, name in {**titles, "right answer": "letters"}.items():
            total = sum(figures[name].values())
            rows = [(key, f"{count:,}", f"{count / total:.1%}") for key, count in figures[name].items()]
            lines += [*markdown_table((title, "number", "share"), rows), ""] if rows else []
        rows = [(name, f"{row['number']:,}", f"{row['mean words']:.1f}") for name, row in figures["texts"].items()]
        return [*lines, *markdown_table(("text", "number", "mean words"), rows), ""]


def count_set(paths: Iterable[str | os.PathLike]) -> Statistics:
    """
    Counts what the files of a set hold.

    Raises:
        ValueError: a file that is not there, a row that is not a record, or no record at all.
    """
    result, videos = Statistics(), set()
    for path in paths:
        file = printable(Path(path).name)
        result.files[file] += 0
        for record in iter_records(path):
            result.files[file] += 1
            _count(result, record)
            videos.add(media_name(record))
    if not result.records:
        raise ValueError(f"{', '.join(result.files) or 'The set'} holds no record; expected one or more.")
    result.videos = len({media_key(name) for name in videos if name is not None})
    return result


def _count(result: Statistics, record: Record) -> None:
    if isinstance(record, Caption):
        result.kinds["caption"] += 1
        _count_words(result, "caption", record.caption)
        return
    item = to_video_record(record)
    kind = _KINDS[item.source]
    result.kinds[kind] += 1
    result.types[item.kind or NOT_SAID] += 1
    if not isinstance(record, VideoRecord):
        result.difficulties[record.difficulty or NOT_SAID] += 1
    _count_words(result, "question", item.query or item.question)
    if kind == "single choice":
        result.letters.update([item.answer] if item.answer in tuple(LETTERS) else [])
        for text in item.options or ():
            _count_words(result, "option", text)
    else:
        _count_words(result, "caption" if kind == "caption" else "answer", item.answer)


def _count_words(result: Statistics, name: str, text: str) -> None:
    result.texts[name] += 1
    result.words[name] += len(text.split())
