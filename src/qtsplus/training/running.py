"""Runs a recipe: loads what it names, trains stage by stage, and goes on where an earlier run stopped."""

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from accelerate import PartialState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..common.files import check_folder, require_space
from ..data.records import VideoRecord
from ..hub.loading import adopt_tokenizer
from .dataset import check_processor_kwargs
from .features import VideoFeatures, encode_files
from .freezing import vision_modules
from .models import make_config, make_model, make_processor
from .plan import make_plan
from .recipe import Recipe
from .trainer import QTSplusTrainer

logger = logging.get_logger(__name__)


def run_stages(stages: Sequence[Recipe], resume: bool = False) -> Path:
    """
    Runs stages as [`run`] does, and gives the folder of the last; with `resume` finished ones are left out, and one
    without a checkpoint starts from its first step.
    """
    if not resume:
        for stage in stages:
            require_free(stage.output_dir)
    last = stages[-1]
    for stage in stages:
        if resume and is_finished(stage.output_dir) and stage is not last:
            logger.warning(f"{stage.name} is finished: {stage.output_dir}.")
            continue
        # A copy of the arguments prepares the process again: a Trainer leaves its sharding behind.
        run(replace(stage, training=replace(stage.training)), resume)
        gc.collect()  # a Trainer refers to itself, and holds its model until the collector finds it
    PartialState().destroy_process_group()
    return last.output_dir


def run(recipe: Recipe, resume: bool = False) -> Path:
    """
    Trains, and saves the model to the recipe's `output_dir`; with `resume` from the last complete checkpoint there, if
    there is one. A `ValueError` for an `output_dir` that cannot be written, or that holds other files.
    """
    unset_hf_deepspeed_config()  # Transformers would share out the model before it is whole
    output_dir = check_folder(recipe.output_dir)
    checkpoint = last_checkpoint(output_dir) if resume else None
    if checkpoint is None:
        require_free(output_dir)
    require_space(output_dir, make_plan(recipe).disk, "the model and its checkpoints")
    trainer = build_trainer(recipe)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model()
    trainer.save_state()  # the last file, which tells a finished run
    return output_dir


def require_free(output_dir: Path) -> None:
    """Raises `ValueError` for a folder that holds more than folders of other stages, for nothing is replaced."""
    for path in sorted(output_dir.glob("*")):
        if path.is_file() or path.name.startswith(PREFIX_CHECKPOINT_DIR):
            what = "a finished model" if is_finished(output_dir) else path.name
            raise ValueError(
                f"{output_dir} holds {what}, which is not replaced: choose another output_dir, or, where it holds a "
                "checkpoint, go on with --resume."
            )


def is_finished(output_dir: Path) -> bool:
    """Whether a run into this folder came to its end."""
    return (output_dir / "trainer_state.json").exists()


def last_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint whose last file, the Trainer's state, was written to its end."""
    newest = None
    last_step = -1
    for state in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json"):
        _, _, step = state.parent.name.rpartition("-")
        if int(step) > last_step and _is_json(state):
            newest = state.parent
            last_step = int(step)
    return newest


def _is_json(path: Path) -> bool:
    """Whether a file was written to its end."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def build_trainer(recipe: Recipe) -> QTSplusTrainer:
    """The Trainer of a recipe; a `ValueError` for weights or records that are not there or cannot be read."""
    args = recipe.model
    data = recipe.data
    trainer_class = recipe.trainer_class
    train = _read_records(recipe, data.train_files)
    evaluation = _read_records(recipe, data.eval_files)
    if not train:
        raise ValueError(f"{recipe.path}: data.train_files hold no record.")
    _check_frozen(recipe)
    if args.weights is None:
        logger.warning(f"No model.weights: {recipe.name} starts from random ones.")
    config = make_config(args.variant, args.weights, args.selector)
    processor = make_processor(args.variant, args.weights, config)
    check_processor_kwargs(processor, data.processor_kwargs)
    seed = recipe.training.seed
    model = make_model(args.variant, args.weights, args.selector, args.dtype, args.attn_implementation, seed)
    adopt_tokenizer(model.config, processor)  # a stock model's configuration does not know them
    features = None
    if data.features is not None:
        features = _encode_videos(recipe, data.features, model, processor, train + evaluation)
    make_dataset = partial(
        trainer_class.dataset_class,
        processor=processor,
        model_max_length=data.model_max_length,
        processor_kwargs=data.processor_kwargs,
        features=features,
    )
    trainer = trainer_class(
        model,
        recipe.training,
        train_dataset=make_dataset(train),
        eval_dataset=make_dataset(evaluation) if evaluation else None,
        data_collator=trainer_class.collator_class(processor),
        processing_class=processor,
    )
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return trainer


def _read_records(recipe: Recipe, files: list[str]) -> list[VideoRecord]:
    records: list[VideoRecord] = []
    for path in files:
        records += recipe.trainer_class.dataset_class.read(path, recipe.data.media_root)
    return records


def _check_frozen(recipe: Recipe) -> None:
    """Raises `ValueError` for features of a tower that trains, and for a dtype in which nothing would be computed."""
    training = recipe.training
    dtype = recipe.model.dtype
    if recipe.data.features is not None and not training.freeze_vision_model:
        raise ValueError("data.features are those of a vision tower that stays as it is: set freeze_vision_model.")
    frozen = training.freeze_language_model or training.freeze_vision_model
    if dtype != "float32" and frozen and not (training.bf16 or training.fp16):
        raise ValueError(f"model.dtype={dtype} is of what is frozen; expected training.bf16 or training.fp16 too.")


def _encode_videos(
    recipe: Recipe,
    folder: str,
    model,
    processor,
    records: list[VideoRecord],
) -> VideoFeatures:
    """The features of all videos of the records, kept in a folder."""
    training = recipe.training
    for module in vision_modules(model).values():
        module.to(training.device)
    videos = [(record.video, record.fps) for record in records if record.video is not None]
    workers = training.dataloader_num_workers
    return encode_files(model, processor, videos, folder, recipe.data.processor_kwargs, workers)
