"""Runs a recipe: loads what it names, trains stage by stage, and continues where an earlier run stopped."""

import gc
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from zipfile import is_zipfile

from accelerate import PartialState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..common.files import check_folder, naming_full_disk, require_space, working_in
from ..common.folders import read_json
from ..common.journals import Journal
from ..data.records import VideoRecord
from ..hub.loading import adopt_tokenizer
from .features import encode_files
from .freezing import vision_modules
from .models import make_model, make_processor
from .plan import make_plan
from .recipe import Recipe
from .trainer import QTSplusTrainer

logger = logging.get_logger(__name__)

BEGUN_FILE = ".qtsplus-begun.jsonl"


def run_stages(stages: Sequence[Recipe], resume: bool = False) -> Path:
    """
    Runs the stages in order, each as [`run`] does, and returns the folder of the last. With `resume`, finished stages
    are skipped, and a stage without a checkpoint starts from its first step. The last stage goes on if its recipe now
    asks for more steps or epochs than it has done.
    """
    unfinished = check_folders(stages, resume)
    for stage in unfinished:
        # To copy the arguments sets up the process again, which is needed since a Trainer leaves its sharding behind.
        run(replace(stage, training=replace(stage.training)), resume)
        gc.collect()  # a Trainer refers to itself, so that only the collector frees its model
    PartialState().destroy_process_group()
    return stages[-1].output_dir


def check_folders(stages: Sequence[Recipe], resume: bool = False) -> list[Recipe]:
    """
    The stages that are to be run, see [`run_stages`]; raises as [`find_start`] for a folder of one of them, and
    `ValueError` to go on from other weights than those from which the first one began.
    """
    first = stages[0]
    if resume and any(first.output_dir.rglob(TRAINER_STATE_NAME)):
        _begin(first)
    unfinished = []
    last = stages[-1]
    for stage in stages:
        is_finished = (stage.output_dir / TRAINER_STATE_NAME).exists()
        if resume and is_finished and (stage is not last or is_trained(stage, stage.output_dir)):
            logger.warning(f"{stage.name} is finished: {stage.output_dir}.")
        else:
            find_start(stage, resume)
            unfinished.append(stage)
    return unfinished


def _begin(recipe: Recipe) -> None:
    """Notes from which weights a training begins; a `ValueError` where it has begun from others."""
    Journal(recipe.output_dir / BEGUN_FILE, {"model.weights": recipe.model.weights})


def find_start(recipe: Recipe, resume: bool) -> Path | None:
    """
    The checkpoint from which a run goes on; `None` if it begins. Raises `ValueError` for folders that cannot be
    written, or an `output_dir` that holds files or checkpoints from which it does not continue.
    """
    features = check_folder(recipe.data.features or recipe.output_dir)
    if recipe.data.features and any(features.glob("*config.json")):
        raise ValueError(f"data.features is {features}, which holds a model; choose another folder.")
    output_dir = check_folder(recipe.output_dir)
    checkpoint = last_checkpoint(output_dir) if resume else None
    if checkpoint is not None:
        for path in checkpoint.glob("*.pt*"):  # what `torch.save` writes is a ZIP archive
            if not is_zipfile(path):
                raise ValueError(f"{path} is empty or was cut off: remove {checkpoint}, to go on from an earlier one.")
        return checkpoint
    for path in output_dir.glob("[!.]*"):  # other folders may stay
        # An interruption may leave a checkpoint without its last file. It is written over.
        is_unfinished = resume and not (path / TRAINER_STATE_NAME).exists()
        if path.is_file() or (path.name.startswith(PREFIX_CHECKPOINT_DIR) and not is_unfinished):
            raise ValueError(
                f"{output_dir} holds {path.name}, which is not replaced: choose another output_dir, or, if it has a "
                "checkpoint or a finished model, go on with --resume, which trains only what is missing."
            )
    return None


def run(recipe: Recipe, resume: bool = False) -> Path:
    """
    Trains, and saves the model to the recipe's `output_dir`. With `resume`, training continues from the last complete
    checkpoint there, if there is one. Raises `ValueError` for an `output_dir` that cannot be written, or that
    holds files or checkpoints from which it does not continue.
    """
    unset_hf_deepspeed_config()  # with it, Transformers would shard the model before it is complete
    output_dir = check_folder(recipe.output_dir)
    # Of the processes of a distributed run the first holds the folder.
    with working_in(output_dir) if recipe.training.process_index == 0 else nullcontext(), naming_full_disk(output_dir):
        checkpoint = find_start(recipe, resume)
        if resume:
            logger.warning(f"{recipe.name} goes on from {checkpoint or 'its first step'}.")
        require_space(output_dir, make_plan(recipe).disk, "the model and its checkpoints")
        trainer = build_trainer(recipe)
        if checkpoint is not None and is_trained(recipe, checkpoint):
            # Only the model is missing, but a Trainer that starts from its last step does one more. Without an epoch it
            # loads the checkpoint and stops.
            trainer.args.max_steps = 0
            trainer.args.num_train_epochs = 0
        if checkpoint is None and trainer.is_world_process_zero():
            (output_dir / BEGUN_FILE).unlink(missing_ok=True)
            _begin(recipe)
        trainer.train(resume_from_checkpoint=checkpoint)  # type: ignore[arg-type]  # it joins paths
        trainer.save_model()
        trainer.save_state()  # the last file that is written: it marks a finished run
    return output_dir


def is_trained(recipe: Recipe, folder: Path) -> bool:
    """Whether the Trainer's state in a folder has all the steps, or else the epochs, that a recipe asks for."""
    state = read_json(folder / TRAINER_STATE_NAME)
    if recipe.training.max_steps > 0:
        return state["global_step"] >= recipe.training.max_steps
    return state["epoch"] >= recipe.training.num_train_epochs


def last_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint. The Trainer's state is written last, so it must be there and be whole."""
    complete = {}
    for state in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}"):
        with suppress(ValueError, KeyError):
            complete[read_json(state)["global_step"]] = state.parent
    return complete[max(complete)] if complete else None


def build_trainer(recipe: Recipe) -> QTSplusTrainer:
    """The Trainer of a recipe. Raises `ValueError` for weights or records that are missing or cannot be read."""
    args = recipe.model
    data = recipe.data
    trainer_class = recipe.trainer_class
    train, evaluation = read_sets(recipe)
    if args.weights is None:
        logger.warning(f"The recipe names no model.weights: {recipe.name} starts from random weights.")
    seed = recipe.training.seed
    model = make_model(args.variant, args.weights, args.selector, args.dtype, seed)
    processor = make_processor(args.variant, args.weights, model.config)
    adopt_tokenizer(model.config, processor)  # a stock model's configuration lacks the ids by which questions are found
    features = None
    if data.features is not None:
        for module in vision_modules(model).values():
            module.to(recipe.training.device)
        videos = [(record.video, record.fps) for record in train + evaluation if record.video is not None]
        features = encode_files(
            model,
            processor,
            videos,
            data.features,
            data.processor_kwargs,
            recipe.training.dataloader_num_workers,
        )
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


def read_sets(recipe: Recipe) -> list[list[VideoRecord]]:
    """The records to train on, and those for evaluation. Raises `ValueError` for files or settings that do not do."""
    _check_frozen(recipe)
    sets = []
    for name in ("train_files", "eval_files"):
        files = getattr(recipe.data, name)
        records: list[VideoRecord] = []
        for path in files:
            records += recipe.trainer_class.dataset_class.read(path, recipe.data.media_root)
        if files and not records:
            raise ValueError(f"{recipe.path}: the files of data.{name} hold no records.")
        sets.append(records)
    return sets


def _check_frozen(recipe: Recipe) -> None:
    """Raises `ValueError` for stored features of a vision tower that trains, or a dtype without mixed precision."""
    training = recipe.training
    dtype = recipe.model.dtype
    if recipe.data.features is not None and not training.freeze_vision_model:
        raise ValueError("data.features needs a vision tower that does not change: set training.freeze_vision_model.")
    frozen = training.freeze_language_model or training.freeze_vision_model
    if dtype != "float32" and frozen and not (training.bf16 or training.fp16):
        raise ValueError(f"model.dtype={dtype} needs training.bf16 or fp16: the weights that train are float32.")
