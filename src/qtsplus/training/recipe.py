"""Recipes: a YAML file with a model, data and training section, and what runs it."""

import json
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..backbones import backbone_of
from ..data.records import VideoRecord
from ..hub.card import card_data
from ..hub.initialise import INITIALISATIONS, initialise_selector
from ..settings import check_types, parse_yaml, show
from .arguments import QTSplusTrainingArguments
from .attention import AttentionChoice, check_relevance
from .collator import VideoQACollator
from .dataset import VideoQADataset, check_frame_settings
from .features import AttentionTargets, VideoFeatures, encode_videos
from .freezing import count_parameters, freeze, vision_modules
from .lora import add_lora, lora_config
from .models import load_config, load_model, load_processor
from .targets import note_targets
from .teachers import require_same_backbone, require_same_tokens
from .trainer import QTSplusTrainer

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class ModelArguments:
    """
    The `model` section.

    Args:
        variant: a folder of `hub_configs`, whose configuration is used; that of `weights` when absent.
        weights: a folder or Hub id with a QTSplus model, or with a Qwen2.5-VL that gets a fresh selector; seeded random
            weights when absent.
        selector: fields of `qtsplus_config` to change.
        language_model: fields of `text_config` to change, for random weights.
        initialise: sets a fresh selector's starting point, see [`initialise_selector`].
        dtype: of the weights that are frozen; those that are trained are held in float32, which small learning rates
            need.
        attn_implementation: as for `from_pretrained`.
        teacher: a folder or Hub id; for `distillation_weight`, the model itself with all visual tokens when absent.
        relevance_teacher: the same for `relevance_weight`: a model of the same backbone with the same tokenizer and the
            same visual tokens, with a selector or without. With `lm_attention` the model itself teaches, but reads
            groups of frames through its first layers alone: for videos that are too long to be read whole.
    """

    variant: str | None = None
    weights: str | None = None
    selector: dict[str, Any] = field(default_factory=dict)
    language_model: dict[str, Any] = field(default_factory=dict)
    initialise: str | None = None
    dtype: str = "float32"
    attn_implementation: str | None = None
    teacher: str | None = None
    relevance_teacher: str | None = None

    def __post_init__(self) -> None:
        if self.variant is None and self.weights is None:
            raise ValueError("model names neither a variant nor weights; expected at least one of them.")
        for name in ("variant", "weights", "attn_implementation", "teacher", "relevance_teacher"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ValueError(f"model.{name} is empty; give a value, or leave it out.")
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}.")
        if self.initialise is not None and self.initialise not in INITIALISATIONS:
            raise ValueError(f"model.initialise is {self.initialise!r}; expected one of {', '.join(INITIALISATIONS)}.")


@dataclass
class DataArguments:
    """
    The `data` section.

    Args:
        train_files: sets of questions with answers in any format of [`iter_rows`]; mixed by shuffling, and one that is
            named twice counts twice.
        eval_files: the same for evaluation.
        media_root: the folder of their videos; beside each file when absent.
        model_max_length: most text tokens of an example.
        processor_kwargs: for every call of the processor, such as `{fps: 1, max_frames: 64}`.
        features: a folder in which the videos' features are kept. Each video is decoded and encoded once, before
            training, which the frozen vision tower then never enters; runs of the same tower may share a folder. With a
            `relevance_weight` and a teacher that does not train (a `relevance_teacher`, or a frozen language model) its
            attention is kept there too, one pass for each example.
    """

    train_files: list[str]
    eval_files: list[str] = field(default_factory=list)
    media_root: str | None = None
    model_max_length: int | None = None
    processor_kwargs: dict[str, Any] = field(default_factory=dict)
    features: str | None = None

    def __post_init__(self) -> None:
        if not self.train_files:
            raise ValueError("data.train_files is empty; expected the files to train on.")
        if self.model_max_length is not None and self.model_max_length < 1:
            raise ValueError(f"data.model_max_length is {self.model_max_length}; expected at least 1.")
        for name in ("media_root", "features"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ValueError(f"data.{name} is empty; give a folder, or leave it out.")
        check_frame_settings(self.processor_kwargs)


@dataclass
class Recipe:
    """
    Args:
        model, data, training: the sections.
        path: the file, beside which other recipes stand.
        trainer_class: what runs it.
    """

    model: ModelArguments
    data: DataArguments
    training: QTSplusTrainingArguments
    path: Path
    trainer_class: type[QTSplusTrainer] = QTSplusTrainer


_SECTIONS = ("model", "data", "training")


def load_recipe(
    path: str | os.PathLike, overrides: Sequence[str] = (), trainer_class: type[QTSplusTrainer] = QTSplusTrainer
) -> Recipe:
    """
    Reads a recipe.

    Args:
        overrides: such as `"training.max_steps=10"`; the value is YAML.
        trainer_class: what is to run it; the `training` section has the fields of its arguments.

    Raises:
        ValueError: what is not YAML; an unknown section or field; a value of another type, or one that a section
            refuses.
    """
    sections = _read_sections(path)
    for override in overrides:
        _apply(override, sections)
    kinds = {"model": ModelArguments, "data": DataArguments, "training": trainer_class.arguments_class}
    parsed = {name: _parse(path, name, kind, sections[name]) for name, kind in kinds.items()}
    return Recipe(**parsed, path=Path(path), trainer_class=trainer_class)


def _read_sections(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {str(path)!r}; expected a recipe in YAML.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file; expected a recipe in YAML.") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict) or not set(content) <= set(_SECTIONS):
        raise ValueError(f"{path}: expected the sections {', '.join(_SECTIONS)}.")
    for name, section in content.items():
        if section is not None and not isinstance(section, dict):
            raise ValueError(f"{path}: the section {name!r} is {show(section)}; expected fields with values.")
    return {name: dict(content.get(name) or {}) for name in _SECTIONS}


def _apply(override: str, sections: dict[str, dict[str, Any]]) -> None:
    """Sets the one field that an override names."""
    key, separator, value = override.partition("=")
    section, _, name = key.partition(".")
    *parents, last = name.split(".")
    if not separator or section not in sections or not all((*parents, last)):
        expected = f"SECTION.FIELD=VALUE with one of the sections {', '.join(_SECTIONS)}"
        raise ValueError(f"{override!r}: expected {expected}.")
    target = sections[section]
    for parent in parents:
        inner = target.get(parent)
        if inner is not None and not isinstance(inner, dict):
            raise ValueError(f"{override!r}: {parent} is {show(inner)}, which has no fields.")
        target[parent] = dict(inner or {})  # a YAML anchor may share it
        target = target[parent]
    target[last] = parse_yaml(value, repr(override))


def _parse(path: str | os.PathLike, name: str, kind: Any, section: dict[str, Any]) -> Any:
    known = {entry.name: entry for entry in fields(kind) if entry.init}
    unknown = sorted(str(field_name) for field_name in set(section) - set(known))
    if unknown:
        raise ValueError(f"{path}: the section {name!r} has no field {', '.join(unknown)}.")
    required = [entry for entry in known.values() if entry.default is entry.default_factory is MISSING]
    missing = [entry.name for entry in required if entry.name not in section]
    if missing:
        raise ValueError(f"{path}: the section {name!r} lacks {', '.join(missing)}.")
    check_types(f"{path}: {name}.", kind, section)
    try:
        return kind(**section)
    except ImportError as error:  # such as DeepSpeed
        raise ValueError(f"{path}: {name} asks for a package that is not installed: {error}") from error
    except (TypeError, ValueError) as error:  # TypeError: an unknown field of a nested section of Transformers'
        raise ValueError(f"{path}: {error}") from error


def build_trainer(recipe: Recipe) -> QTSplusTrainer:
    """
    The Trainer of a recipe, with its model loaded and its records read.

    Raises:
        ValueError: weights or records that are not there or cannot be read.
    """
    args, training, data, trainer_class = recipe.model, recipe.training, recipe.data, recipe.trainer_class
    _require_weights(recipe)
    # What is quickly read is read first.
    train, evaluation = (
        [record for path in files for record in trainer_class.dataset_class.read(path, data.media_root)]
        for files in (data.train_files, data.eval_files)
    )
    if not train:
        raise ValueError(f"{recipe.path}: data.train_files hold no record.")
    loading = args.dtype, args.attn_implementation, training.seed, args.language_model
    model = load_model(args.variant, args.weights, args.selector, *loading)
    if args.initialise is not None:
        initialise_selector(model, args.initialise)
    processor = load_processor(args.variant, args.weights, model.config)
    teacher = None
    if args.teacher is not None:
        teacher = AutoModelForImageTextToText.from_pretrained(args.teacher, dtype=args.dtype)

    relevance_teacher = _load_relevance_teacher(recipe, model, processor)
    features = None
    if data.features is not None:
        features = _encode(recipe, model, processor, train + evaluation)

    def dataset(records: list[VideoRecord]) -> VideoQADataset | None:
        if not records:
            return None
        return trainer_class.dataset_class(records, processor, data.model_max_length, data.processor_kwargs, features)

    train_dataset = dataset(train)
    collator = trainer_class.collator_class(processor)
    frozen = relevance_teacher is not None or (training.freeze_language_model and not training.lora_rank)
    if data.features is not None and train_dataset is not None and training.relevance_weight and frozen:
        # Nothing of the teacher trains: it reads every example once.
        train_dataset.targets = _note(recipe, model, relevance_teacher, train_dataset, collator)
        relevance_teacher = None
    trainer = trainer_class(
        model,
        training,
        teacher=teacher,
        relevance_teacher="lm_attention" if args.relevance_teacher == "lm_attention" else relevance_teacher,
        train_dataset=train_dataset,
        eval_dataset=dataset(evaluation),
        data_collator=collator,
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


def _require_weights(recipe: Recipe) -> None:
    """Raises `ValueError` for weights that another recipe makes and that are not there yet."""
    for weights in (recipe.model.weights, recipe.model.teacher, recipe.model.relevance_teacher):
        if weights in (None, "lm_attention") or Path(weights).exists():
            continue
        for other in sorted(recipe.path.parent.glob("*.yaml")):
            if other != recipe.path and _output_dir(other) == Path(weights):
                raise ValueError(
                    f"There is no folder {weights}, which {recipe.path} starts from. Another recipe makes it: train "
                    f"by {other} first."
                )


def _output_dir(path: Path) -> Path | None:
    """Where a recipe writes to; `None` for another YAML file."""
    try:
        folder = _read_sections(path)["training"].get("output_dir")
    except ValueError:
        return None
    return Path(folder) if isinstance(folder, str) else None


def _load_relevance_teacher(recipe: Recipe, model: Any, processor: Any) -> Any:
    """The model whose attention is the target; `None` where that is the model itself."""
    args, training = recipe.model, recipe.training
    if args.relevance_teacher in (None, "lm_attention") or not training.relevance_weight:
        return None
    weights, same = args.relevance_teacher, {"select_images": model.config.qtsplus_config.select_images}
    config = load_config(None, weights, same)
    require_same_backbone(config, model.config)
    if load_processor(None, weights, config).tokenizer.get_vocab() != processor.tokenizer.get_vocab():
        raise ValueError(
            f"model.relevance_teacher is {weights}, whose tokenizer has other tokens than the model's; expected a "
            "teacher with the same tokenizer."
        )
    return load_model(None, weights, same, args.dtype, args.attn_implementation)


def _note(
    recipe: Recipe, model: Any, relevance_teacher: Any, dataset: VideoQADataset, collator: VideoQACollator
) -> AttentionTargets:
    """The teacher's attention in every example. Another teacher sees all videos with its own vision tower."""
    data, training = recipe.data, recipe.training
    grouped = recipe.model.relevance_teacher == "lm_attention"
    choice, mixed, folder = AttentionChoice.of(training, grouped), _mixed(training), str(data.features)
    full = [record.at_full_size() for record in dataset.records if record.teacher_video is not None]
    if relevance_teacher is not None:
        features = _encode(recipe, relevance_teacher, dataset.processor, dataset.records + full)
        for record in dataset.records:
            stored = None if record.video is None else features.load(record.video, record.fps)
            if stored is not None:
                require_same_tokens(relevance_teacher, model, stored["video_grid_thw"])
        model, settings = relevance_teacher, (data.model_max_length, data.processor_kwargs)
        dataset = VideoQADataset(dataset.records, dataset.processor, *settings, features)
    elif full:
        _encode(recipe, model, dataset.processor, full)
    return note_targets(model.to(training.device), dataset, collator, folder, choice, mixed)


def _encode(recipe: Recipe, model: Any, processor: Any, records: list[VideoRecord]) -> VideoFeatures:
    data, training = recipe.data, recipe.training
    if not training.freeze_vision_model:
        raise ValueError("data.features are those of a vision tower that stays as it is: set freeze_vision_model.")
    if recipe.model.teacher is not None:
        raise ValueError("A teacher looks at the videos itself: leave out data.features, or model.teacher.")
    for module in vision_modules(model).values():
        module.to(training.device)
    return encode_videos(
        model,
        processor,
        [(record.video, record.fps) for record in records if record.video is not None],
        str(data.features),
        data.processor_kwargs,
        autocast_dtype=_mixed(training),
        workers=training.dataloader_num_workers,
    )


def _mixed(training: QTSplusTrainingArguments) -> torch.dtype | None:
    """What mixed-precision training computes in."""
    return torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None


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
    _require_weights(recipe)
    args = recipe.model
    config = load_config(args.variant, args.weights, args.selector, args.language_model)
    training = recipe.training
    with torch.device("meta"):
        model: nn.Module = backbone_of(config.model_type).model(config)
        teacher = recipe.model.relevance_teacher
        check_relevance(model, training, model if teacher is None else None, teacher == "lm_attention")
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
