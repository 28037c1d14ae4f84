"""Asks a model questions about videos, and counts the answers that match."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from ..data.records import VideoRecord
from ..methods_qtsplus import Method
from ..output import first_line
from ..training.dataset import SkippedRecord, require_rates
from .intervals import share_interval

# By video, `video_features` `[k, d]`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`.
Features = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Outcome:
    """
    One question. Its answer is `correct` if it is the record's to the letter. The video has `visual_tokens`, of which
    the language model read those at `kept_indices`; `rho` is the fraction that the selection aimed at.
    """

    record: VideoRecord
    correct: bool
    visual_tokens: int = 0
    rho: float = 0.0
    kept_indices: tuple[int, ...] = ()
    unreadable: SkippedRecord | None = None

    @property
    def kept_tokens(self) -> int:
        return len(self.kept_indices)


def exact_match(
    model: Any,
    processor: Any,
    records: Sequence[VideoRecord],
    *,
    retention: float | Sequence[float] | None = None,
    selection: str | Method | None = None,
    max_visual_tokens: int | None = None,
    reencode: bool = True,
    batch_size: int = 16,
    progress: bool = True,
    features: Features | None = None,
) -> list[Outcome]:
    """
    Greedy answers to records with a video, compared with the records' own, letter for letter.

    Args:
        retention: one for all records or one for each.
        selection, max_visual_tokens, reencode: as for `generate`.
        batch_size: questions at a time, which are asked in the order of the lengths of their answers.
        features: of videos that were encoded before, in place of their pixels.

    Returns:
        one outcome per record, in order.

    Raises:
        ValueError: a folder of frames whose record does not give its rate.
    """
    if features is None:
        require_rates(records)
    lengths = [len(processor.text_ids(record.answer)) for record in records]
    order = sorted(range(len(records)), key=lengths.__getitem__)
    outcomes: dict[int, Outcome] = {}
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    for batch in track(batches, "Asking", console=Console(stderr=True), disable=not progress):
        inputs, unreadable = _read(processor, [records[index] for index in batch], features)
        for index, problem in zip(batch, unreadable, strict=True):
            if problem is not None:
                outcomes[index] = Outcome(records[index], False, unreadable=problem)
        readable = [index for index in batch if index not in outcomes]
        if not readable:
            continue
        retentions = [retention[index] for index in readable] if isinstance(retention, Sequence) else retention
        call = {"retention": retentions, "max_visual_tokens": max_visual_tokens, "reencode": reencode}
        answers, chosen = answer(model, processor, inputs, lengths[batch[-1]] + 2, selection=selection, **call)
        visual_tokens = [math.prod(grid) for grid in model.model.merged_grid(inputs["video_grid_thw"])]
        for row, index in enumerate(readable):
            correct, kept = answers[row] == records[index].answer, tuple(chosen.kept_indices[row].tolist())
            outcomes[index] = Outcome(records[index], correct, visual_tokens[row], float(chosen.rho[row]), kept)
    return [outcomes[index] for index in range(len(records))]


@torch.no_grad()
def answer(
    model: Any, processor: Any, inputs: Mapping[str, Any], max_new_tokens: int, **call: Any
) -> tuple[list[str], Any]:
    """
    Greedy answers to prompts, and the `QTSplusOutput` that says what they rest on.

    Args:
        inputs: of the model, as [`model_inputs`] makes them; on any device.
        call: how this call selects, such as `retention`.
    """
    on_device = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()}
    output = model.generate(
        **on_device, **call, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True
    )
    answers = output.sequences[:, inputs["input_ids"].shape[1] :]
    texts = processor.batch_decode(answers, skip_special_tokens=True)
    return [text.strip() for text in texts], output.qtsplus


def _read(
    processor: Any, records: Sequence[VideoRecord], features: Features | None
) -> tuple[dict[str, Any], list[SkippedRecord | None]]:
    """The inputs of the records whose video can be read, and per record why its video cannot."""
    try:
        return model_inputs(processor, records, features), [None] * len(records)
    except (ValueError, OSError):
        if features is not None:
            raise
        unreadable = [_unreadable(processor, record) for record in records]
        if not any(unreadable):
            raise  # not the videos' fault
    readable = [record for record, problem in zip(records, unreadable, strict=True) if problem is None]
    return (model_inputs(processor, readable) if readable else {}), unreadable


def _unreadable(processor: Any, record: VideoRecord) -> SkippedRecord | None:
    try:
        processor(text=[processor.video_token], return_tensors="pt", **_videos([record]))
    except (ValueError, OSError) as error:
        return SkippedRecord(str(record.video), first_line(error))
    return None


def _videos(records: Sequence[VideoRecord]) -> dict[str, Any]:
    """The videos of records as the processor takes them, each at the rate of its record."""
    rates = [record.fps for record in records]
    videos = {"videos": [record.video for record in records]}
    return videos if all(rate is None for rate in rates) else {**videos, "fps": rates}


def model_inputs(processor: Any, records: Sequence[VideoRecord], features: Features | None = None) -> dict[str, Any]:
    """Prompts that end where the answer begins, with pixels or features; see [`exact_match`]."""
    conversations = [conversation(record.question) for record in records]
    query = [record.query or record.question for record in records]
    if features is None:
        return dict(processor.conversation_inputs(conversations, query=query, **_videos(records)))
    encoded = [features[str(record.video)] for record in records]
    times = {name: torch.cat([video[name] for video in encoded]) for name in ("video_grid_thw", "second_per_grid_ts")}
    inputs = processor.conversation_inputs(conversations, query=query, **times)
    return {**inputs, **times, "video_features": [video["video_features"] for video in encoded]}


def conversation(question: str) -> list[dict[str, Any]]:
    """A question about one video."""
    return [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """
    Questions, videos, accuracy with its interval over videos (`None` for one video) and kept fraction (`None` where no
    video could be read), the same per kind, and the videos that could not be read, with the number of their questions.
    """

    def row(chosen: Sequence[Outcome]) -> dict[str, float | int | None]:
        correct = np.array([outcome.correct for outcome in chosen], dtype=float)
        videos = np.array([str(outcome.record.video) for outcome in chosen])
        interval = share_interval(correct, videos)
        visual_tokens = sum(outcome.visual_tokens for outcome in chosen)
        kept = sum(outcome.kept_tokens for outcome in chosen)
        return {
            "questions": len(chosen),
            "videos": len(set(videos)),
            "accuracy": float(correct.mean()),
            "low": interval.get("low"),
            "high": interval.get("high"),
            "kept": kept / visual_tokens if visual_tokens else None,
        }

    kinds = sorted({outcome.record.kind for outcome in outcomes})
    problems = Counter(outcome.unreadable for outcome in outcomes if outcome.unreadable is not None)
    return {
        **row(outcomes),
        "kinds": {kind: row([outcome for outcome in outcomes if outcome.record.kind == kind]) for kind in kinds},
        "unreadable": [
            {"video": problem.name, "reason": problem.reason, "questions": count} for problem, count in problems.items()
        ],
    }
