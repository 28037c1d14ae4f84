"""What a run will take, before any weight is loaded: trained parameters, memory, steps and disk."""

import math
from pathlib import Path
from typing import NamedTuple

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


class Plan(NamedTuple):
    disk: int  # bytes of what a run saves
    lines: list[str]  # all that it takes, for a person


def make_plan(recipe: Recipe) -> Plan:
    """
    What a recipe takes, from its model on the meta device; a `ValueError` for settings that do not fit it. Memory is
    that of weights, gradients and AdamW; what a step holds beside them depends on the clips.
    """
    args, training = recipe.model, recipe.training
    config = make_config(args.variant, args.weights, args.selector)
    with torch.device("meta"):
        model = on_meta(config)
        check_relevance(model, training)
        if training.lora_rank:
            model = add_lora(model, lora_config(training.lora_rank, training.lora_alpha, training.lora_dropout))
        else:
            freeze(model, training)
    counts = count_parameters(model)
    saved = getattr(torch, args.dtype).itemsize * (counts.total - counts.trainable) + 4 * counts.trainable
    samples = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    steps = training.max_steps if training.max_steps > 0 else None
    if steps is None and all(Path(path).is_file() for path in recipe.data.train_files):
        records = sum(1 for path in recipe.data.train_files for _ in iter_rows(path))
        steps = math.ceil(training.num_train_epochs * math.ceil(records / samples))
    disk = saved + _checkpoints(training, steps) * (saved + 8 * counts.trainable)
    lines = [
        counts.describe(),
        f"{size(saved + 12 * counts.trainable)} of memory, and what a step holds beside weights and optimizer",
        f"{steps:,} steps of {samples} records" if steps else "no step is known without the files to train on",
        f"{size(disk)} of disk for the model and its checkpoints in {recipe.output_dir}",
    ]
    return Plan(disk, lines)


def _checkpoints(training: QTSplusTrainingArguments, steps: int | None) -> int:
    """How many stand beside each other: a new one is written before an old one goes."""
    if training.save_strategy == "no":
        return 0
    limit = training.save_total_limit
    if training.save_strategy != "steps" or steps is None:
        return limit + 1 if limit else 2
    every = training.save_steps if training.save_steps >= 1 else training.save_steps * steps
    written = math.ceil(steps / every)
    return min(written, limit + 1) if limit else written
