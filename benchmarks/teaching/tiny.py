"""The crowd's tiny model from nothing: its videos, its base and its selector, by one seed."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from qtsplus.common.files import check_folder
from qtsplus.model.modeling_qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.training.models import make_config, make_processor
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import is_finished, last_checkpoint, run_stages

from ..bases import CROWD
from ..world.tinyworld import build_dataset
from .trainer import TinyWorldTrainer

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
WORLDS = 100_000  # of one seed; the next seed's come behind them
# By the name of its folder: how many videos of how many seconds, and what is different about them.
SETS: dict[str, tuple[int, int, dict[str, Any]]] = {
    **{f"still{few}": (1600, 1, {"max_objects": few, "conversations": True}) for few in (4, 8, 12)},
    "still": (3000, 1, {"conversations": True}),
    "small": (6000, 1, {"conversations": True, "frame_size": 84}),
    "4s": (2400, 4, {"conversations": True, "ask": {"direction": 3, "when": 4}}),
    "8s": (2400, 8, {"conversations": True, "ask": {"direction": 3, "when": 3, "order": 2}}),
    "questions": (400, 8, {}),
    "small8": (400, 8, {"frame_size": 84, "teacher_videos": "data/questions"}),
}


def make_tiny(
    work: Path,
    seed: int = 0,
    *,
    share: float = 1.0,
    workers: int = 1,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> Path:
    """
    Renders, trains the base and then the selector. What is on disk is not made again.

    Args:
        work: the folder for all of it; another one for every seed.
        seed: of the videos, the weights and the order.
        share: of the videos, for a trial.
        workers: processes that render.
        overrides: as for [`load_stages`], for every stage.

    Returns:
        The folder of the model.

    Raises:
        ValueError: a folder that was made with another seed or share.
    """
    check_folder(work).mkdir(parents=True, exist_ok=True)
    settings = [f"training.seed={seed}", *overrides]
    with _inside(work):
        for number, (name, (size, seconds, options)) in enumerate(SETS.items(), start=1):
            count = max(1, round(share * size))
            say(f"Videos {number} of {len(SETS)}: {count} of {seconds} s, data/{name}")
            options = {"multiple_choice": 0.0, "workers": workers, **options}
            build_dataset(f"data/{name}", "train", count, (seconds,), crowd=True, first=seed * WORLDS, **options)
        _draw_weights(Path("runs/crowd-random"), seed)
        folder = Path()
        for name in ("crowd-base", "crowd"):
            stages = load_stages(RECIPES / f"{name}.yaml", settings, TinyWorldTrainer)
            folder = stages[-1].output_dir
            if is_finished(folder):
                say(f"{name} is finished")
                continue
            say(f"Training {name}: {', '.join(stage.stage or 'the selector' for stage in stages)}")
            begun = any(is_finished(stage.output_dir) or last_checkpoint(stage.output_dir) for stage in stages)
            run_stages(stages, resume=begun)
    return work / folder


def _draw_weights(folder: Path, seed: int) -> None:
    """A model of the shape of the committed one with random weights, and its processor."""
    config = make_config(None, str(CROWD))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLQTSplusForConditionalGeneration(config).save_pretrained(folder)
    make_processor(None, str(CROWD), config).save_pretrained(folder)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """The working folder, to which the recipes' paths are relative."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


__all__ = ["SETS", "make_tiny"]
