"""What the frozen base attends to in every record, read once before training and kept on disk beside its features."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import send_to_device

from qtsplus.common.tensors import TensorFormat, TensorKind, digest_of
from qtsplus.data.records import VideoRecord
from qtsplus.training.arguments import QTSplusTrainingArguments
from qtsplus.training.attention import AttentionChoice, answer_attention
from qtsplus.training.dataset import VideoQACollator, VideoQADataset
from qtsplus.training.features import REMEDY, VideoFeatures, read_tensors

_TARGETS = TensorFormat("stored attention", REMEDY, {"attention": TensorKind(("M",))})


@dataclass(frozen=True)
class AttentionTargets:
    """The `attention` `[M]` for each question and answer about a video, in a file of its own."""

    folder: Path
    features: VideoFeatures  # of the videos

    def file(self, record: VideoRecord, input_ids: torch.Tensor, labels: torch.Tensor) -> Path:
        """Where the target of a record's prompt `[S]` with its answer is kept."""
        digest = hashlib.sha256(self.features.file(str(record.video), record.fps).name.encode())
        for ids in (input_ids, labels):
            digest.update(ids.numpy().tobytes())
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"

    def load(self, record: VideoRecord, example: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The target of a record's example, if there is one."""
        return read_tensors(self.file(record, example["input_ids"], example["labels"]), _TARGETS) or {}


def note_targets(model: Any, dataset: VideoQADataset, args: QTSplusTrainingArguments) -> AttentionTargets:
    """
    The attention that teaches the records of a dataset, beside its features. What is there is not read again, and every
    process of a distributed run takes its share.
    """
    assert dataset.features is not None
    folder = dataset.features.folder.parent
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    choice, selector = AttentionChoice.of(args), model.config.qtsplus_config
    settings = [
        "shares",
        dataset.features.folder.name,
        asdict(choice),
        selector.position_ids,
        str(dtype),
    ]
    name = digest_of(model.model.language_model.state_dict(), settings)[:16]
    targets = AttentionTargets(folder / f"attention-{name}", dataset.features)
    targets.folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device
    state, collate = PartialState(), VideoQACollator(dataset.processor)
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        for index in range(state.process_index, len(dataset), state.num_processes):
            record = dataset.records[index]
            example = VideoQADataset.example(dataset, record)
            if record.video is None or "skipped" in example or targets.load(record, example):
                continue
            batch = collate([example])
            del batch["skipped"], batch["source_ids"]
            inputs = send_to_device(batch, device)
            (attention,) = answer_attention(model, inputs, inputs.pop("labels"), choice)
            path = targets.file(record, example["input_ids"], example["labels"])
            _TARGETS.write(path, {"attention": attention.cpu()}, {})
    state.wait_for_everyone()
    return targets
