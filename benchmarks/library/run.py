"""Asks a library of crowds about objects that stand in one of them only, and ranks its files by other means beside."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus.asking.evidence import STRONG, Interval
from qtsplus.asking.ranking import Piece, Scorer
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from qtsplus.model.methods_qtsplus import Candidates, top_n

from ..files import begin, finish
from ..intervals import percent_interval, share_interval
from ..machine import environment, steps
from ..tables import markdown_table
from ..world.scene import sightings
from .world import SECONDS, Hidden, make_library, write_videos

BUDGETS = (64, 256)
SIZES = (10, 25, 50, 100, 200)
_TOKEN, _MEAN = "most relevant token", "mean relevance"
_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of [videos, tokens]
    _TOKEN: lambda values: values.amax(1),
    _MEAN: lambda values: values.logsumexp(1),  # all have as many tokens, so these rank alike
    "mean log-relevance": lambda values: values.mean(1),
}
_MEASURES = ("file", "moment", "place")
EVERY = 10  # of the questions, for what puts many files into one prompt
SOME = 25  # files there


def run_library(
    model: Any, processor: Any, out: Path, work: Path, *, videos: int = 200, command: str = "", progress: bool = True
) -> Path:
    """
    Writes `library-crowd.json` and its page.

    Args:
        out: the folder of the results.
        work: where videos and the library are kept.
        videos: how many.
    """
    worlds, hidden = make_library(videos)
    write_videos(work / f"videos-{videos}", worlds)
    index(work / f"videos-{videos}", work / f"library-{videos}", model, processor)
    library = Library(work / f"library-{videos}", model, processor)
    bench = _Bench(library, hidden)
    out.mkdir(parents=True, exist_ok=True)
    settings = {"videos": videos, "made_by": library.made_by, "questions": [one.question for one in hidden]}
    journal = begin(out / f".library-crowd-{videos}.jsonl", settings)
    with steps("library", len(hidden), progress) as step:
        for number in range(len(hidden)):
            if number not in journal.done:
                journal.add(number, bench.ask(number))
            bench.answers.append(journal.done[number])
            step(f"question {number + 1}")
    sizes = [size for size in SIZES if size < videos] + [videos]
    document = {
        "command": command,
        "environment": environment(str(model.device)),
        "settings": {
            "videos": videos,
            "tokens": len(bench.features),
            "questions": len(hidden),
            "files_in_one_prompt": SOME,
        },
        "ranks": {str(size): bench.ranked(size) for size in sizes},
        "rows": bench.summed(),
        "answers": bench.answers,
    }
    target = out / "library-crowd.json"
    target.with_suffix(".md").write_text("\n".join(_page(document)) + "\n", encoding="utf-8")
    return finish(journal, target, document)


class _Bench:
    """Every question, asked in every way."""

    def __init__(self, library: Library, hidden: Sequence[Hidden]):
        self.library, self.hidden = library, hidden
        self.features = torch.cat([library.stored(name).features for name in library.names])
        # By what ranks the files, [questions, videos].
        self.scores: dict[str, list[list[float]]] = {name: [] for name in _SCORES}
        self.answers: list[dict[str, Any]] = []
        with torch.no_grad():
            for one in hidden:
                by_video = self._scorer(one).relevance(self.features).view(len(library.names), -1)
                for name, measure in _SCORES.items():
                    self.scores[name].append(measure(by_video).tolist())

    def _scorer(self, one: Hidden) -> Scorer:
        return Scorer(self.library.model, self.library.processor, one.question, lambda: [self.features])

    def ask(self, number: int) -> dict[str, Any]:
        """One question: what is found, and, for every other pair of questions, what is answered."""
        one, other = self.hidden[number], (number + 2) % len(self.hidden)  # about another object
        moments = self.library.find(one.question, top=1)
        row: dict[str, Any] = {"number": number, **_judge(moments, self.library, one)}
        ways: dict[str, Sequence[int]] = {}
        if number % 4 in (0, 3):  # both wordings
            ways = {
                "as shipped: the best file": self._best(number, _TOKEN, 1),
                "files with half of the best one's relevance, at most 8": self._close(number),
                "control: another question's file": self._best(other, _TOKEN, 1),
                "control: the file with the highest mean relevance": self._best(number, _MEAN, 1),
                "oracle: the right file": [one.video],
            }
            row["files"] = len(self._close(number))
        if number % EVERY == 0:
            ways |= {f"the {count} best files": self._best(number, _TOKEN, count) for count in (2, 8)}
        for budget in BUDGETS:
            call = {"retention": 1.0, "max_visual_tokens": budget, "max_new_tokens": 3}
            said: dict[tuple[int, ...], bool] = {}
            for name, files in ways.items():
                if tuple(files) not in said:
                    said[tuple(files)] = self._ask(one, files, call)
                row[f"{name}/{budget}"] = said[tuple(files)]
            if number % EVERY == 0:
                some = [
                    (one.video + place) % len(self.library.names) for place in range(min(SOME, len(self.library.names)))
                ]
                for name, method in _JOINT.items():
                    row[f"{name}/{budget}"] = self._ask(one, some, {**call, "selection": method})
        return row

    def _best(self, number: int, score: str, count: int) -> list[int]:
        """The files that come first for a question."""
        return [int(file) for file in np.argsort(self.scores[score][number])[::-1][:count]]

    def _close(self, number: int) -> list[int]:
        """Files whose best token has half of the relevance of the very best."""
        peaks = self.scores[_TOKEN][number]
        return [file for file in self._best(number, _TOKEN, 8) if peaks[file] >= max(peaks) + math.log(STRONG)]

    def _ask(self, one: Hidden, files: Sequence[int], call: dict[str, Any]) -> bool:
        pieces = [Piece(self.library.names[file], 0, SECONDS, 0.0) for file in files]
        return self.library.ask_pieces(one.question, pieces, **call).answer.rstrip(".") == one.answer

    def ranked(self, size: int) -> dict[str, dict[str, float]]:
        """By way, how often the right file is first, and among the first five, of so many files in turn."""
        files = np.array([one.video for one in self.hidden])
        others = (files[:, None] + np.arange(size)) % len(self.library.names)  # the right one is the first of them
        rows = {}
        scores = {name: np.array(values) for name, values in self.scores.items()}
        scores["control: another question"] = np.roll(scores[_TOKEN], -2, axis=0)
        for name, values in scores.items():
            mine = np.take_along_axis(values, others, axis=1)
            place = (mine[:, 1:] >= mine[:, :1]).sum(1)
            interval = share_interval((place == 0).astype(float), files)
            rows[name] = {"first": float((place == 0).mean()), "five": float((place < 5).mean()), **interval}
        return rows

    def summed(self) -> dict[str, dict[str, float]]:
        """Of every measure its mean, its 95% interval over files, and how many questions it is of."""
        rows = {}
        names = dict.fromkeys(name for row in self.answers for name in row if name != "number")
        for name in names:
            asked = [row for row in self.answers if name in row]
            values = np.array([row[name] for row in asked], dtype=float)
            files = np.array([self.hidden[row["number"]].video for row in asked])
            share = {} if name == "files" else share_interval(values, files)
            rows[name] = {**share, "mean": float(values.mean()), "questions": len(asked)}
        return rows


def _one_budget_per_video(candidates: Candidates, n: int) -> torch.Tensor:
    """As many tokens of every video, its most relevant ones; of evenly spaced videos where there is none for each."""
    bounds = np.cumsum([0, *(len(part) for part in candidates.visual)])
    count = len(candidates.visual)
    shares = np.diff(np.arange(count + 1) * n // count)
    kept = [
        top_n(candidates.log_relevance[low:high], int(share)) + int(low)
        for low, high, share in zip(bounds, bounds[1:], shares, strict=False)
        if share
    ]
    return torch.cat(kept)


_JOINT: dict[str, Any] = {
    "all at once": "qtsplus",
    "one budget per file": _one_budget_per_video,
    "uniform": "uniform",
    "diversity": "diversity",
}


def _judge(moments: Sequence[Interval], library: Library, one: Hidden) -> dict[str, bool]:
    """Of the first moment, whether it is in the right file, then in the time of the object, and then around it."""
    best = moments[0]
    file = best.name == library.names[one.video]
    inside = min(best.end, one.item.vanishes_at) - max(best.start, one.item.appears_at)
    moment = file and inside >= (best.end - best.start) / 2
    return {"file": file, "moment": moment, "place": moment and _covers(best, one)}


def _covers(best: Interval, one: Hidden) -> bool:
    """Whether the middle of the object lies in the box of the moment, at some time of it."""
    left, top, right, bottom = best.box
    for seen in sightings(one.item):
        if seen.start < best.end and best.start < seen.end and seen.frame is not None:
            x, y = (seen.box[0] + seen.box[2]) / 2 / seen.frame[0], (seen.box[1] + seen.box[3]) / 2 / seen.frame[1]
            if left <= x <= right and top <= y <= bottom:
                return True
    return False


def _page(document: dict[str, Any]) -> list[str]:
    settings, rows, ranks = document["settings"], document["rows"], document["ranks"]
    sizes = list(ranks)
    ways = dict.fromkeys(name.rpartition("/")[0] for name in rows if "/" in name)

    def cell(name: str) -> str:
        return percent_interval(rows[name]["mean"], rows[name] if "low" in rows[name] else {})

    return [
        f"{settings['questions']} questions about a library of {settings['videos']} crowded videos of {SECONDS} s, "
        f"{settings['tokens']:,} tokens. Each asks in which direction an object moves that stands in one video only by "
        "its colour, shape and mark together; most of the others have one of its colour and shape with another mark. "
        "There are two wordings, which were chosen on other videos. Intervals: 95%, over videos.",
        "",
        f"`{document['command']}`",
        "",
        "## The right file first",
        "",
        "Among so many files, by what ranks them; in brackets, among the first five.",
        "",
        *markdown_table(
            ["ranked by the file's", *sizes],
            [
                [name, *(f"{ranks[size][name]['first']:.1%} ({ranks[size][name]['five']:.1%})" for size in sizes)]
                for name in ranks[sizes[0]]
            ],
        ),
        "",
        "## The first moment that `find` names",
        "",
        *markdown_table(["is in", "of all questions"], [[f"the right {name}", cell(name)] for name in _MEASURES]),
        "",
        "## Right answers",
        "",
        f"Of four directions, by the tokens that the language model reads. The files with half of the best one's "
        f"relevance are {rows['files']['mean']:.2f} on average. The last four rows read the right file and {SOME - 1} "
        "others in one prompt.",
        "",
        *markdown_table(
            ["", "questions", *(f"{budget} tokens" for budget in BUDGETS)],
            [
                [way, str(rows[f"{way}/{BUDGETS[0]}"]["questions"]), *(cell(f"{way}/{budget}") for budget in BUDGETS)]
                for way in ways
            ],
        ),
    ]


__all__ = ["run_library"]
