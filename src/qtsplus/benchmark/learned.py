"""What a selection costs in right answers: trained variants, training-free baselines and controls, on held-out videos.

[`run_learned`] trains what is not on disk yet, asks what has not been asked yet, and writes the results. Of an
interrupted run everything that was finished stays.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ..data.scene import Sighting, sighting_tokens
from ..data.tinyworld import POINT_KINDS, WIDE_KINDS, needle_recall
from ..data.tinyworld import QUESTION_KINDS as KINDS
from ..evaluation.baselines import fewer_frames, full_video, lower_resolution
from ..evaluation.exact_match import accuracy, exact_match, model_inputs
from ..selector_qtsplus import kept_count
from ..training.dataset import VideoRecord, read_records
from ..training.models import load_model, load_processor
from ..training.recipe import load_recipe, run
from .learned_report import write_report

RETENTIONS = (0.05, 0.1, 0.25)
DEFAULT = "straight_through"
# What is trained, and how each differs from the recipe.
VARIANTS: dict[str, tuple[str, ...]] = {
    DEFAULT: ("model.selector.gate=straight_through",),
    "gumbel": ("model.selector.gate=gumbel",),  # the paper's gate
    "no_reencoder": ("model.selector.reencode_layers=0",),  # the paper's nREENC
    "no_rope": ("model.selector.reencode_rope=false",),
    "sequential": ("model.selector.position_ids=sequential",),
    # How the reference implementation places tokens: nowhere in its re-encoder, and by their rank in the prompt.
    "reference_positions": ("model.selector.reencode_rope=false", "model.selector.position_ids=sequential"),
}
BASE, FRESH = "base", "fresh"
# Asked for rho alone: the widest request there is.
DESCRIPTION = "caption"


@dataclass(frozen=True)
class Policy:
    """
    One way to spend visual tokens, at one retention.

    Args:
        name: of the row.
        model: a variant, [`BASE`] (all tokens, as the recipe starts from) or [`FRESH`] (that with a random selector).
        retention: fraction of the tokens; `None` is the model's own budget.
        selection: as in `QTSplusConfig`.
        layout: which pixels of a video are encoded: "full", "fewer_frames" or "lower_resolution".
        shuffled: select by the question of another video.
    """

    name: str
    model: str
    retention: float | None
    selection: str = "qtsplus"
    layout: str = "full"
    shuffled: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}-{'own' if self.retention is None else format(self.retention, 'g')}"


def policies(model: str) -> list[Policy]:
    """All that a model is asked with."""
    if model == FRESH:
        return [Policy("untrained_selector", FRESH, retention) for retention in RETENTIONS]
    chosen = []
    if model != BASE:
        chosen = [Policy(model, model, retention) for retention in (*RETENTIONS, None)]
    if model in (BASE, DEFAULT):
        prefix = "base_" if model == BASE else ""
        chosen.append(Policy(f"{prefix}all", model, 1.0, "all"))
        for retention in RETENTIONS:
            chosen += [
                Policy(f"{prefix}uniform", model, retention, "uniform"),
                Policy(f"{prefix}random", model, retention, "random"),
                Policy(f"{prefix}fewer_frames", model, retention, "all", "fewer_frames"),
                Policy(f"{prefix}lower_resolution", model, retention, "all", "lower_resolution"),
            ]
    if model == DEFAULT:
        chosen += [Policy("shuffled_question", model, retention, shuffled=True) for retention in RETENTIONS]
    return chosen


@dataclass(frozen=True)
class TestSet:
    """
    Questions about TinyWorld's held-out videos.

    Args:
        records: of the kinds in [`KINDS`].
        needles: per record its evidence, see [`Question`].
        descriptions: the requests to describe a video, whose budget is looked at.
        digest: of the file.
    """

    records: list[VideoRecord]
    needles: list[list[list[Sighting]]]
    descriptions: list[VideoRecord]
    digest: str

    @classmethod
    def read(cls, path: Path) -> "TestSet":
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
        found = [(one, line) for one, line in zip(read_records(path), lines, strict=True) if one.video is not None]
        chosen = [(record, line) for record, line in found if line.get("kind") in KINDS]
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


class _Benchmark:
    """The work folder: trained models and finished answers, made when they are asked for and not there."""

    def __init__(
        self,
        base: Path,
        recipe: Path,
        overrides: Sequence[str],
        test: TestSet,
        work: Path,
        batch_size: int,
        say: Callable[[str], None],
    ):
        self.base, self.recipe, self.overrides, self.test = base, recipe, list(overrides), test
        self.work, self.batch_size, self.say = work, batch_size, say
        base_model: Any = load_model(None, str(base)).eval()
        self.processor = load_processor(None, str(base), base_model.config)
        self.base_model = base_model
        self._features: dict[tuple[str, float], dict[str, dict[str, torch.Tensor]]] = {}
        self._keep_setup()

    def _keep_setup(self) -> None:
        """Refuses to mix what was made from other weights, another recipe or another test set."""
        weights = b"".join(hashlib.sha256(one.read_bytes()).digest() for one in sorted(self.base.glob("*.safetensors")))
        setup = {
            "base": hashlib.sha256(weights).hexdigest(),
            "recipe": self.recipe.read_text(encoding="utf-8"),
            "overrides": self.overrides,
            "test": self.test.digest,
        }
        path = self.work / "setup.json"
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name in setup if setup[name] != earlier[name]]
            if changed:
                raise ValueError(f"{self.work} was made with another {' and '.join(changed)}: choose another folder.")
        _write_json(path, setup)

    # ----------------------------------------------------------------------------------------------------------------
    # Models
    # ----------------------------------------------------------------------------------------------------------------

    def folder(self, seed: int, model: str) -> Path:
        return self.work / f"seed{seed}" / model

    def fresh(self, seed: int) -> Path:
        """The base with a selector drawn from this seed, where training starts."""
        folder = self.folder(seed, FRESH)
        if not (folder / "processor_config.json").exists():
            model: Any = load_model(None, str(self.base))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                drawn: Any = type(model)(model.config)
            model.model.qtsplus.load_state_dict(drawn.model.qtsplus.state_dict())
            model.save_pretrained(folder)
            self.processor.save_pretrained(folder)
        return folder

    def train(self, seed: int, name: str, overrides: Sequence[str]) -> Path:
        """Trains a variant by the recipe; its folder."""
        folder = self.folder(seed, name)
        if not (folder / "trainer_state.json").exists():  # the last file that a run writes
            settings = {
                "model.weights": self.fresh(seed),
                "training.output_dir": folder,
                "training.seed": seed,
                "data.features": self.work / "features",
            }
            fixed = [
                f"{key}={json.dumps(str(value) if isinstance(value, Path) else value)}"
                for key, value in settings.items()
            ]
            recipe = load_recipe(self.recipe, [*self.overrides, *fixed, *overrides])
            started = time.perf_counter()
            run(recipe, resume=True)
            self.say(f"seed {seed}: trained {name} in {time.perf_counter() - started:.0f} s")
        return folder

    def load(self, seed: int | None, name: str) -> Any:
        if name == BASE or seed is None:
            return self.base_model
        if name == FRESH:
            return load_model(None, str(self.fresh(seed))).eval()
        return load_model(None, str(self.train(seed, name, VARIANTS[name]))).eval()

    # ----------------------------------------------------------------------------------------------------------------
    # Answers
    # ----------------------------------------------------------------------------------------------------------------

    def features(self, layout: str = "full", retention: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
        """Per video its encoded tokens; every model here has the base's vision tower."""
        if (layout, retention) not in self._features:
            read = {
                "full": lambda video: full_video(self.processor, video),
                "fewer_frames": lambda video: fewer_frames(self.processor, video, retention),
                "lower_resolution": lambda video: lower_resolution(self.processor, video, retention),
            }[layout]
            started, found = time.perf_counter(), {}
            for video in self.test.videos:
                pixels = read(video)
                encoded = self.base_model.encode_videos(pixels.pop("pixel_values_videos"), pixels["video_grid_thw"])
                found[video] = {"video_features": encoded[0], **pixels}
            self._features[layout, retention] = found
            self.say(f"encoded {len(found)} videos, {layout}, in {time.perf_counter() - started:.0f} s")
        return self._features[layout, retention]

    def answers(self, seed: int | None) -> Path:
        return self.work / (BASE if seed is None else f"seed{seed}") / "answers"

    @property
    def left_out(self) -> dict[str, str]:
        """Layouts that this backbone's videos do not have, and why."""
        if self.processor.native_resolution:
            return {}
        return {"lower_resolution": "this backbone makes as many tokens of a frame whatever its size"}

    def ask(self, seed: int | None, chosen: Sequence[Policy], seed_of_chance: int) -> list[dict[str, Any]]:
        """The outcomes of a model's policies, from disk where they are there."""
        model, results = None, []
        for policy in chosen:
            if policy.layout in self.left_out:
                continue
            path = self.answers(seed) / f"{policy.label}.json"
            if not path.exists():
                model = model or self.load(seed, policy.model)
                started = time.perf_counter()
                _write_json(path, self._outcomes(model, policy, seed_of_chance))
                self.say(f"seed {seed}: asked {policy.label} in {time.perf_counter() - started:.0f} s")
            results.append({"policy": policy, "seed": seed, **json.loads(path.read_text(encoding="utf-8"))})
        return results

    def _outcomes(self, model: Any, policy: Policy, seed: int) -> dict[str, list]:
        records = self.test.records
        if policy.shuffled:
            records = _with_questions_of_others(records, seed)
        settings = model.config.qtsplus_config
        settings.selection = policy.selection
        features = self.features() if policy.layout == "full" else self.features(policy.layout, policy.retention or 1.0)
        torch.manual_seed(seed)  # of selection="random"
        outcomes = exact_match(
            model,
            self.processor,
            records,
            retention=None if policy.selection == "all" else policy.retention,
            batch_size=self.batch_size,
            progress=False,
            features=features,
        )
        totals = [len(video["video_features"]) for video in self._asked_videos()]
        shares = [one.rho if policy.retention is None else policy.retention for one in outcomes]
        return {
            "correct": [one.correct for one in outcomes],
            "kept": [one.kept_tokens for one in outcomes],
            "asked": [kept_count(share, m, settings.n_max) for share, m in zip(shares, totals, strict=True)],
            "visual": totals,
            "rho": [one.rho for one in outcomes],
            # Of a frame that was left out or shrunk, no token can be said to be kept.
            "recall": [
                needle_recall(one.kept_indices, needles) if policy.layout == "full" else None
                for one, needles in zip(outcomes, self._needle_tokens, strict=True)
            ],
        }

    @cached_property
    def _needle_tokens(self) -> list[list[np.ndarray]]:
        """Per question and needle, the visual tokens that show it."""
        found = []
        for video, needles in zip(self._asked_videos(), self.test.needles, strict=True):
            (grid,) = self.base_model.model.merged_grid(video["video_grid_thw"])
            seconds = float(video["second_per_grid_ts"][0])
            found.append([sighting_tokens(seen, grid, seconds) for seen in needles])
        return found

    def _asked_videos(self) -> list[dict[str, torch.Tensor]]:
        """The video of each question."""
        return [self.features()[str(record.video)] for record in self.test.records]

    def agreement(self, seed: int, name: str, overrides: Sequence[str]) -> dict[str, float]:
        """What a trained model's training gate keeps, beside what it keeps at inference, with its own budget."""
        path = self.answers(seed) / f"{name}-agreement.json"
        if not path.exists():
            model: Any = load_model(None, str(self.train(seed, name, overrides)))
            features, counts, overlaps = self.features(), [], []
            torch.manual_seed(seed)
            for start in range(0, len(self.test.records), self.batch_size):
                batch = self.test.records[start : start + self.batch_size]
                inputs = model_inputs(self.processor, batch, features)
                with torch.no_grad():
                    inferred = model.eval().model.compress(**inputs, sample_gate=False).qtsplus.kept_indices
                    trained = model.train().model.compress(**inputs, sample_gate=True).qtsplus.kept_indices
                for one, other in zip(inferred, trained, strict=True):
                    a, b = set(one.tolist()), set(other.tolist())
                    counts.append((len(a), len(b)))
                    overlaps.append(len(a & b) / len(a | b))
            asked, kept = (float(np.mean(column)) for column in zip(*counts, strict=True))
            _write_json(path, {"asked": asked, "kept_in_training": kept, "jaccard": float(np.mean(overlaps))})
        return json.loads(path.read_text(encoding="utf-8"))

    def landed(self, seed: int) -> list[dict[str, float]]:
        """Where the default's dataset-level budget, if the recipe has one, landed in training and on the test set."""
        target = self.load(seed, DEFAULT).config.qtsplus_config.target_n
        if target is None:
            return []
        folder = self.folder(seed, DEFAULT)
        tokens, reached, alpha = (_last_logged(folder, name) for name in ("visual_tokens", "n_asked", "alpha"))
        asked = self.agreement(seed, DEFAULT, VARIANTS[DEFAULT])["asked"]
        on_test = asked / float(np.mean([len(one["video_features"]) for one in self._asked_videos()]))
        row = {"seed": seed, "target": target, "reached": reached, "off": reached / target - 1, "alpha": alpha}
        return [{**row, "target_fraction": target / tokens, "test_fraction": on_test}]

    def budgets(self, seed: int) -> list[tuple[str, str, float]]:
        """Kind, video and the default's own rho, of every question and of the requests to describe a video."""
        path, records = self.answers(seed) / "budgets.json", [*self.test.records, *self.test.descriptions]
        if not path.exists():
            model, features, rho = self.load(seed, DEFAULT), self.features(), []
            for start in range(0, len(records), self.batch_size):
                inputs = model_inputs(self.processor, records[start : start + self.batch_size], features)
                with torch.no_grad():
                    rho += model.model.compress(**inputs).qtsplus.rho.tolist()
            _write_json(path, rho)
        asked = json.loads(path.read_text(encoding="utf-8"))
        return [(record.kind, str(record.video), rho) for record, rho in zip(records, asked, strict=True)]


def run_learned(
    base: Path,
    test: Path,
    out: Path,
    *,
    recipe: Path = Path("recipes/qtsplus-tiny.yaml"),
    overrides: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    work: Path = Path("runs/learned"),
    batch_size: int = 64,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """
    Runs the learned benchmark: `learned.json` (rows), `learned-details.json`, `learned.md` and plots.

    Args:
        base: a trained model that reads all tokens.
        test: questions of `qtsplus data tinyworld --split test`.
        out: folder of the results.
        recipe: by which every variant is trained from the base; `overrides` as for [`load_recipe`].
        seeds: of training; a seed draws the selector and the order of the data.
        work: where trained models and answers are kept. Processes with different seeds may share it.
        batch_size: questions at a time.
        command: what was typed, for the record.
        say: hears of each thing that is done.

    Raises:
        ValueError: a recipe that trains the vision tower, an unfit test set, a `work` folder of another benchmark.
    """
    if not load_recipe(recipe, overrides).training.freeze_vision_model:
        raise ValueError(f"{recipe} trains the vision tower: the benchmark encodes the videos once for all models.")
    bench = _Benchmark(base, recipe, overrides, TestSet.read(test), work, batch_size, say)
    for layout, reason in bench.left_out.items():
        say(f"{layout} is left out: {reason}")
    results = bench.ask(None, policies(BASE), seeds[0])
    agreement, dual, budgets = [], [], []
    for seed in seeds:
        results += bench.ask(seed, policies(FRESH), seed)
        for name in VARIANTS:
            results += bench.ask(seed, policies(name), seed)
            agreement.append({"policy": name, "seed": seed, **bench.agreement(seed, name, VARIANTS[name])})
        dual += bench.landed(seed)
        budgets += bench.budgets(seed)

    kinds = [record.kind for record in bench.test.records]
    rows = _rows(results, kinds)
    details = {
        "command": command,
        "seeds": list(seeds),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
        },
        "recipe": recipe.read_text(encoding="utf-8"),
        "overrides": list(overrides),
        "variants": {name: list(changes) for name, changes in VARIANTS.items()},
        "questions": len(kinds),
        "videos": len(bench.test.videos),
        "test_sha256": bench.test.digest,
        "left_out": bench.left_out,
        "differences": _differences(results, bench.test.records),
        "agreement": agreement,
        "adaptive": _adaptive(budgets, seeds),
        "dual": dual,
    }
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "learned.json", rows)
    _write_json(out / "learned-details.json", details)
    write_report(rows, details, out)
    return out / "learned.json"


def _rows(results: list[dict[str, Any]], kinds: list[str]) -> list[dict[str, Any]]:
    """A row for every policy, retention and seed, and one (seed `null`) for all seeds together."""
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for one in results:
        groups.setdefault((one["policy"].name, one["policy"].retention), []).append(one)
    rows = []
    for (name, retention), group in groups.items():
        parts = [(None, group), *((one["seed"], [one]) for one in group if one["seed"] is not None)]
        for seed, chosen in parts:
            rows.append({"policy": name, "retention": retention, "seed": seed, **_row(chosen, kinds)})
    return rows


def _row(chosen: list[dict[str, Any]], kinds: list[str]) -> dict[str, Any]:
    joined = {
        name: [value for one in chosen for value in one[name]]
        for name in ("correct", "kept", "asked", "visual", "recall")
    }
    kinds = kinds * len(chosen)

    def share(picked: list[int]) -> dict[str, Any]:
        value, low, high = accuracy([joined["correct"][index] for index in picked])
        recalls = [joined["recall"][index] for index in picked if joined["recall"][index] is not None]
        return {
            "questions": len(picked),
            "accuracy": value,
            "low": low,
            "high": high,
            "needle_recall": float(np.mean(recalls)) if recalls else None,
        }

    return {
        **share(list(range(len(kinds)))),
        "kept": float(np.mean(joined["kept"])),
        "asked": float(np.mean(joined["asked"])),
        "kept_fraction": sum(joined["kept"]) / sum(joined["visual"]),
        "kinds": {kind: share([i for i, one in enumerate(kinds) if one == kind]) for kind in KINDS if kind in kinds},
    }


def _adaptive(budgets: list[tuple[str, str, float]], seeds: Sequence[int]) -> dict[str, Any]:
    """rho by kind, and by how much it is larger for each wide kind than for the point questions of the same videos."""
    by_kind: dict[str, list[float]] = {}
    by_video: dict[str, dict[str, list[float]]] = {}
    for kind, video, rho in budgets:
        by_kind.setdefault(kind, []).append(rho)
        by_video.setdefault(video, {}).setdefault("point" if kind in POINT_KINDS else kind, []).append(rho)
    gaps = {
        kind: _mean_interval(
            [np.mean(one[kind]) - np.mean(one["point"]) for one in by_video.values() if kind in one and "point" in one]
        )
        for kind in (*WIDE_KINDS, DESCRIPTION)
    }
    return {
        "rho": {kind: _mean_interval(by_kind[kind]) for kind in (*KINDS, DESCRIPTION) if kind in by_kind},
        "wide_minus_point": {kind: gap for kind, gap in gaps.items() if gap},
        "seeds": list(seeds),
    }


def _differences(results: list[dict[str, Any]], records: list[VideoRecord]) -> list[dict[str, Any]]:
    """
    By how much the default is better than each other policy at the same retention, on the same questions.

    A question's correctness is its mean over the seeds, so seeds count as one experiment, and the intervals are over
    videos, whose questions are not independent.
    """
    correct: dict[tuple[str, float | None], np.ndarray] = {}
    for key in {(one["policy"].name, one["policy"].retention) for one in results}:
        group = [one["correct"] for one in results if (one["policy"].name, one["policy"].retention) == key]
        correct[key] = np.mean(np.array(group, dtype=float), axis=0)
    videos = np.array([str(record.video) for record in records])
    kinds = np.array([record.kind for record in records])
    rows = []
    for (name, retention), other in sorted(correct.items(), key=str):
        # What keeps everything is compared with the default at every retention.
        for share in RETENTIONS if retention == 1.0 else (retention,):
            if name == DEFAULT or (DEFAULT, share) not in correct:
                continue
            gain = correct[DEFAULT, share] - other
            row: dict[str, Any] = {"policy": name, "default_retention": share, "retention": retention}
            chosen = {kind: kinds == kind for kind in KINDS if kind in kinds}
            chosen = {"all": np.ones(len(kinds), bool), "when_and_order": np.isin(kinds, ("when", "order")), **chosen}
            row["gain"] = {label: _clustered_interval(gain[mask], videos[mask]) for label, mask in chosen.items()}
            rows.append(row)
    return rows


def _clustered_interval(values: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """Mean with the bounds of its 95% interval, for values that are independent between clusters only."""
    names, index = np.unique(clusters, return_inverse=True)
    if len(names) < 2:
        return {}
    mean = float(np.mean(values))
    sums = np.bincount(index, weights=values - mean)
    error = float(np.sqrt(len(names) / (len(names) - 1) * np.sum(sums**2))) / len(values)
    return {"mean": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}


def _mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean with the bounds of its 95% interval."""
    if not values:
        return {}
    mean = float(np.mean(values))
    half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": mean, "low": mean - half, "high": mean + half, "count": len(values)}


def _with_questions_of_others(records: Sequence[VideoRecord], seed: int) -> list[VideoRecord]:
    """Every record with the query of a question about another video; the prompt stays its own."""
    order = np.random.default_rng(seed).permutation(len(records))
    shuffled = list(records)
    for place, index in enumerate(order):
        record = records[index]
        others = (records[order[(place + step) % len(order)]] for step in range(1, len(order)))
        other = next((one for one in others if one.video != record.video), record)
        shuffled[index] = replace(record, query=other.query or other.question)
    return shuffled


def _last_logged(folder: Path, name: str) -> float:
    """The mean of a quantity over the last fifth of a training's log."""
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    values = [line[name] for line in history if name in line]
    return float(np.mean(values[-max(1, len(values) // 5) :]))


def _write_json(path: Path, content: Mapping[str, Any] | list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)  # a file that stands there is whole


__all__ = ["RETENTIONS", "VARIANTS", "Policy", "TestSet", "policies", "run_learned"]
