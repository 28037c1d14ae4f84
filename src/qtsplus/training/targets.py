"""Targets of attention distillation that are kept: a teacher that training never changes reads every example once."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import send_to_device
from rich.console import Console
from rich.progress import track

from ..data.records import VideoRecord
from .attention import EVERY_LAYER, AttentionChoice, answer_attention
from .collator import VideoQACollator
from .dataset import SkippedRecord, VideoQADataset
from .features import AttentionTargets, fingerprint, write_tensors
from .lora import base_model


def note_targets(
    model: Any,
    dataset: VideoQADataset,
    collator: VideoQACollator,
    folder: str | os.PathLike,
    choice: AttentionChoice = EVERY_LAYER,
    autocast_dtype: torch.dtype | None = None,
) -> AttentionTargets:
    """
    [`answer_attention`] of every example that `folder` does not hold yet, for a teacher that training never changes;
    every process of a distributed run takes its share. The dataset then gives the targets with its examples. That of a
    record with a `teacher_video` is the attention to that one, see [`sum_onto`].

    Args:
        model: the teacher, used where it is.
        dataset: with the teacher's features, whose identity is the videos'.
        folder: one that may be shared by runs; targets of another model or of another choice are never mistaken.
        autocast_dtype: as mixed-precision training would.

    Raises:
        ValueError: a `teacher_video` that cannot be read, or whose tokens do not fit those of the record's video.
    """
    assert dataset.features is not None
    selector = model.config.qtsplus_config
    settings = [
        dataset.features.folder.name,
        {name: value for name, value in asdict(choice).items() if name != "grouped"},
        selector.select_images,
        selector.position_ids,
        str(autocast_dtype),
    ]
    if choice.grouped:
        settings += [getattr(selector, f"attention_{name}") for name in ("layer", "heads", "group")]
    name = fingerprint({"language_model": model.model.language_model}, settings)
    targets = AttentionTargets(Path(folder) / f"attention-{name}", dataset.features)
    targets.folder.mkdir(parents=True, exist_ok=True)
    dataset.targets = targets
    teacher = _Teacher(model, dataset, collator, choice, targets)
    state = PartialState()
    mine = range(state.process_index, len(dataset), state.num_processes)
    bar = track(
        mine, "Reading with all tokens", disable=not state.is_main_process, console=Console(stderr=True), transient=True
    )
    with torch.autocast(teacher.device.type, autocast_dtype, enabled=autocast_dtype is not None):
        for index in bar:
            record, example = dataset.records[index], dataset[index]
            if record.video is not None and not isinstance(example, SkippedRecord):
                teacher.target(record, example)
    state.wait_for_everyone()
    return targets


def sum_onto(attention: torch.Tensor, grid: Sequence[int], smaller: Sequence[int]) -> torch.Tensor:
    """
    Attention to the tokens of a video as attention to those of the same video read smaller: each of these gets the sum
    over the whole tokens that it covers.

    Args:
        attention: `[T * h * w]`, step by step and row by row.
        grid: (T, h, w) of its tokens.
        smaller: (T, h', w') of the smaller video's.

    Returns:
        `[T * h' * w']`.

    Raises:
        ValueError: grids of which one does not have whole tokens for each of the other, or of another number of steps.
    """
    (time, height, width), (steps, rows, columns) = grid, smaller
    if time != steps or height % rows or width % columns:
        raise ValueError(
            f"it is {tuple(grid)} tokens (steps, rows, columns) for {tuple(smaller)} of the smaller one; expected as "
            "many steps, and a whole number of tokens for each."
        )
    return attention.reshape(time, rows, height // rows, columns, width // columns).sum((2, 4)).flatten()


def require_kept_targets(dataset: Any) -> None:
    """
    For attention distillation whose teacher is asked in every step.

    Raises:
        ValueError: a record with a `teacher_video`, which is read before training alone.
    """
    records = dataset.records if isinstance(dataset, VideoQADataset) else ()
    named = next((record for record in records if record.teacher_video is not None), None)
    if named is not None:
        raise ValueError(
            f"The record of {named.video} has the teacher_video {named.teacher_video}, which a teacher reads once, "
            "before training: give data.features and a teacher that does not train (a relevance_teacher, or "
            "freeze_language_model without LoRA), or a relevance_weight of 0."
        )


def require_same_backbone(teacher: Any, student: Any) -> None:
    """Raises `ValueError` for configurations of a teacher of attention and a student that read other prompts."""
    for name in ("model_type", "image_token_id", "video_token_id"):
        other, own = getattr(teacher, name), getattr(student, name)
        if other != own:
            raise ValueError(
                f"relevance_teacher has {name}={other!r} and the model {own!r}: expected a teacher of the same "
                "backbone and tokenizer."
            )
    for name in ("patch_size", "temporal_patch_size"):
        other, own = (getattr(config.vision_config, name, None) for config in (teacher, student))
        if other != own:
            raise ValueError(
                f"relevance_teacher cuts videos with {name}={other} and the model with {own}: expected a teacher with "
                "the same visual tokens."
            )


def require_same_tokens(teacher: Any, student: Any, video_grid_thw: torch.Tensor | None) -> None:
    """
    Raises `ValueError` for a teacher of attention to which videos are other tokens than to the student.

    Args:
        video_grid_thw: `[videos, 3]`, as the student's processor gives it.
    """
    theirs, ours = base_model(teacher), base_model(student)
    require_same_backbone(theirs.config, ours.config)
    if video_grid_thw is None:
        return
    grids = zip(theirs.model.merged_grid(video_grid_thw), ours.model.merged_grid(video_grid_thw), strict=True)
    for video, (other, own) in enumerate(grids):
        if other != own:
            raise ValueError(
                f"Video {video} is {math.prod(other)} visual tokens {tuple(other)} to relevance_teacher and "
                f"{math.prod(own)} {tuple(own)} to the model: expected a teacher with the same visual tokens."
            )


@dataclass(frozen=True)
class _Teacher:
    """A model that reads examples of a dataset, and what keeps its attention."""

    model: Any
    dataset: VideoQADataset
    collator: VideoQACollator
    choice: AttentionChoice
    targets: AttentionTargets

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def target(self, record: VideoRecord, example: dict[str, Any]) -> torch.Tensor:
        """The target `[M]` of a record's example, which is there from now on."""
        if "attention" in example:
            return example["attention"]
        attention = self._read(example) if record.teacher_video is None else self._read_at_full_size(record, example)
        path = self.targets.file(record, example["input_ids"], example["labels"])
        write_tensors(path, {"attention": attention})
        return attention

    def _read(self, example: dict[str, Any]) -> torch.Tensor:
        batch = self.collator([example])
        given = {key: send_to_device(batch[key], self.device) for key in batch if key not in ("skipped", "source_ids")}
        (attention,) = answer_attention(self.model, given, given.pop("labels"), self.choice)
        return attention.cpu()

    def _read_at_full_size(self, record: VideoRecord, example: dict[str, Any]) -> torch.Tensor:
        full = record.at_full_size()
        full_example = self.dataset.example(full)
        refused = f"{full.video}, the teacher_video of {record.video}, cannot be used"
        if isinstance(full_example, SkippedRecord):
            raise ValueError(f"{refused}: {full_example.reason}")
        attention = self.target(full, full_example)
        if not len(attention):  # nothing is taught about a question of special tokens alone
            return attention
        grids = torch.cat([full_example["video_grid_thw"], example["video_grid_thw"]])
        try:
            return sum_onto(attention, *self.model.model.merged_grid(grids))
        except ValueError as error:
            raise ValueError(f"{refused}: {error}") from None


__all__ = ["note_targets", "require_kept_targets", "require_same_backbone", "require_same_tokens", "sum_onto"]
