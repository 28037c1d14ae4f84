"""What a run will take, before any weight is loaded: trained parameters, memory, steps and disk."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..backbones import backbone_of
from ..data.formats import iter_rows
from ..hub.checkpoint import on_meta
from ..output import size
from .arguments import QTSplusTrainingArguments
from .attention import check_relevance
from .freezing import count_parameters, freeze
from .lora import add_lora, base_model, lora_config
from .models import make_config
from .recipe import Recipe


class Plan(NamedTuple):
    disk: int  # bytes of what a run saves
    lines: list[str]  # all that it takes, for a person


def make_plan(recipe: Recipe) -> Plan:
    """
    What a recipe takes, from its model on the meta device; a `ValueError` for settings that do not fit it. Memory is
    roughly that of weights, gradients, AdamW and what a step holds beside them, without another model that teaches.
    """
    args, training, data = recipe.model, recipe.training, recipe.data
    config = make_config(args.variant, args.weights, args.selector)
    with torch.device("meta"):
        model = on_meta(config)
        check_relevance(model, training)
        if training.lora_rank:
            model = add_lora(model, lora_config(training.lora_rank, training.lora_alpha, training.lora_dropout))
        else:
            freeze(model, training)
    counts, width = count_parameters(model), getattr(torch, args.dtype).itemsize
    saved = width * (counts.total - counts.trainable) + 4 * counts.trainable
    computed = 2 if training.bf16 or training.fp16 else width
    frames, tokens = _longest_clip(config, data.processor_kwargs)
    values = _values(recipe, config, tokens)
    memory = saved + 12 * counts.trainable + training.train_batch_size * computed * values
    samples = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    records, steps = None, training.max_steps if training.max_steps > 0 else None
    if all(Path(path).is_file() for path in data.train_files):
        records = sum(1 for path in data.train_files for _ in iter_rows(path))
        steps = steps or math.ceil(training.num_train_epochs * math.ceil(records / samples))
    disk = saved + _checkpoints(training, steps) * (saved + 8 * counts.trainable)
    clip = f"{frames} frames, {tokens:,} visual tokens"
    lines = [
        counts.describe(),
        f"about {size(memory)} of memory with clips of up to {clip}",
        f"{steps:,} steps of {samples} records" if steps else "the files to train on are not there: no step is known",
        f"{size(disk)} of disk for the model and its checkpoints in {recipe.output_dir}",
    ]
    if data.features is not None:
        clip_bytes, clips = tokens * base_model(model).model.token_width * computed, records or 100_000
        total = f"{size(clips * clip_bytes)} for {clips:,} clips"
        lines.append(f"{size(clip_bytes)} of disk for each clip in {data.features}, {total}")
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


def _longest_clip(config: Any, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Frames and visual tokens of the longest clip that the processor's settings let in; 64 frames without any."""
    vision, frames = config.vision_config, int(kwargs.get("num_frames") or kwargs.get("max_frames") or 64)
    processor = backbone_of(config.model_type).processor
    if not processor.native_resolution:  # square frames, of which a projector makes a quarter of the tokens
        side, patch = (
            value if isinstance(value, int) else value[0] for value in (vision.image_size, vision.patch_size)
        )
        return frames, frames * math.ceil(side // patch / 2) ** 2
    token = vision.temporal_patch_size * (vision.patch_size * vision.spatial_merge_size) ** 2
    longest = (kwargs.get("size") or {}).get("longest_edge")
    if processor.video_pixels is not None:
        return frames, int((longest or processor.video_pixels) / token)
    even = frames + frames % vision.temporal_patch_size
    return frames, int(even * (longest or processor.frame_pixels) / token)


def _values(recipe: Recipe, config: Any, tokens: int) -> int:
    """How many values a step holds beside the weights, for each record."""
    text, training, selector = config.text_config, recipe.training, config.qtsplus_config
    width, depth, prompt = text.hidden_size, text.num_hidden_layers, recipe.data.model_max_length or 512
    share = max(training.retention_range) if training.retention_range else selector.rho_max
    kept = tokens if selector.selection == "all" else min(math.ceil(tokens * share), selector.n_max)
    layer = 6 * width + 3 * text.intermediate_size  # what the inside of one holds
    inside = layer if training.gradient_checkpointing else depth * layer
    student = (prompt + kept) * (depth * width + inside + 2 * text.vocab_size) + 2 * tokens * width
    return max(student, (prompt + tokens) * layer) if training.relevance_weight else student
