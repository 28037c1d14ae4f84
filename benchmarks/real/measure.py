"""Measures a selector on the base with real words: `python -m benchmarks.real.measure MODEL OUT.json RECORDS ...`."""

import argparse
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus.common.journals import write_json
from qtsplus.data.formats import iter_rows, read_records
from qtsplus.data.records import parse_needles
from qtsplus.evaluation.labelled import sighting_tokens
from qtsplus.hub.convert import fresh_selector
from qtsplus.training.dataset import IGNORED, VideoQACollator, VideoQADataset
from qtsplus.training.features import encode_files
from qtsplus.training.models import make_config, make_processor

from ..files import read_result
from ..open.asking import Answers, OpenTest, load, of_other_videos
from ..open.measures import interval, spearman
from .fetch import ELSEWHERE
from .words import NAMES
from .work import half_precision

KINDS = ("present", "absent", "some", "kind", "which", "first")  # a list is seldom right to its last word
LADDER = (1, 2, 4, 8, 16, 32, 64)


SIZES = {"2 tokens": 2, "8 tokens": 8}
METHODS = ("diversity", "uniform", "coverage", "random", "lm_attention")


class RealTest(OpenTest):
    """Records of `write_records`, with their videos encoded once, when first asked about."""

    batch = 8  # a vocabulary of 49,152 makes logits large

    def __init__(self, model: Any, processor: Any, path: Path):
        self.records = list(read_records(path))
        self.rows = [row.content for row in iter_rows(path)]
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
        for record, row in zip(self.records, self.rows, strict=True):
            example = self.dataset.example(record)
            steps, rows, columns = example["video_grid_thw"][0].tolist()
            seen = [sighting for needle in parse_needles(row, record.question) for sighting in needle]
            grid = (steps, rows // 2, columns // 2)
            edges = np.arange(steps + 1) * float(example["second_per_grid_ts"][0])
            found.append(sighting_tokens(seen, grid, edges.tolist()).tolist() if seen else [])
        return found

    @cached_property
    def counted(self) -> np.ndarray:
        """`[questions]` bool: those of [`KINDS`], not in other words, and not about what the film itself shows."""
        return np.isin(self.kinds, KINDS) & ~self.marked("other_words") & ~self.marked("doubtful")

    def marked(self, mark: str) -> np.ndarray:
        return np.array([row.get(mark, False) for row in self.rows])

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


def measure(folder: str, records: Sequence[Path], out: Path, only: str = "") -> None:
    """Asks each set of records in all ways whose names match `only`; what the file `out` has is not asked again."""
    model = load(folder)
    untrained = load(folder)
    untrained.load_state_dict(fresh_selector(model.config, model.dtype), strict=False)
    processor = make_processor(None, folder, make_config(None, folder, {}))
    result = read_result(out) or {"model": Path(folder).name}
    for path in records:
        test = RealTest(model, processor, path)
        for way, ask in ways_to_ask(test, model, untrained).items():
            name = f"{path.stem}, {way}"
            if name in result or not re.search(only, name):
                continue
            with half_precision():
                answers = ask()
            result[name] = row(test, answers)
            if way == "its own budget":
                result[name] |= budget(test, answers)
            result["elsewhere"] = {way: over_videos(result, way) for way in ways_elsewhere(result)}
            write_json(out, result)
            print(name, result[name]["right"], flush=True)


def ways_to_ask(test: RealTest, model: Any, untrained: Any) -> dict[str, Callable[[], Answers]]:
    ways: dict[str, Callable[[], Answers]] = {
        "no video": partial(test.blind, model),
        "all tokens": partial(test.ask, model, selection="all"),
        "its own budget": partial(test.ask, model),
        "a tenth": partial(test.ask, model, retention=0.1),
    }
    for count in LADDER:
        ways[f"{count} tokens"] = partial(test.ask, model, retention=1.0, max_visual_tokens=count)
    for size, count in SIZES.items():
        few: dict[str, Any] = {"retention": 1.0, "max_visual_tokens": count}
        for method in METHODS:
            ways[f"{method}, {size}"] = partial(test.ask, model, selection=method, **few)
        ways[f"not trained, {size}"] = partial(test.ask, untrained, **few)
        ways[f"another question, {size}"] = partial(test.ask, model, queries=of_same_videos(test), **few)
        ways[f"another thing, {size}"] = partial(test.ask, model, queries=with_another_thing(test), **few)
    return ways


def row(test: RealTest, answers: Answers) -> dict[str, Any]:
    """Per cent of right answers with its interval over clips, by kind, the tokens, and the needles' tokens kept."""
    right = np.array(answers.right, dtype=float)
    counted = test.counted
    low, high = interval(right[counted], test.videos[counted])
    share = np.array(answers.share)
    by_kind = {}
    for kind in KINDS:
        asked = counted & (test.kinds == kind)
        by_kind[kind] = [_percent(right[asked]), int(asked.sum())]
    return {
        "right": _percent(right[counted]),
        "interval": [_percent([low]), _percent([high])],
        "tokens": round(float(np.mean(answers.kept)), 1),
        "needles kept": _percent(share[~np.isnan(share)]),
        "kinds": by_kind,
        "other words": _percent(right[test.marked("other_words") & ~test.marked("doubtful")]),
        "doubtful": _percent(right[test.marked("doubtful")]),
        "rights": "".join(str(int(hit)) for hit in right[counted]),  # of each question in turn
        "clips": test.videos[counted].tolist(),
    }


def ways_elsewhere(result: Mapping[str, Any]) -> list[str]:
    """What all videos of [`ELSEWHERE`] were asked: the ending of their records, and the way."""
    first = f"video-{ELSEWHERE[0]}"
    endings = [name.removeprefix(first) for name in result if name.startswith(first)]
    return [ending for ending in endings if all(f"video-{name}{ending}" in result for name in ELSEWHERE)]


def over_videos(result: Mapping[str, Any], ending: str) -> dict[str, Any]:
    """Per cent right over the videos of [`ELSEWHERE`], with intervals over videos and over clips, and of each."""
    rows = {name: result[f"video-{name}{ending}"] for name in ELSEWHERE}
    right = np.array([int(hit) for row in rows.values() for hit in row["rights"]], dtype=float)
    videos = np.array([name for name, row in rows.items() for _ in row["rights"]])
    clips = np.array([clip for row in rows.values() for clip in row["clips"]])
    return {
        "right": _percent(right),
        "over videos": [_percent([edge]) for edge in interval(right, videos)],
        "over clips": [_percent([edge]) for edge in interval(right, clips)],
        "questions": len(right),
        "by video": {name: row["right"] for name, row in rows.items()},
    }


def budget(test: RealTest, answers: Answers) -> dict[str, Any]:
    """What the model's own budget follows: the tokens that show the answer, with lists and without."""
    kept = np.array(answers.kept)
    needles = np.array([len(found) for found in test.needles])
    groups = {"all": needles >= 0, "with needles": needles > 0}
    groups["with needles, no lists"] = groups["with needles"] & (test.kinds != "list")
    follows = {}
    for name, group in groups.items():
        if kept[group].std():
            follows[name] = round(spearman(kept[group], needles[group]), 2)
    by_kind = {str(kind): round(float(kept[test.kinds == kind].mean()), 1) for kind in np.unique(test.kinds)}
    return {"kepts": kept.tolist(), "follows": follows, "tokens by kind": by_kind}


def _percent(shares: Any) -> float | None:
    return round(100 * float(np.mean(shares)), 1) if len(shares) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--only", default="", help="a regular expression of the figures' names")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure(given.model, given.records, given.out, given.only)


if __name__ == "__main__":
    main()
