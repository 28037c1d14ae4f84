"""Recipes: a YAML file with a model, data and training section, and what runs it."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoModelForImageTextToText, HfArgumentParser
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..backbones import backbone_of
from ..hub.card import card_data
from ..hub.initialise import initialise_selector
from .arguments import QTSplusTrainingArguments
from .collator import VideoQACollator
from .dataset import VideoQADataset, VideoRecord, read_records
from .features import VideoFeatures, encode_videos
from .freezing import count_parameters, freeze, vision_modules
from .lora import add_lora, lora_config
from .models import load_config, load_model, load_processor
from .trainer import QTSplusTrainer


@dataclass
class ModelArguments:
    """
    The `model` section.

    Args:
        variant: a folder of `hub_configs`, whose configuration is used; that of `weights` when absent.
        weights: a folder or Hub id with a QTSplus model, or with a Qwen2.5-VL that gets a fresh selector; seeded random
            weights when absent.
        selector: fields of `qtsplus_config` to change.
        initialise: sets a fresh selector's starting point, see [`initialise_selector`].
        dtype: of the weights that are frozen; those that are trained are held in float32, which small learning rates
            need.
        attn_implementation: as for `from_pretrained`.
        teacher: a folder or Hub id; for `distillation_weight`, the model itself with all visual tokens when absent.
    """

    variant: str | None = None
    weights: str | None = None
    selector: dict[str, Any] = field(default_factory=dict)
    initialise: str | None = None
    dtype: str = "float32"
    attn_implementation: str | None = None
    teacher: str | None = None


@dataclass
class DataArguments:
    """
    The `data` section.

    Args:
        train_files: JSONL files of records, see [`VideoRecord`]; mixed by shuffling, and one that is named twice counts
            twice.
        eval_files: the same for evaluation.
        model_max_length: most text tokens of an example.
        processor_kwargs: for every call of the processor, such as `{fps: 1, max_frames: 64}`.
        features: a folder in which the videos' features are kept. Each video is decoded and encoded once, before
            training, which the frozen vision tower then never enters; runs of the same tower may share a folder.
    """

    train_files: list[str]
    eval_files: list[str] = field(default_factory=list)
    model_max_length: int | None = None
    processor_kwargs: dict[str, Any] = field(default_factory=dict)
    features: str | None = None


@dataclass
class Recipe:
    model: ModelArguments
    data: DataArguments
    training: QTSplusTrainingArguments


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-6 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_recipe(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Recipe:
    """
    Reads a recipe.

    Args:
        overrides: such as `"training.max_steps=10"`; the value is YAML.

    Raises:
        ValueError: an unknown section or field, or a value that a section refuses.
    """
    content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506, a SafeLoader
    names = [one.name for one in fields(Recipe)]
    if not isinstance(content, dict) or not set(content) <= set(names):
        raise ValueError(f"{path}: expected the sections {', '.join(names)}.")
    sections: dict[str, dict] = {name: dict(content.get(name) or {}) for name in names}
    for override in overrides:
        key, separator, value = override.partition("=")
        section, _, name = key.partition(".")
        if not separator or section not in sections or not name:
            raise ValueError(f"{override!r}: expected SECTION.FIELD=VALUE with one of the sections {', '.join(names)}.")
        target = sections[section]
        *parents, last = name.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = yaml.load(value, Loader=_Loader)  # noqa: S506
    kinds = (ModelArguments, DataArguments, QTSplusTrainingArguments)
    return Recipe(*(_parse(path, name, kind, sections[name]) for name, kind in zip(names, kinds, strict=True)))


def _parse(path: str | os.PathLike, name: str, kind: Any, section: dict[str, Any]) -> Any:
    known = {one.name for one in fields(kind) if one.init}
    unknown = sorted(set(section) - known)
    if unknown:
        raise ValueError(f"{path}: the section {name!r} has no field {', '.join(unknown)}.")
    try:
        return HfArgumentParser(kind).parse_dict(section)[0]
    except TypeError as error:  # a required field is missing
        raise ValueError(f"{path}: the section {name!r} is incomplete: {error}") from error


def build_trainer(recipe: Recipe) -> QTSplusTrainer:
    """The Trainer of a recipe, with its model loaded and its records read."""
    args, training = recipe.model, recipe.training
    model = load_model(args.variant, args.weights, args.selector, args.dtype, args.attn_implementation, training.seed)
    if args.initialise is not None:
        initialise_selector(model, args.initialise)
    processor = load_processor(args.variant, args.weights, model.config)
    teacher = None
    if args.teacher is not None:
        teacher = AutoModelForImageTextToText.from_pretrained(args.teacher, dtype=args.dtype)

    data = recipe.data
    train, evaluation = (
        [one for path in files for one in read_records(path)] for files in (data.train_files, data.eval_files)
    )
    features = None
    if data.features is not None:
        videos = [record.video for record in train + evaluation if record.video is not None]
        features = _encode(recipe, model, processor, videos)

    def dataset(records: list[VideoRecord]) -> VideoQADataset | None:
        if not records:
            return None
        return VideoQADataset(records, processor, data.model_max_length, data.processor_kwargs, features)

    train_dataset = dataset(train)
    trainer = QTSplusTrainer(
        model,
        training,
        teacher=teacher,
        train_dataset=train_dataset,
        eval_dataset=dataset(evaluation),
        data_collator=VideoQACollator(processor),
        processing_class=processor,
    )
    base = args.variant if args.weights is not None else None
    trainer.about = {
        **card_data(base, "license", "license_name", "license_link", "base_model"),
        "training_data": f"{len(train_dataset or ())} records of {', '.join(map(_name, recipe.data.train_files))}.",
    }
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return trainer


def _encode(recipe: Recipe, model: Any, processor: Any, videos: list[str]) -> VideoFeatures:
    data, training = recipe.data, recipe.training
    if not training.freeze_vision_model:
        raise ValueError("data.features are those of a vision tower that stays as it is: set freeze_vision_model.")
    if recipe.model.teacher is not None:
        raise ValueError("A teacher looks at the videos itself: leave out data.features, or model.teacher.")
    for module in vision_modules(model).values():
        module.to(training.device)
    mixed = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    return encode_videos(
        model,
        processor,
        videos,
        str(data.features),
        data.processor_kwargs,
        autocast_dtype=mixed,
        workers=training.dataloader_num_workers,
    )


def _name(path: str) -> str:
    return f"`{Path(path).name}`"


def run(recipe: Recipe, resume: bool = False) -> Path:
    """
    Trains, and saves the model to the recipe's `output_dir`.

    Args:
        resume: go on from the last complete checkpoint in `output_dir`; from the start if there is none.

    Raises:
        ValueError: `output_dir` holds checkpoints and `resume` is false.
    """
    output_dir = Path(str(recipe.training.output_dir))
    checkpoint = last_checkpoint(output_dir)
    if checkpoint is not None and not resume:
        raise ValueError(f"{output_dir} holds {checkpoint.name}: resume the run, or choose another output_dir.")
    trainer = build_trainer(recipe)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    trainer.accelerator.end_training()
    return output_dir


def last_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint that was written to its end: the Trainer's state is the last file."""
    found = [path for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            continue
        return path
    return None


def dry_run(recipe: Recipe) -> str:
    """What a recipe would train, on the meta device: no weights, no data."""
    config = load_config(recipe.model.variant, recipe.model.weights, recipe.model.selector)
    training = recipe.training
    with torch.device("meta"):
        model: nn.Module = backbone_of(config.model_type).model(config)
        if training.lora_rank:
            model = add_lora(model, lora_config(training.lora_rank, training.lora_alpha, training.lora_dropout))
        else:
            freeze(model, training)
    return count_parameters(model).describe()


__all__ = [
    "DataArguments",
    "ModelArguments",
    "Recipe",
    "build_trainer",
    "dry_run",
    "last_checkpoint",
    "load_recipe",
    "run",
]
