"""What is asked of the models of one base, and the answers that are kept."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from qtsplus.common.journals import Journal
from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.labelled import sighting_tokens
from qtsplus.model.selector_qtsplus import kept_count
from qtsplus.training.models import make_model

from ..exact_match import compress, exact_match, model_inputs
from ..files import begin
from .baselines import fewer_frames, full_video, lower_resolution
from .models import Checkpoint, Models
from .policies import DEFAULT, ORACLES, OTHER_VIDEO, TWO_PASSES, Policy
from .questions import QuestionSet, with_options, with_other_questions, with_questions_of_others
from .tokens import keep_first, object_tokens, oracle_order, recalls
from .twice import ask_twice

# At which a gate's choice in training is compared with that at inference.
GATE_RETENTION = 0.1


class Work:
    """
    Answers of the models of one base to one set of questions, each asked for once.

    Args:
        models: of the base.
        test: what they are asked.
        batch_size: questions at a time.
    """

    def __init__(self, models: Models | Checkpoint, test: QuestionSet, batch_size: int):
        self.test, self.batch_size = test, batch_size
        self.models: Any = models  # only what is trained is asked for its training
        self.base_model, self.processor, self.say = models.base_model, models.processor, models.say
        self._features: dict[tuple[str, float], dict[str, dict[str, torch.Tensor]]] = {}
        self._journals: dict[int | None, Journal] = {}

    def once(self, seed: int | None, key: str, make: Callable[[], Any]) -> Any:
        """A finished measurement from the journal of a seed (`None`: of the base); made and kept if it is not there."""
        if seed not in self._journals:
            setup = {**self.models.setup, "test": self.test.digest}
            name = f"base-{setup['base'][:12]}" if seed is None else f"seed{seed}"
            folder = self.models.work / f"answers-{self.test.digest[:12]}"
            self._journals[seed] = begin(folder / f"{name}.jsonl", setup)
        journal = self._journals[seed]
        if key not in journal.done:
            journal.add(key, make())
        return journal.done[key]

    # ----------------------------------------------------------------------------------------------------------------
    # What is asked about
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

    @property
    def left_out(self) -> dict[str, str]:
        """Layouts that this backbone's videos do not have, and why."""
        if self.processor.native_resolution:
            return {}
        reason = "this backbone makes as many tokens of a frame whatever its size"
        return {"lower_resolution": reason, TWO_PASSES: reason}

    @cached_property
    def _needles(self) -> list[list[np.ndarray]]:
        """Per question and needle, the visual tokens that show it."""
        grids = [self._grids[str(record.video)] for record in self.test.records]
        return [
            [sighting_tokens(seen, *grid) for seen in needles]
            for grid, needles in zip(grids, self.test.needles, strict=True)
        ]

    @cached_property
    def _objects(self) -> list[np.ndarray]:
        """Per question, the visual tokens of its video that show any object."""
        found = {video: object_tokens(world, *self._grids[video]) for video, world in self.test.worlds.items()}
        nothing = np.empty(0, dtype=np.int64)
        return [found.get(str(record.video), nothing) for record in self.test.records]

    @cached_property
    def _grids(self) -> dict[str, tuple[tuple[int, int, int], float]]:
        """Per video its grid of visual tokens, and the seconds of a step."""
        grids = {}
        for name, video in self.features().items():
            (grid,) = self.base_model.model.merged_grid(video["video_grid_thw"])
            grids[name] = grid, float(video["second_per_grid_ts"][0])
        return grids

    @cached_property
    def _totals(self) -> list[int]:
        """Per question, the visual tokens of its video."""
        features = self.features()
        return [len(features[str(record.video)]["video_features"]) for record in self.test.records]

    # ----------------------------------------------------------------------------------------------------------------
    # Answers
    # ----------------------------------------------------------------------------------------------------------------

    def ask(self, seed: int | None, chosen: Sequence[Policy], seed_of_chance: int) -> list[dict[str, Any]]:
        """
        The outcomes of a model's policies: policy, seed, and a value for each question by name, `None` where it was not
        asked.
        """
        models: dict[str, Any] = {}  # loaded if there is something to ask

        def answer(policy: Policy) -> dict[str, list]:
            if policy.model not in models:
                models[policy.model] = self.models.load(seed_of_chance, policy.model)
            started = time.perf_counter()
            outcomes = self._outcomes(models[policy.model], policy, seed_of_chance)
            self.say(f"seed {seed}: asked {policy.label} in {time.perf_counter() - started:.0f} s")
            return outcomes

        results = [
            {"policy": policy, "seed": seed, **self.once(seed, policy.label, partial(answer, policy))}
            for policy in chosen
            if policy.layout not in self.left_out
        ]
        return [outcomes for outcomes in results if "correct" in outcomes]  # videos of one question have no wrong one

    def _outcomes(self, model: Any, policy: Policy, seed: int) -> dict[str, list]:
        if policy.layout == TWO_PASSES:
            return self._in_two_passes(model, policy)
        records = self._records(policy, seed)
        asked = [index for index, record in enumerate(records) if record is not None]
        features = self.features() if policy.layout == "full" else self.features(policy.layout, policy.retention or 1.0)
        selection: Any = policy.selection
        if selection in ORACLES:
            selection = keep_first(self.processor, self.test.records, self._orders(selection, seed))
        torch.manual_seed(seed)  # of selection="random"
        with configured(model, policy.settings):
            outcomes = exact_match(
                model,
                self.processor,
                [record for record in records if record is not None],
                selection=selection,
                retention=None if policy.selection == "all" else policy.retention,
                max_visual_tokens=policy.max_visual_tokens,
                reencode=policy.reencode,
                batch_size=self.batch_size,
                features=features,
            )
        n_max = min(model.config.qtsplus_config.n_max, policy.max_visual_tokens or sys.maxsize)
        own: list[set[int]] = []
        if policy.wrong_question is not None:
            call: dict[str, Any] = {"retention": policy.retention, "selection": policy.selection}
            own = self._selected(model, [self.test.records[index] for index in asked], **call)
        found: dict[str, list] = {}
        for place, (index, outcome) in enumerate(zip(asked, outcomes, strict=True)):
            share, total = outcome.rho if policy.retention is None else policy.retention, self._totals[index]
            measured: dict[str, Any] = {
                "correct": outcome.correct,
                "kept": outcome.kept_tokens,
                "asked": kept_count(share, total, n_max),
                "visual": total,
                "rho": outcome.rho,
            }
            # Of a frame that was left out or shrunk, no token can be said to be kept.
            if policy.layout == "full":
                measured |= recalls(outcome.kept_indices, self._needles[index], self._objects[index])
            if own:
                measured["jaccard"] = _jaccard(own[place], set(outcome.kept_indices))
            for name, value in measured.items():
                found.setdefault(name, [None] * len(records))[index] = value
        return found

    def _in_two_passes(self, model: Any, policy: Policy) -> dict[str, list]:
        """`first_pass` and `second_pass` are the tokens that the vision tower made in each."""
        retention, n_max = policy.retention or 1.0, model.config.qtsplus_config.n_max
        found: dict[str, list] = {}
        asked = ask_twice(model, self.processor, self.test.records, retention, self.batch_size)
        for index, twice in enumerate(asked):
            outcome, total = twice.outcome, self._totals[index]
            measured: dict[str, Any] = {
                "correct": outcome.correct,
                "kept": outcome.kept_tokens,
                "asked": kept_count(retention, total, n_max),
                "visual": total,
                "rho": retention,
                "first_pass": twice.small,
                "second_pass": twice.large,
                **recalls(outcome.kept_indices, self._needles[index], self._objects[index]),
            }
            for name, value in measured.items():
                found.setdefault(name, []).append(value)
        return found

    def _records(self, policy: Policy, seed: int) -> Sequence[VideoRecord | None]:
        """The questions with what a policy selects by."""
        if policy.with_options:
            return with_options(self.test.records)
        if policy.wrong_question is None:
            return self.test.records
        if policy.wrong_question == OTHER_VIDEO:
            return with_questions_of_others(self.test.records, seed)
        return with_other_questions(self.test.records, self._needles, seed)

    def _orders(self, oracle: str, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        known = zip(self._needles, self._objects, self._totals, strict=True)
        return [oracle_order(oracle, needles, objects, total, rng) for needles, objects, total in known]

    def _selected(self, model: Any, records: Sequence[VideoRecord], sample_gate: bool = False, **call: Any) -> list:
        """Per question the set of the tokens that the model keeps for it."""
        kept: list[set[int]] = []
        with torch.no_grad():
            for inputs in self._batches(records):
                chosen = compress(model.model, **inputs, sample_gate=sample_gate, **call).qtsplus.kept_indices
                kept += [set(indices.tolist()) for indices in chosen]
        return kept

    def _batches(self, records: Sequence[VideoRecord]) -> Iterator[dict[str, Any]]:
        """Inputs of the model, some questions at a time."""
        for start in range(0, len(records), self.batch_size):
            yield model_inputs(self.processor, records[start : start + self.batch_size], self.features())

    # ----------------------------------------------------------------------------------------------------------------
    # Gates and budgets
    # ----------------------------------------------------------------------------------------------------------------

    def agreement(self, seed: int, name: str) -> dict[str, float]:
        """What a trained model's training gate keeps of a tenth of the tokens, beside what it keeps at inference."""
        return self.once(seed, f"{name}-agreement", partial(self._compare_gates, seed, name))

    def _compare_gates(self, seed: int, name: str) -> dict[str, float]:
        model: Any = make_model(None, str(self.models.train(seed, name)))
        torch.manual_seed(seed)
        inferred = self._selected(model.eval(), self.test.records, retention=GATE_RETENTION)
        trained = self._selected(model.train(), self.test.records, sample_gate=True, retention=GATE_RETENTION)
        return {
            "asked": float(np.mean([len(kept) for kept in inferred])),
            "kept_in_training": float(np.mean([len(kept) for kept in trained])),
            "jaccard": float(np.mean([_jaccard(one, other) for one, other in zip(inferred, trained, strict=True)])),
        }

    def landed(self, seed: int, own_budget: dict[str, Any]) -> list[dict[str, float]]:
        """
        Where the default's dataset-level budget, if the recipe has one, landed in training and on the test set.

        Args:
            own_budget: the outcomes of the default with its own budget.
        """
        target = self.models.load(seed, DEFAULT).config.qtsplus_config.target_n
        if target is None:
            return []
        names = ("visual_tokens", "n_asked", "alpha")
        tokens, reached, alpha = (self.models.last_logged(seed, DEFAULT, name) for name in names)
        on_test = sum(own_budget["asked"]) / sum(own_budget["visual"])
        row = {"seed": seed, "target": target, "reached": reached, "off": reached / target - 1, "alpha": alpha}
        return [{**row, "target_fraction": target / tokens, "test_fraction": on_test}]

    def budgets(self, seed: int) -> list[tuple[str, str, float]]:
        """Kind, video and the default's own rho, of every question and of the requests to describe a video."""
        records = [*self.test.records, *self.test.descriptions]

        def ask() -> list[float]:
            model = self.models.load(seed, DEFAULT)
            with torch.no_grad():
                found = [compress(model.model, **inputs).qtsplus.rho for inputs in self._batches(records)]
            return torch.cat(found).tolist()

        asked = self.once(seed, "budgets", ask)
        return [(record.kind, str(record.video), rho) for record, rho in zip(records, asked, strict=True)]


@contextmanager
def configured(model: Any, settings: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """The model with other values of some fields of its selector's configuration."""
    config = model.config.qtsplus_config
    before = {name: getattr(config, name) for name, _ in settings}
    try:
        for name, value in settings:
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _jaccard(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one | other)
