"""Targets of attention distillation that are kept: a teacher that training never changes reads every example once."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import send_to_device
from rich.console import Console
from rich.progress import track

from .attention import AttentionChoice, answer_attention
from .collator import VideoQACollator
from .dataset import SkippedRecord, VideoQADataset
from .features import AttentionTargets, digest_of, write_tensors


def note_targets(
    model: Any,
    dataset: VideoQADataset,
    collator: VideoQACollator,
    folder: str | os.PathLike,
    choice: AttentionChoice,
    autocast_dtype: torch.dtype | None,
) -> AttentionTargets:
    """
    The teacher's [`answer_attention`] of every example that `folder` does not hold yet; every process of a distributed
    run takes its share. The dataset, which has the teacher's features, then gives the targets with its examples.
    """
    assert dataset.features is not None
    selector = model.config.qtsplus_config
    settings = [
        "shares",  # of all attention, and not of that to the visual tokens
        dataset.features.folder.name,
        {name: value for name, value in asdict(choice).items() if name != "grouped"},
        selector.select_images,
        selector.position_ids,
        str(autocast_dtype),
    ]
    if choice.grouped:
        settings += [getattr(selector, f"attention_{name}") for name in ("layer", "heads", "group")]
    name = digest_of({"language_model": model.model.language_model}, settings)
    targets = AttentionTargets(Path(folder) / f"attention-{name}", dataset.features)
    targets.folder.mkdir(parents=True, exist_ok=True)
    dataset.targets = targets
    device = next(model.parameters()).device
    state = PartialState()
    mine = range(state.process_index, len(dataset), state.num_processes)
    console = Console(stderr=True)
    quiet = not (state.is_main_process and console.is_terminal)
    bar = track(mine, "Reading with all tokens", disable=quiet, console=console, transient=True)
    with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
        for index in bar:
            record, example = dataset.records[index], dataset[index]
            if record.video is None or isinstance(example, SkippedRecord) or "attention" in example:
                continue
            batch = collator([example])
            inputs = {key: send_to_device(batch[key], device) for key in batch if key not in ("skipped", "source_ids")}
            (attention,) = answer_attention(model, inputs, inputs.pop("labels"), choice)
            path = targets.file(record, example["input_ids"], example["labels"])
            write_tensors(path, {"attention": attention.cpu()})
    state.wait_for_everyone()
    return targets


def require_same_tokens(teacher: Any, student: Any) -> None:
    """Raises `ValueError` for configurations of a teacher of attention and a student that read other prompts."""
    of_videos = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    for name in ("model_type", "image_token_id", "video_token_id", *of_videos):
        configs = [config.vision_config if name in of_videos else config for config in (teacher, student)]
        other, own = (getattr(config, name, None) for config in configs)
        if other != own:
            raise ValueError(
                f"relevance_teacher has {name}={other!r} and the model {own!r}: expected a teacher of the same "
                "backbone, tokenizer and visual tokens."
            )
