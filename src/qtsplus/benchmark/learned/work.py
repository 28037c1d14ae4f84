"""The work folder: trained models and finished answers, made when they are asked for and not there."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...data.scene import sighting_tokens
from ...data.tinyworld import needle_recall
from ...evaluation.baselines import fewer_frames, full_video, lower_resolution
from ...evaluation.exact_match import exact_match, model_inputs
from ...selector_qtsplus import kept_count
from ...training.dataset import VideoRecord
from ...training.models import load_model, load_processor
from ...training.recipe import load_recipe, run
from ..results import Journal, read_json, write_json
from . import policies
from .policies import BASE, DEFAULT, FRESH, Policy
from .questions import QuestionSet, with_questions_of_others


class Work:
    """
    What the benchmark has done, in a folder: `SEED/MODEL` holds a trained model, `SEED.jsonl` the answers.

    Args:
        base: a trained model that reads all tokens.
        recipe, overrides: by which variants are trained from it.
        test: what they are asked.
        work: the folder.
        batch_size: questions at a time.
        say: hears of each thing that is done.

    Raises:
        ValueError: the folder holds the work of another base, recipe or test set.
    """

    def __init__(
        self,
        base: Path,
        recipe: Path,
        overrides: Sequence[str],
        test: QuestionSet,
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
        self._journals: dict[int | None, Journal] = {}
        self.setup = self._keep_setup()

    def _keep_setup(self) -> dict[str, Any]:
        """Refuses to mix what was made from other weights, another recipe or another test set."""
        files = sorted(self.base.glob("*.safetensors"))
        weights = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
        setup = {
            "base": hashlib.sha256(weights).hexdigest(),
            "recipe": self.recipe.read_text(encoding="utf-8"),
            "overrides": self.overrides,
            "test": self.test.digest,
        }
        path = self.work / "setup.json"
        earlier = read_json(path)
        if earlier is None:
            write_json(path, setup)
        else:
            changed = [name for name in setup if setup[name] != earlier[name]]
            if changed:
                raise ValueError(f"{self.work} was made with another {' and '.join(changed)}: choose another folder.")
        return setup

    def _once(self, seed: int | None, key: str, make: Callable[[], Any]) -> Any:
        """A finished measurement from the journal of a seed (`None`: of the base); made and kept if it is not there."""
        if seed not in self._journals:
            name = BASE if seed is None else f"seed{seed}"
            self._journals[seed] = Journal(self.work / f"{name}.jsonl", self.setup)
        journal = self._journals[seed]
        if key not in journal.done:
            journal.add(key, make())
        return journal.done[key]

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

    def train(self, seed: int, name: str) -> Path:
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
            recipe = load_recipe(self.recipe, [*self.overrides, *fixed, *policies.VARIANTS[name]])
            started = time.perf_counter()
            run(recipe, resume=True)
            self.say(f"seed {seed}: trained {name} in {time.perf_counter() - started:.0f} s")
        return folder

    def load(self, seed: int | None, name: str) -> Any:
        if name == BASE or seed is None:
            return self.base_model
        if name == FRESH:
            return load_model(None, str(self.fresh(seed))).eval()
        return load_model(None, str(self.train(seed, name))).eval()

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

    @property
    def left_out(self) -> dict[str, str]:
        """Layouts that this backbone's videos do not have, and why."""
        if self.processor.native_resolution:
            return {}
        return {"lower_resolution": "this backbone makes as many tokens of a frame whatever its size"}

    def ask(self, seed: int | None, chosen: Sequence[Policy], seed_of_chance: int) -> list[dict[str, Any]]:
        """The outcomes of a model's policies: policy, seed, and a value for each question by name."""
        models: dict[str, Any] = {}  # loaded if there is something to ask

        def answer(policy: Policy) -> dict[str, list]:
            if policy.model not in models:
                models[policy.model] = self.load(seed, policy.model)
            started = time.perf_counter()
            outcomes = self._outcomes(models[policy.model], policy, seed_of_chance)
            self.say(f"seed {seed}: asked {policy.label} in {time.perf_counter() - started:.0f} s")
            return outcomes

        return [
            {"policy": policy, "seed": seed, **self._once(seed, policy.label, partial(answer, policy))}
            for policy in chosen
            if policy.layout not in self.left_out
        ]

    def _outcomes(self, model: Any, policy: Policy, seed: int) -> dict[str, list]:
        records = self.test.records
        if policy.shuffled:
            records = with_questions_of_others(records, seed)
        features = self.features() if policy.layout == "full" else self.features(policy.layout, policy.retention or 1.0)
        torch.manual_seed(seed)  # of selection="random"
        outcomes = exact_match(
            model,
            self.processor,
            records,
            selection=policy.selection,
            retention=None if policy.selection == "all" else policy.retention,
            batch_size=self.batch_size,
            progress=False,
            features=features,
        )
        totals = [len(video["video_features"]) for video in self._asked_videos()]
        shares = [outcome.rho if policy.retention is None else policy.retention for outcome in outcomes]
        n_max = model.config.qtsplus_config.n_max
        return {
            "correct": [outcome.correct for outcome in outcomes],
            "kept": [outcome.kept_tokens for outcome in outcomes],
            "asked": [kept_count(share, m, n_max) for share, m in zip(shares, totals, strict=True)],
            "visual": totals,
            "rho": [outcome.rho for outcome in outcomes],
            # Of a frame that was left out or shrunk, no token can be said to be kept.
            "recall": [
                needle_recall(outcome.kept_indices, needles) if policy.layout == "full" else None
                for outcome, needles in zip(outcomes, self._needle_tokens, strict=True)
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

    def agreement(self, seed: int, name: str) -> dict[str, float]:
        """What a trained model's training gate keeps, beside what it keeps at inference, with its own budget."""
        return self._once(seed, f"{name}-agreement", partial(self._compare_gates, seed, name))

    def _compare_gates(self, seed: int, name: str) -> dict[str, float]:
        model: Any = load_model(None, str(self.train(seed, name)))
        counts, overlaps = [], []
        torch.manual_seed(seed)
        for inputs in self._batches(self.test.records):
            with torch.no_grad():
                inferred = model.eval().model.compress(**inputs, sample_gate=False).qtsplus.kept_indices
                trained = model.train().model.compress(**inputs, sample_gate=True).qtsplus.kept_indices
            for at_inference, in_training in zip(inferred, trained, strict=True):
                a, b = set(at_inference.tolist()), set(in_training.tolist())
                counts.append((len(a), len(b)))
                overlaps.append(len(a & b) / len(a | b))
        asked, kept = (float(np.mean(column)) for column in zip(*counts, strict=True))
        return {"asked": asked, "kept_in_training": kept, "jaccard": float(np.mean(overlaps))}

    def _batches(self, records: Sequence[VideoRecord]) -> Iterator[dict[str, Any]]:
        """Inputs of the model, some questions at a time."""
        for start in range(0, len(records), self.batch_size):
            yield model_inputs(self.processor, records[start : start + self.batch_size], self.features())

    def landed(self, seed: int) -> list[dict[str, float]]:
        """Where the default's dataset-level budget, if the recipe has one, landed in training and on the test set."""
        target = self.load(seed, DEFAULT).config.qtsplus_config.target_n
        if target is None:
            return []
        folder = self.folder(seed, DEFAULT)
        tokens, reached, alpha = (_last_logged(folder, name) for name in ("visual_tokens", "n_asked", "alpha"))
        asked = self.agreement(seed, DEFAULT)["asked"]
        on_test = asked / float(np.mean([len(video["video_features"]) for video in self._asked_videos()]))
        row = {"seed": seed, "target": target, "reached": reached, "off": reached / target - 1, "alpha": alpha}
        return [{**row, "target_fraction": target / tokens, "test_fraction": on_test}]

    def budgets(self, seed: int) -> list[tuple[str, str, float]]:
        """Kind, video and the default's own rho, of every question and of the requests to describe a video."""
        records = [*self.test.records, *self.test.descriptions]

        def ask() -> list[float]:
            model = self.load(seed, DEFAULT)
            with torch.no_grad():
                found = [model.model.compress(**inputs).qtsplus.rho for inputs in self._batches(records)]
            return torch.cat(found).tolist()

        asked = self._once(seed, "budgets", ask)
        return [(record.kind, str(record.video), rho) for record, rho in zip(records, asked, strict=True)]


def _last_logged(folder: Path, name: str) -> float:
    """The mean of a quantity over the last fifth of a training's log."""
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    values = [line[name] for line in history if name in line]
    return float(np.mean(values[-max(1, len(values) // 5) :]))
