"""`qtsplus data stats`: what a set holds, counted in one pass."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..output import markdown_table
from .formats import iter_records, printable
from .media import media_key
from .records import DIFFICULTIES, LETTERS, QUESTION_TYPES, Caption, Record, VideoRecord, media_name, to_video_record

_KINDS = {"mcq": "single choice", "vqa": "free answer", "caption": "caption"}
NOT_SAID = "not said"


@dataclass
class Statistics:
    """What a set holds."""

    files: dict[str, int] = field(default_factory=dict)  # records of each
    kinds: Counter[str] = field(default_factory=Counter)  # captions, single-choice items and free answers
    videos: int = 0
    types: Counter[str] = field(default_factory=Counter)  # of questions
    difficulties: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)  # how often each is the right answer
    longest_is_right: int = 0  # single-choice items whose right option is longer than the others; by chance a quarter
    words: dict[str, Counter[int]] = field(default_factory=dict)  # by kind of text, how many have how many words

    @property
    def records(self) -> int:
        """How many there are."""
        return sum(self.files.values())

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it; of words the mean, the median, the 95th percentile and the most."""
        return {
            "records": self.records,
            "videos": self.videos,
            "files": self.files,
            "kinds": dict(self.kinds),
            "types": _ordered(self.types, QUESTION_TYPES),
            "difficulties": _ordered(self.difficulties, DIFFICULTIES),
            "letters": _ordered(self.letters, LETTERS),
            "longest_is_right": self.longest_is_right,
            "words": {name: _spread(counts) for name, counts in self.words.items()},
        }

    def lines(self) -> list[str]:
        """As Markdown has it."""
        figures = self.as_dict()
        lines = [f"{self.records:,} records about {self.videos:,} videos.", ""]
        titles = {"file": "files", "records": "kinds", "type": "types", "difficulty": "difficulties"}
        for title, name in {**titles, "right answer": "letters"}.items():
            rows = [
                (key, f"{count:,}", f"{count / sum(figures[name].values()):.1%}")
                for key, count in figures[name].items()
            ]
            lines += [*markdown_table((title, "number", "share"), rows), ""] if rows else []
        if self.letters:
            share = self.longest_is_right / self.letters.total()
            lines += [f"The right option is the longest in {share:.1%} of the items; by chance in 25%.", ""]
        header = ("text", "number", "mean words", "median", "95th percentile", "most")
        cells = [
            (name, f"{row['texts']:,}", f"{row['mean']:.1f}", *(str(row[key]) for key in ("median", "p95", "most")))
            for name, row in figures["words"].items()
        ]
        return [*lines, *markdown_table(header, cells), ""]


def count_set(paths: Iterable[str | os.PathLike]) -> Statistics:
    """
    Counts what the files of a set hold.

    Raises:
        ValueError: a file that is not there, a row that is not a record, or no record at all.
    """
    result, videos = Statistics(), set()
    for path in paths:
        file = printable(Path(path).name)
        result.files.setdefault(file, 0)
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
    options = item.options or ()
    place = LETTERS.find(item.answer) if len(item.answer) == 1 else -1
    if kind == "single choice" and 0 <= place < len(options):
        result.letters[item.answer] += 1
        result.longest_is_right += all(len(text) < len(options[place]) for text in options if text != options[place])
        for text in options:
            _count_words(result, "option", text)
    else:
        _count_words(result, kind if kind == "caption" else "answer", item.answer)


def _count_words(result: Statistics, name: str, text: str) -> None:
    result.words.setdefault(name, Counter())[len(text.split())] += 1


def _spread(counts: Counter[int]) -> dict[str, float]:
    lengths = sorted(counts.elements())
    median, p95 = (lengths[max(0, -(-share * len(lengths) // 100) - 1)] for share in (50, 95))
    mean = sum(lengths) / len(lengths)
    return {"texts": len(lengths), "mean": mean, "median": median, "p95": p95, "most": lengths[-1]}


def _ordered(counts: Mapping[str, int], known: Iterable[str]) -> dict[str, int]:
    """What is known first and in its order, then the rest."""
    names = [*(name for name in known if name in counts), *sorted(set(counts) - set(known))]
    return {name: counts[name] for name in names}
