"""Runs a recipe: loads what it names, trains stage by stage, and goes on where an earlier run stopped."""

import gc
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..common.files import check_folder, require_space
from ..data.records import VideoRecord
from ..hub.card import card_data
from .dataset import VideoQADataset, check_processor_kwargs, check_skipped, require_rates
from .features import encode_files
from .freezing import vision_modules
from .models import make_config, make_model, make_processor
from .plan import make_plan
from .recipe import Recipe
from .sharding import check_checkpoint
from .trainer import SKIPPED_FILE, QTSplusTrainer

logger = logging.get_logger(__name__)
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def run_stages(stages: Sequence[Recipe], resume: bool = False) -> Path:
    """Runs stages as [`run`] does, and gives the folder of the last; with `resume` finished ones are left out."""
    if not resume:
        for stage in stages:
            require_free(stage.output_dir)
    for index, stage in enumerate(stages):
        if resume and index < len(stages) - 1 and is_finished(stage.output_dir):
            logger.warning(f"{stage.name} is finished: {stage.output_dir}.")
            continue
        begun = index == 0 or last_checkpoint(stage.output_dir) is not None or is_finished(stage.output_dir)
        if resume and not begun:
            logger.warning(f"{stage.name} has no checkpoint yet and starts from its first step.")
        # Arguments of its own prepare the process anew: a Trainer leaves its sharding behind.
        run(replace(stage, training=replace(stage.training)), resume and begun)
        gc.collect()  # a Trainer refers to itself, and holds its model until it is looked for
    PartialState().destroy_process_group()
    return stages[-1].output_dir


def run(recipe: Recipe, resume: bool = False) -> Path:
    """
    Trains, and saves the model to the recipe's `output_dir`; or goes on from the last complete checkpoint there.

    Raises:
        ValueError: `output_dir` cannot be written, or holds files and `resume` is false; or there is nothing to resume.
    """
    unset_hf_deepspeed_config()  # Transformers would share out the model before it is whole
    output_dir = check_folder(recipe.output_dir)
    checkpoint = last_checkpoint(output_dir)
    if not resume:
        require_free(output_dir)
    elif checkpoint is None:
        kept = "; its save_strategy is 'no'" if recipe.training.save_strategy == "no" else ""
        raise ValueError(
            f"There is nothing to resume: {output_dir} holds no complete checkpoint{kept}. Leave out --resume to start "
            "from the first step."
        )
    require_space(output_dir, make_plan(recipe).disk, "the model and its checkpoints")
    trainer = build_trainer(recipe)
    if checkpoint is not None:
        check_checkpoint(checkpoint, trainer.accelerator.state)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model()
    trainer.create_model_card()
    trainer.save_state()  # the last file, which tells a finished run
    return output_dir


def require_free(output_dir: Path) -> None:
    """Raises `ValueError` for a folder that holds more than folders of other stages, for nothing is replaced."""
    if not output_dir.is_dir():
        return
    checkpoint = last_checkpoint(output_dir)
    if checkpoint is not None and not is_finished(output_dir):
        raise ValueError(f"{output_dir} holds {checkpoint.name}: resume the run, or choose another output_dir.")
    names = sorted(path.name for path in output_dir.iterdir() if path.is_file() or _CHECKPOINT.fullmatch(path.name))
    if names not in ([], [SKIPPED_FILE]):  # which a run leaves that ended for them
        what = "a finished model" if is_finished(output_dir) else names[0]
        raise ValueError(f"{output_dir} holds {what}, which is not replaced: choose another output_dir.")


def is_finished(output_dir: Path) -> bool:
    """Whether a run into this folder came to its end."""
    return (output_dir / "trainer_state.json").exists()


def last_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint that was written to its end: the Trainer's state is the last file."""
    steps = {int(name[1]): path for path in output_dir.glob("*") if (name := _CHECKPOINT.fullmatch(path.name))}
    for _, path in sorted(steps.items(), reverse=True):
        with suppress(FileNotFoundError, ValueError):
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            return path
    return None


def build_trainer(recipe: Recipe) -> QTSplusTrainer:
    """The Trainer of a recipe; a `ValueError` for weights or records that are not there or cannot be read."""
    args, training, data, trainer_class = recipe.model, recipe.training, recipe.data, recipe.trainer_class
    train, evaluation = (  # what is quickly read is read first
        [record for path in files for record in trainer_class.dataset_class.read(path, data.media_root)]
        for files in (data.train_files, data.eval_files)
    )
    if not train:
        raise ValueError(f"{recipe.path}: data.train_files hold no record.")
    if data.features is not None and not training.freeze_vision_model:
        raise ValueError("data.features are those of a vision tower that stays as it is: set freeze_vision_model.")
    frozen = training.freeze_language_model or training.freeze_vision_model
    if args.dtype != "float32" and frozen and not (training.bf16 or training.fp16):
        raise ValueError(f"model.dtype={args.dtype} is of what is frozen; expected training.bf16 or training.fp16 too.")
    if args.weights is None:
        logger.warning(f"No model.weights: {recipe.name} starts from random ones.")
    config = make_config(args.variant, args.weights, args.selector)
    processor = make_processor(args.variant, args.weights, config)
    check_processor_kwargs(processor, data.processor_kwargs)
    if data.processor_kwargs.get("fps") is None:
        require_rates(train)
    places = [record.video for record in train if record.video is not None and "://" not in record.video]
    missing = [f"there is no video at {place!r}" for place in places if not os.path.exists(place)]
    check_skipped(len(missing), len(train), training.max_skipped, missing)
    model = make_model(args.variant, args.weights, args.selector, args.dtype, args.attn_implementation, training.seed)
    features = None
    if data.features is not None:
        for module in vision_modules(model).values():
            module.to(training.device)
        videos = [(record.video, record.fps) for record in train + evaluation if record.video is not None]
        mixed = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
        settings = data.features, data.processor_kwargs, mixed, training.dataloader_num_workers
        features = encode_files(model, processor, videos, *settings)

    def dataset(records: list[VideoRecord]) -> VideoQADataset:
        settings = data.model_max_length, data.processor_kwargs, features
        return trainer_class.dataset_class(records, processor, *settings)

    trainer = trainer_class(
        model,
        training,
        train_dataset=dataset(train),
        eval_dataset=dataset(evaluation) if evaluation else None,
        data_collator=trainer_class.collator_class(processor),
        processing_class=processor,
    )
    base = args.variant if args.weights is not None else None
    names = ", ".join(f"`{Path(path).name}`" for path in data.train_files)
    trainer.about = {
        **card_data(base, "license", "license_name", "license_link", "base_model"),
        "training_data": f"{len(train)} records of {names}.",
    }
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return trainer
