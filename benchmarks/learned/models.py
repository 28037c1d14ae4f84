"""The work folder's models: trained when they are asked for and not there."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus.common.journals import write_json
from qtsplus.training.models import make_config, make_model, make_processor
from qtsplus.training.recipe import Recipe, load_stages
from qtsplus.training.running import is_finished, last_checkpoint, run
from qtsplus.video.storage import digest_of

from ..files import read_result
from ..teaching.trainer import TinyWorldTrainer
from .plan import Plan
from .policies import BASE, DEFAULT, FRESH


class Models:
    """
    What is trained from one base, in a folder: `seedN/VARIANT` holds a trained model.

    Args:
        base: a trained model that reads all tokens.
        recipe, overrides: by which variants are trained from it.
        plan: which.
        seeds: with which.
        work: the folder.
        say: hears of each thing that is done.

    Raises:
        ValueError: the folder holds what was trained with one of the seeds from another base or recipe.
    """

    def __init__(
        self,
        base: Path,
        recipe: Path,
        overrides: Sequence[str],
        plan: Plan,
        seeds: Sequence[int],
        work: Path,
        say: Callable[[str], None],
    ):
        self.base, self.recipe, self.overrides, self.plan = base, recipe, list(overrides), plan
        self.work, self.say = work, say
        self.base_model: Any = make_model(None, str(base)).eval()
        self.processor = make_processor(None, str(base), self.base_model.config)
        files = sorted(base.glob("*.safetensors"))
        weights = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
        self.setup = {
            "base": hashlib.sha256(weights).hexdigest(),
            "recipe": recipe.read_text(encoding="utf-8"),
            "overrides": self.overrides,
        }
        for seed in seeds:
            self._keep_setup(seed)

    def _keep_setup(self, seed: int) -> None:
        """Refuses to mix what was made from other weights or by another recipe."""
        path = self.work / f"seed{seed}" / "setup.json"
        earlier = read_result(path)
        if earlier is None:
            write_json(path, self.setup)
            return
        changed = [name for name in self.setup if self.setup[name] != earlier[name]]
        if changed:
            raise ValueError(f"{path.parent} was made with another {' and '.join(changed)}: choose another folder.")

    def load(self, seed: int, name: str) -> Any:
        """A variant, [`BASE`], or [`FRESH`]: the default before its training."""
        if name == BASE:
            return self.base_model
        return make_model(None, str(self.start(seed, DEFAULT) if name == FRESH else self.train(seed, name))).eval()

    def folder(self, seed: int, name: str) -> Path:
        return self.work / f"seed{seed}" / name

    def start(self, seed: int, name: str) -> Path:
        """The base with a variant's selector drawn from this seed, where training starts."""
        folder = self.folder(seed, name) / "start"
        if not (folder / "processor_config.json").exists():
            config = make_config(None, str(self.base), self._recipe(name).model.selector)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                drawn: Any = type(self.base_model)(config)
            kept = {key: value for key, value in self.base_model.state_dict().items() if ".qtsplus." not in key}
            drawn.load_state_dict(kept, strict=False)
            drawn.generation_config = self.base_model.generation_config
            drawn.save_pretrained(folder)
            self.processor.save_pretrained(folder)
        return folder

    def train(self, seed: int, name: str) -> Path:
        """Trains a variant by the recipe; its folder."""
        folder = self.folder(seed, name)
        if not is_finished(folder):
            settings = {
                "model.weights": str(self.start(seed, name)),
                "training.output_dir": str(folder),
                "training.seed": seed,
                "data.features": str(self.work / "features"),
            }
            started = time.perf_counter()
            recipe = self._recipe(name, *(f"{key}={json.dumps(value)}" for key, value in settings.items()))
            run(recipe, resume=last_checkpoint(folder) is not None)
            self.say(f"seed {seed}: trained {name} in {time.perf_counter() - started:.0f} s")
        return folder

    def _recipe(self, name: str, *more: str) -> Recipe:
        return load_stages(self.recipe, [*self.overrides, *more, *self.plan.variants[name]], TinyWorldTrainer)[0]

    def last_logged(self, seed: int, name: str, quantity: str) -> float:
        """The mean of a quantity over the last fifth of a variant's training."""
        state = self.train(seed, name) / "trainer_state.json"
        history = json.loads(state.read_text(encoding="utf-8"))["log_history"]
        values = [line[quantity] for line in history if quantity in line]
        return float(np.mean(values[-max(1, len(values) // 5) :]))


class Checkpoint:
    """
    One trained model, in place of what [`Models`] trains.

    Args:
        model, processor: as `qtsplus.asking.session.load` gives them.
        work: the folder for answers.
        say: hears of each thing that is done.
    """

    def __init__(self, model: Any, processor: Any, work: Path, say: Callable[[str], None]):
        self.base_model, self.processor, self.work, self.say = model, processor, work, say
        self.setup = {"base": digest_of(model.state_dict(), model.config.to_dict())}

    def load(self, seed: int, name: str) -> Any:
        """The model, whatever is asked for."""
        return self.base_model


__all__ = ["Checkpoint", "Models"]
