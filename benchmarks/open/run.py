"""Measures a trained model in the world without a grid: `python -m benchmarks.open.run MODEL DATA OUT.json`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus.common.journals import write_json

from ..world.open_sets import VARIANTS
from .asking import LADDER, Answers, OpenTest, load, of_other_videos, open_test, otherwise, with_another_word
from .haystack import counts_by_length
from .measures import area_under_curve, constant_right, interval, overlap, spearman, tokens_for

MIXED = ("test-plain", "test-16s", "test-30s")
TENTH = 0.1
POINTS = ("mark", "existence")  # what one thing at one place answers
LOOKING_LAYER = 2  # whose attention taught the scores


def percent(values: Any) -> float:
    return round(100 * float(np.mean(values)), 1)


def measure(folder: str, data: Path, out: Path, limit: int) -> None:
    """All figures of a model, of `limit` questions of each set; those that the file `out` has are kept."""
    model = load(folder)
    tests = {name: open_test(folder, data / name / "test.jsonl", limit) for name in MIXED}
    short = tests[MIXED[0]]
    parts: dict[str, Callable[[], Any]] = {
        "model": lambda: Path(folder).name,
        "questions": lambda: {name: len(test) for name, test in tests.items()},
        "budget": lambda: budgets(model, tests),
        "length": lambda: counts_by_length(model, short),
        "nothing seen": lambda: nothing_seen(model, short),
        "points": lambda: points(folder, model, short),
        "shown otherwise": lambda: shown_otherwise(folder, model, data, limit),
    }
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for name, make in parts.items():
        if name not in result:
            result[name] = make()
            write_json(out, result)
            print(name, flush=True)


def budgets(model: Any, tests: dict[str, OpenTest]) -> dict[str, Any]:
    """Budgets over videos of several lengths, each beside a constant one of equal mean."""
    asked: dict[str, list[Answers]] = {}
    ladders, config = [], model.config.qtsplus_config
    for test in tests.values():
        ladders.append([test.ask(model, retention=1.0, max_visual_tokens=count).right for count in LADDER])

        def note(name: str, answers: Answers) -> None:
            asked.setdefault(name, []).append(answers)

        note("its own", test.ask(model))
        if config.budget == "loss":
            for factor in (4, 2, 0.5):
                price = {"token_price": config.token_price * factor}
                note(f"a price {factor} times as high", _asked_with(model, test, price))
        note("all tokens", test.ask(model, selection="all"))
        note("a share of the tokens", test.ask(model, retention=_share(asked["its own"])))
    right = np.concatenate([np.array(ladder).T for ladder in ladders])
    needles = [len(found) for test in tests.values() for found in test.needles]
    videos = np.concatenate([np.char.add(f"{name} ", test.videos) for name, test in tests.items()])
    kinds = np.concatenate([test.kinds for test in tests.values()])
    rows = {}
    for name, found in asked.items():
        hits, kept = [hit for one in found for hit in one.right], [count for one in found for count in one.kept]
        rows[name] = _row(hits, kept, right, needles, videos)
    ladder = {str(count): percent(right[:, place]) for place, count in enumerate(LADDER)}
    by_kind = {str(kind): _of_kind(asked, kinds == kind) for kind in np.unique(kinds)}
    oracle = _oracle(right)
    rows["oracle: the fewest that are enough"] = _row(*oracle, right, needles, videos)
    return {"rows": rows, "constant": ladder, "by kind": by_kind}


def _of_kind(asked: dict[str, list[Answers]], chosen: np.ndarray) -> dict[str, float]:
    """How many questions of a kind there are, their tokens, and how many are answered right."""
    own, every = (
        {field: np.concatenate([getattr(one, field) for one in asked[name]])[chosen] for field in ("kept", "right")}
        for name in ("its own", "all tokens")
    )
    return {
        "questions": int(chosen.sum()),
        "tokens": round(float(own["kept"].mean()), 1),
        "right": percent(own["right"]),
        "right, all tokens": percent(every["right"]),
    }


def _share(found: list[Answers]) -> float:
    """The same share of every video, near the mean count of the model's own budget for videos of 8 seconds."""
    return float(np.mean(found[0].kept)) / 288


def _asked_with(model: Any, test: OpenTest, settings: dict[str, Any]) -> Answers:
    """With other fields of the selector's configuration."""
    config = model.config.qtsplus_config
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    try:
        return test.ask(model)
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _oracle(right: np.ndarray) -> tuple[list[bool], list[int]]:
    """The fewest from which on it is right; one token where it never is."""
    stays = np.logical_and.accumulate(right[:, ::-1], 1)[:, ::-1]
    place = np.where(stays.any(1), stays.argmax(1), 0)
    return right[np.arange(len(right)), place].tolist(), [LADDER[index] for index in place]


def _row(
    hits: list[bool], kept: list[int], right: np.ndarray, needles: list[int], videos: np.ndarray
) -> dict[str, Any]:
    mean = float(np.mean(kept))
    constant = constant_right(right, LADDER, mean)
    enough, some = tokens_for(right, LADDER, float(np.mean(hits))), np.array(needles) > 0
    low, high = interval(np.array(hits) - constant, videos)
    return {
        "tokens": round(mean, 1),
        "spread": round(float(np.std(kept)), 1),
        "right": percent(hits),
        "constant": percent(constant),
        "over constant": [percent(np.array(hits) - constant), round(100 * low, 1), round(100 * high, 1)],
        "constant needs": round(enough, 1),
        "fewer": round(100 * (1 - mean / enough), 0),
        "follows needles": round(spearman(kept, needles), 2) if np.std(kept) else 0.0,
        "of those with needles": round(spearman(np.array(kept)[some], np.array(needles)[some]), 2)
        if np.std(kept)
        else 0.0,
    }


def points(folder: str, model: Any, test: OpenTest) -> dict[str, Any]:
    """The choice at a tenth, beside controls: right answers, and the needles' tokens that were kept."""
    ways: dict[str, Answers] = {
        "all tokens": test.ask(model, selection="all"),
        "its own question": test.ask(model, retention=TENTH),
        "another video's question": test.ask(model, queries=of_other_videos(test), retention=TENTH),
        "its question with one word changed": test.ask(model, queries=with_another_word(test), retention=TENTH),
        "uniform": test.ask(model, selection="uniform", retention=TENTH),
        "diversity": test.ask(model, selection="diversity", retention=TENTH),
    }
    attending = load(folder, attention_layer=LOOKING_LAYER)
    ways["the language model's attention"] = test.ask(attending, selection="lm_attention", retention=TENTH)
    for name, texts in otherwise(test).items():
        ways[f"asked {name}"] = test.ask(model, texts=texts, retention=TENTH)
        ways[f"asked {name}, all tokens"] = test.ask(model, texts=texts, selection="all")
    pointed = np.isin(test.kinds, POINTS)
    return {
        name: {
            "right": percent(found.right),
            "right, points": percent(np.array(found.right)[pointed]),
            "needle tokens": percent(_known(np.array(found.share))),
            "needle tokens, points": percent(_known(np.array(found.share)[pointed])),
        }
        for name, found in ways.items()
    }


def _known(values: np.ndarray) -> np.ndarray:
    """Without those of questions that have no needles."""
    return values[~np.isnan(values)]


def shown_otherwise(folder: str, model: Any, data: Path, limit: int) -> dict[str, dict[str, float]]:
    """The same questions about the same videos, shifted, dark, tall or with bars."""
    figures = {}
    for variant in VARIANTS:
        test = open_test(folder, data / f"test-{variant}" / "test.jsonl", limit)
        own = test.ask(model)
        figures[variant] = {
            "all tokens": percent(test.ask(model, selection="all").right),
            "a tenth": percent(test.ask(model, retention=TENTH).right),
            "its own budget": percent(own.right),
            "tokens": round(float(np.mean(own.kept)), 1),
        }
    return figures


def nothing_seen(model: Any, test: OpenTest) -> dict[str, Any]:
    """What tells a question about what is not there, and how well evidence names the seconds of what is."""
    relevance, seen, seconds = test.scores(model)
    shares = [row / row.sum() for row in relevance]
    entropy = [float(-(row * np.log(row + 1e-12)).sum()) for row in shares]
    asked = test.kinds == "existence"
    yes = asked & np.array([row["answer"] == "Yes" for row in test.rows])
    measures = {
        "what the null token leaves": seen,
        "the largest relevance": [float(np.max(row)) for row in relevance],
        "the largest share": [float(np.max(row)) for row in shares],
        "less entropy": [-value for value in entropy],
    }
    areas = {
        name: round(area_under_curve(np.array(found)[yes], np.array(found)[asked & ~yes]), 3)
        for name, found in measures.items()
    }
    truth = [
        {token // (total // row["seconds"]) for token in tokens}
        for tokens, total, row in zip(test.needles, test.totals, test.rows, strict=True)
    ]
    rng, places = np.random.default_rng(5), np.flatnonzero(yes)
    own = [overlap(seconds[place], truth[place]) for place in places]
    chance = [overlap(truth[int(rng.choice(places))], truth[place]) for place in places]
    touched = [bool(seconds[place] & truth[place]) for place in places]
    by_chance = [bool(truth[int(rng.choice(places))] & truth[place]) for place in places]
    return {
        "area": areas,
        "seen, yes": [round(float(value), 2) for value in np.percentile(np.array(seen)[yes], [5, 50, 95])],
        "seen, no": [round(float(value), 2) for value in np.percentile(np.array(seen)[asked & ~yes], [5, 50, 95])],
        "overlap": round(float(np.mean(own)), 3),
        "overlap by chance": round(float(np.mean(chance)), 3),
        "touched": percent(touched),
        "touched by chance": percent(by_chance),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure(given.model, given.data, given.out, given.limit)


if __name__ == "__main__":
    main()
