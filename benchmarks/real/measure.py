"""Measures a selector on the base with real words: `python -m benchmarks.real.measure MODEL RECORDS OUT.json`."""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus.common.journals import write_json
from qtsplus.evaluation.labelled import labelled_questions, sighting_tokens
from qtsplus.hub.convert import fresh_selector
from qtsplus.model.methods_qtsplus import Candidates
from qtsplus.training.dataset import IGNORED, VideoQACollator, VideoQADataset
from qtsplus.training.features import encode_files
from qtsplus.training.models import make_config, make_processor

from ..open.asking import Answers, OpenTest, load, of_other_videos
from ..open.measures import area_under_curve, constant_right, interval, spearman
from .words import NAMES
from .work import half_precision

KINDS = ("present", "absent", "some", "kind", "which", "first")  # a list is seldom right to its last word
LADDER = (1, 2, 4, 8, 16, 32, 64)


def cap(count: int) -> dict[str, Any]:
    return {"retention": 1.0, "max_visual_tokens": count}


SIZES: dict[str, dict[str, Any]] = {"2 tokens": cap(2), "8 tokens": cap(8), "a tenth": {"retention": 0.1}}
# Other records beside those of a test, by what is other about them.
OTHERS = {"crowds": "", "other wordings": "-held-out", "other drawings": "-drawing", "other things": "-thing"}
OTHERS |= {"few things": "-few", "32 s": "-32s"}


class RealTest(OpenTest):
    """Records of `write_records`, with their videos encoded once, when first asked about."""

    batch = 8  # a vocabulary of 49,152 makes logits large

    def __init__(self, model: Any, processor: Any, path: Path):
        self.questions = labelled_questions(path)
        self.records = [question.record for question in self.questions]
        lines = path.read_text(encoding="utf-8").splitlines()
        self.rows = [json.loads(line) for line in lines]
        self.model, self.processor = model, processor
        self.collate: Any = VideoQACollator(processor)
        self._folder = tempfile.TemporaryDirectory()

    @cached_property
    def dataset(self) -> Any:  # type: ignore[override]
        dataset, videos = VideoQADataset(self.records, self.processor), [(str(one.video), None) for one in self.records]
        dataset.features = encode_files(self.model, self.processor, videos, self._folder.name)
        return dataset

    @cached_property
    def needles(self) -> list[list[int]]:
        found = []
        for question in self.questions:
            example = self.dataset.example(question.record)
            steps, rows, columns = example["video_grid_thw"][0].tolist()
            seen = [sighting for needle in question.needles for sighting in needle]
            grid = (steps, rows // 2, columns // 2)
            found.append(sighting_tokens(seen, grid, float(example["second_per_grid_ts"][0])).tolist() if seen else [])
        return found

    @cached_property
    def counted(self) -> np.ndarray:
        """`[questions]` bool: those of [`KINDS`], not in other words, and not about what the film itself shows."""
        return np.isin(self.kinds, KINDS) & ~self.marked("other_words") & ~self.marked("doubtful")

    def marked(self, mark: str) -> np.ndarray:
        return np.array([row.get(mark, False) for row in self.rows])

    @property
    def named(self) -> list[list[int]]:
        return [[] for _ in self.rows]

    def batches(
        self, queries: Sequence[str] | None = None, texts: Sequence[str] | None = None
    ) -> Iterator[tuple[slice, dict[str, Any], torch.Tensor]]:
        for rows, inputs, labels in super().batches(queries, texts):
            inputs.pop("attention", None)
            yield rows, inputs, labels

    def blind(self, model: Any) -> Answers:
        """Answers to the words alone."""
        right = []
        for record in self.records:
            inputs = self.collate([self.dataset.example(replace(record, video=None))])
            labels = inputs["labels"][:, 1:]
            with torch.no_grad():
                said = model(input_ids=inputs["input_ids"], use_cache=False).logits[:, :-1].argmax(-1)
            right.append(bool(((said == labels) | (labels == IGNORED)).all()))
        return Answers(right, [0] * len(right))

    def without_needles(self) -> Callable[[Candidates, int], torch.Tensor]:
        """A selection by relevance among what shows nothing of the answer, for one pass over the questions in turn."""

        def each() -> Iterator[list[int]]:  # found when the first is asked for
            yield from self.needles

        rows = each()

        def select(candidates: Candidates, n: int) -> torch.Tensor:
            relevance = candidates.log_relevance.clone()
            relevance[next(rows)] -= 1e6  # kept only where nothing else is left
            return relevance.topk(n).indices.sort().values

        return select


def of_same_videos(test: OpenTest) -> list[str]:
    """For each question one of the same video that rests on something else; where there is none, another video's."""
    rng, asked = np.random.default_rng(5), of_other_videos(test)
    for place, row in enumerate(test.rows):
        others = [r["question"] for r in test.rows if r["video"] == row["video"] and r["evidence"] != row["evidence"]]
        asked[place] = str(rng.choice(others)) if others else asked[place]
    return asked


def with_another_thing(test: OpenTest) -> list[str]:
    """Each question about other things than it names; as it is where it names none."""
    rng, changed = np.random.default_rng(4), []
    for row in test.rows:
        words = row["question"].split()
        for place, word in enumerate(words):
            bare = word.strip("?,.").lower()
            if bare in NAMES:
                words[place] = word.lower().replace(bare, str(rng.choice([name for name in NAMES if name != bare])))
        changed.append(" ".join(words))
    return changed


def measure(folder: str, records: Path, out: Path, only: str = "") -> None:
    """All figures of a model, or those whose names match `only`; what the file `out` has is not measured again."""
    model = load(folder)
    processor = make_processor(None, folder, make_config(None, folder, {}))
    result: dict[str, Any] = {"model": Path(folder).name}
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))

    def note(name: str, test: RealTest, ask: Callable[[], Answers]) -> None:
        if name not in result and re.search(only, name):
            with half_precision():
                answers = ask()
            result[name] = row(test, answers)
            result[name]["rights"] = "".join(str(int(hit)) for hit in answers.right)  # of each question in turn
            if name.endswith("budget"):
                result[name]["kepts"] = answers.kept
            write_json(out, result)
            print(name, {key: value for key, value in result[name].items() if key[-1] != "s"}, flush=True)

    untrained = load(folder)
    untrained.load_state_dict(fresh_selector(model.config, model.dtype), strict=False)
    for title, mark in OTHERS.items():
        other = records.with_name(f"{records.stem}{mark}.jsonl")
        if not other.is_file():
            continue
        test = RealTest(model, processor, other)
        note(f"{title}, no video", test, partial(test.blind, model))
        note(f"{title}, its own budget", test, partial(test.ask, model))
        for size, choice in SIZES.items():
            note(f"{title}, {size}", test, partial(test.ask, model, **choice))
            note(f"{title}, diversity, {size}", test, partial(test.ask, model, selection="diversity", **choice))
            if title == "32 s":
                same = of_same_videos(test)
                note(f"{title}, another question, {size}", test, partial(test.ask, model, queries=same, **choice))
                note(f"{title}, not trained, {size}", test, partial(test.ask, untrained, **choice))
                for method in ("uniform", "coverage"):
                    note(f"{title}, {method}, {size}", test, partial(test.ask, model, selection=method, **choice))
        note(f"{title}, all tokens", test, partial(test.ask, model, selection="all"))
    test = RealTest(model, processor, records)
    queries = {"another question of the same video": of_same_videos(test)}
    queries |= {"another video's question": of_other_videos(test), "other things' names": with_another_thing(test)}
    methods = ("uniform", "coverage", "random", "lm_attention")
    for size, choice in SIZES.items():
        for name, asked in queries.items():
            note(f"{name}, {size}", test, partial(test.ask, model, queries=asked, **choice))
        note(f"not trained, {size}", test, partial(test.ask, untrained, **choice))
        same = queries["another question of the same video"]
        note(f"not trained, another question, {size}", test, partial(test.ask, untrained, queries=same, **choice))
        without = test.without_needles()
        note(f"without the needles, {size}", test, partial(test.ask, model, selection=without, **choice))
        for method in methods:
            note(f"{method}, {size}", test, partial(test.ask, model, selection=method, **choice))
    for count in LADDER:
        note(f"{count} tokens", test, partial(test.ask, model, **cap(count)))
    if not only:
        result["budget"] = budget(test, result)
        result["seen"] = seen(test, model)
        write_json(out, result)
        print(result["budget"], result["seen"])


def seen(test: RealTest, model: Any) -> dict[str, float]:
    """What the null token leaves where something answers and where nothing does, and how often the first is more."""
    with half_precision():
        _, left, _ = test.scores(model)
    there = np.array([bool(found) for found in test.needles])
    some, none = (np.array(left)[there == part] for part in (True, False))
    area = area_under_curve(some.tolist(), none.tolist())
    return {
        name: round(float(value), 3) for name, value in (("some", some.mean()), ("none", none.mean()), ("area", area))
    }


def row(test: RealTest, answers: Answers) -> dict[str, Any]:
    """Per cent of right answers with its interval over videos, by kind, the tokens, and the needles' tokens kept."""
    right, counted = np.array(answers.right, dtype=float), test.counted
    low, high = interval(right[counted], test.videos[counted])
    share = np.array(answers.share)[~np.isnan(answers.share)] if answers.share else np.array([])
    return {
        "right": _percent(right[counted]),
        "interval": [round(100 * low, 1), round(100 * high, 1)],
        "tokens": round(float(np.mean(answers.kept)), 1),
        "needles kept": _percent(share) if len(share) else None,
        "kinds": {
            str(kind): [_percent(right[counted & (test.kinds == kind)]), int((counted & (test.kinds == kind)).sum())]
            for kind in KINDS
        },
        "other words": _percent(right[test.marked("other_words") & ~test.marked("doubtful")]),
        "doubtful": _percent(right[test.marked("doubtful")]),
        "list": _percent(right[test.kinds == "list"]),
    }


def budget(test: RealTest, result: dict[str, Any]) -> dict[str, Any]:
    """The model's own budget beside a constant one of equal mean, and how it follows the needles."""
    counted, own = test.counted, result["crowds, its own budget"]
    right = np.array([[*map(int, result[f"{count} tokens"]["rights"])] for count in LADDER]).T[counted]
    kept, needles = np.array(own["kepts"]), np.array([len(found) for found in test.needles])
    mean = float(kept[counted].mean())
    lead = np.array([*map(float, own["rights"])])[counted] - constant_right(right, LADDER, mean)
    low, high = interval(lead, test.videos[counted])
    some = needles > 0
    return {
        "tokens": round(mean, 1),
        "spread": round(float(kept[counted].std()), 1),
        "over constant": [round(100 * float(value), 1) for value in (lead.mean(), low, high)],
        "follows needles": round(spearman(kept, needles), 2) if kept.std() else None,
        "of those with needles": round(spearman(kept[some], needles[some]), 2) if kept[some].std() else None,
        "tokens by kind": {str(k): round(float(kept[test.kinds == k].mean()), 1) for k in np.unique(test.kinds)},
    }


def _percent(values: Any) -> float | None:
    return round(100 * float(np.mean(values)), 1) if len(values) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("records", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="a regular expression of the figures' names")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure(given.model, given.records, given.out, given.only)


if __name__ == "__main__":
    main()
