"""What a run will take, before any weight is loaded: trained parameters, memory, steps and disk."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.files import size
from ..data.formats import iter_rows
from ..hub.checkpoint import on_meta
from .arguments import QTSplusTrainingArguments
from .attention import check_relevance
from .freezing import count_parameters, freeze
from .lora import add_lora, lora_config
from .models import make_config
from .recipe import Recipe


@dataclass(frozen=True)
class Plan:
    disk: int  # bytes of what a run saves
    lines: list[str]  # all that it takes, for a person


def make_plan(recipe: Recipe) -> Plan:
    """
    What a recipe takes, from its model on the meta device; a `ValueError` for settings that do not fit it. Memory is
    that of weights, gradients and AdamW; what a step holds beside them depends on the clips.
    """
    args = recipe.model
    training = recipe.training
    config = make_config(args.variant, args.weights, args.selector)
    with torch.device("meta"):
        model = on_meta(config)
        check_relevance(model, training)
        if training.lora_rank:
            adapters = lora_config(training.lora_rank, training.lora_alpha, training.lora_dropout)
            model = add_lora(model, adapters)
        else:
            freeze(model, training)
    counts = count_parameters(model)
    frozen_bytes = getattr(torch, args.dtype).itemsize * (counts.total - counts.trainable)
    saved = frozen_bytes + 4 * counts.trainable
    samples = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    steps = _steps(recipe, samples)
    checkpoint = saved + 8 * counts.trainable
    disk = saved + _checkpoints(training, steps) * checkpoint
    lines = [
        counts.describe(),
        f"{size(saved + 12 * counts.trainable)} of memory, and what a step holds beside weights and optimizer",
        f"{steps:,} steps of {samples} records" if steps else "no step is known without the files to train on",
        f"{size(disk)} of disk for the model and its checkpoints in {recipe.output_dir}",
    ]
    return Plan(disk, lines)


def _steps(recipe: Recipe, samples: int) -> int | None:
    """The steps of a run with so many samples each; `None` if its files are not there to be counted."""
    training = recipe.training
    files = recipe.data.train_files
    if training.max_steps > 0:
        return training.max_steps
    if not all(Path(path).is_file() for path in files):
        return None
    records = 0
    for path in files:
        records += sum(1 for _ in iter_rows(path))
    epoch = math.ceil(records / samples)
    return math.ceil(training.num_train_epochs * epoch)


def _checkpoints(training: QTSplusTrainingArguments, steps: int | None) -> int:
    """How many checkpoints are on the disk at once: a new one is written before an old one is removed."""
    if training.save_strategy == "no":
        return 0
    limit = training.save_total_limit
    if training.save_strategy != "steps" or steps is None:
        return limit + 1 if limit else 2
    every = training.save_steps
    if every < 1:
        every *= steps
    written = math.ceil(steps / every)
    return min(written, limit + 1) if limit else written
