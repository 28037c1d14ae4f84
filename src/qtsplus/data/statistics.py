"""`qtsplus data stats`: what a set holds, counted in one pass, and drawn."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .formats import iter_records, printable
from .media import media_key
from .records import DIFFICULTIES, LETTERS, QUESTION_TYPES, Answer, Caption, Choice, Record, VideoRecord, media_name

_NAMES: dict[type, str] = {Caption: "caption", Choice: "single choice", Answer: "free answer"}
_SOURCES = {"mcq": "single choice", "vqa": "free answer", "caption": "caption"}
NOT_SAID = "not said"


@dataclass
class Statistics:
    """
    What a set holds.

    Args:
        files: how many records each file has.
        kinds: how many records are captions, single-choice items and free answers.
        videos: how many videos they are about.
        types: how many questions there are of each type.
        difficulties: and of each difficulty.
        letters: how often each letter is the right answer.
        longest_is_right: in how many single-choice items the right option is longer than the others, of which chance
            makes a quarter.
        words: by text (question, option, answer, caption) how many texts have how many words.
    """

    files: dict[str, int] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    videos: int = 0
    types: Counter[str] = field(default_factory=Counter)
    difficulties: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)
    longest_is_right: int = 0
    words: dict[str, Counter[int]] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """How many there are."""
        return sum(self.files.values())

    def lengths(self) -> dict[str, dict[str, float]]:
        """By text its number, and its words: mean, median, 95th percentile and most."""
        return {name: _spread(counts) for name, counts in self.words.items()}

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "records": self.records,
            "videos": self.videos,
            "files": self.files,
            "kinds": dict(self.kinds),
            "types": _ordered(self.types, QUESTION_TYPES),
            "difficulties": _ordered(self.difficulties, DIFFICULTIES),
            "letters": _ordered(self.letters, LETTERS),
            "longest_is_right": self.longest_is_right,
            "words": self.lengths(),
        }


def count_set(paths: Iterable[str | os.PathLike]) -> Statistics:
    """
    Counts what the files of a set hold.

    Raises:
        ValueError: a file that is not there, a row that is not a record, or no record at all.
    """
    found, videos = Statistics(), set()
    for path in paths:
        count = 0
        for record in iter_records(path):
            count += 1
            _count(found, record)
            name = media_name(record)
            if name is not None:
                videos.add(media_key(name))
        name = printable(Path(path).name)
        found.files[name] = found.files.get(name, 0) + count
    if not found.records:
        raise ValueError(f"{', '.join(found.files) or 'The set'} holds no record; expected one or more.")
    found.videos = len(videos)
    return found


def _count(found: Statistics, record: Record) -> None:
    kind = _SOURCES[record.source] if isinstance(record, VideoRecord) else _NAMES[type(record)]
    found.kinds[kind] += 1
    if isinstance(record, Caption):
        _count_words(found, "caption", record.caption)
        return
    if isinstance(record, VideoRecord):
        found.types[record.kind or NOT_SAID] += 1
        options = record.options or ()
        question = record.query or record.question
    else:
        found.types[record.type or NOT_SAID] += 1
        found.difficulties[record.difficulty or NOT_SAID] += 1
        options = tuple(record.options.values()) if isinstance(record, Choice) else ()
        question = record.question
    _count_words(found, "question", question)
    if kind == "single choice" and len(record.answer) == 1 and 0 <= LETTERS.find(record.answer) < len(options):
        found.letters[record.answer] += 1
        right = record.options[record.answer] if isinstance(record, Choice) else options[LETTERS.find(record.answer)]
        found.longest_is_right += all(len(text) < len(right) for text in options if text != right)
        for text in options:
            _count_words(found, "option", text)
    else:
        _count_words(found, kind if kind == "caption" else "answer", record.answer)


def _count_words(found: Statistics, name: str, text: str) -> None:
    found.words.setdefault(name, Counter())[len(text.split())] += 1


def _spread(counts: Counter[int]) -> dict[str, float]:
    total = counts.total()

    def percentile(share: float) -> int:
        passed = 0
        for words in sorted(counts):
            passed += counts[words]
            if passed >= share * total:
                break
        return words

    mean = sum(words * count for words, count in counts.items()) / total
    return {"texts": total, "mean": mean, "median": percentile(0.5), "p95": percentile(0.95), "most": max(counts)}


def _ordered(counts: Mapping[str, int], known: Iterable[str]) -> dict[str, int]:
    """What is known first and in its order, then the rest."""
    names = [*(name for name in known if name in counts), *sorted(set(counts) - set(known))]
    return {name: counts[name] for name in names}


def draw_statistics(found: Statistics, path: Path) -> None:
    """Types, difficulties, right letters and lengths as bars, a panel each for what the set has: a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    told = found.as_dict()
    bars = {"type": told["types"], "difficulty": told["difficulties"], "right answer": told["letters"]}
    panels = {name: counts for name, counts in bars.items() if set(counts) - {NOT_SAID}}
    figure = Figure(figsize=(3.2 * (len(panels) + 1), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    *places, last = figure.subplots(1, len(panels) + 1, squeeze=False)[0]
    for axes, (name, counts) in zip(places, panels.items(), strict=True):
        axes.barh(list(counts)[::-1], list(counts.values())[::-1], color="#0b6e99")
        axes.set_xlabel(f"records by {name}")
    for name, words in found.words.items():
        lengths = sorted(words)
        last.plot(lengths, [words[length] for length in lengths], label=name)
    last.set_xlabel("words")
    last.set_ylabel("texts")
    last.legend(frameon=False)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Software": None})


__all__ = ["NOT_SAID", "Statistics", "count_set", "draw_statistics"]
