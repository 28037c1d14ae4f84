"""What a run will train and take, before any weight is loaded."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.files import size
from ..hub.checkpoint import on_meta
from .attention import check_relevance
from .freezing import prepare_parts, trained_and_all
from .models import make_config
from .recipe import Recipe


@dataclass(frozen=True)
class Plan:
    disk: int  # bytes of the model and of two checkpoints: a new one is written before an old one is removed
    lines: list[str]  # all that it takes, for a person


def make_plan(recipe: Recipe) -> Plan:
    """
    What a recipe trains and takes, from its model on the meta device; a `ValueError` for settings that do not fit it.
    Memory is that of weights, gradients and AdamW; what a step holds beside them depends on the clips.
    """
    args = recipe.model
    training = recipe.training
    config = make_config(args.variant, args.weights, args.selector)
    if Path(str(args.weights)).is_dir():
        stored = make_config(None, args.weights).text_config.hidden_size
        expected = config.text_config.hidden_size
        if stored != expected:
            raise ValueError(
                f"{args.weights} has a hidden size of {stored}, but the variant {args.variant} one of {expected}: add "
                "--set model.variant=null, so that the configuration is that of the weights."
            )
    with torch.device("meta"):
        model = on_meta(config)
        check_relevance(model, training)
        trained, total = trained_and_all(prepare_parts(model, training))
    frozen_bytes = getattr(torch, args.dtype).itemsize * (total - trained)
    saved = frozen_bytes + 4 * trained
    checkpoint = saved + 8 * trained
    memory = checkpoint + 4 * trained
    samples = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    disk = saved
    if training.save_strategy != "no":
        disk += 2 * checkpoint
    lines = [
        f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})",
        f"{size(memory)} of memory for weights, gradients and optimizer, and more for the {samples} records of a step",
        f"{size(saved)} of disk for the model in {recipe.output_dir}, and {size(checkpoint)} for each checkpoint",
    ]
    return Plan(disk, lines)
