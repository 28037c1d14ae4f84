"""Asks a model the questions of a JSONL file of records and counts the answers that match."""

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
from ..methods_qtsplus import Candidates, Method
from ..training.dataset import SkippedRecord, require_rates
from ..training.features import prompt_inputs


@dataclass(frozen=True)
class Outcome:
    """
    One question.

    Args:
        kind: the record's.
        correct: whether the answer was the record's, to the letter.
        kept_tokens, visual_tokens: how many of the visual tokens the language model read.
        rho: the fraction that the selection aimed at.
        kept_indices: which ones it read.
        unreadable: its video and why it could not be read; such a question counts as wrong.
    """

    kind: str
    correct: bool
    kept_tokens: int
    visual_tokens: int
    rho: float
    kept_indices: tuple[int, ...]
    unreadable: SkippedRecord | None = None


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
    features: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    orders: Sequence[np.ndarray] | None = None,
) -> list[Outcome]:
    """
    Greedy answers to records with a video, compared with the records' own, letter for letter.

    Args:
        model, processor: as `qtsplus.session.load` gives them.
        retention: fraction of the visual tokens to keep, one for all records or one for each; the model's decision when
            absent.
        selection: how they are chosen, a name as in `QTSplusConfig` or a function; the model's own way when absent.
        max_visual_tokens: most visual tokens to keep.
        reencode: `False` hands the kept tokens on as they are.
        batch_size: questions at a time; those with answers of like length are asked together.
        features: by video `video_features` `[k, d]`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`, which
            take the place of its pixels: a video that is asked about often is encoded once.
        orders: per record `[M]`, its visual tokens in the order in which they are to be kept, in place of a selection.

    Returns:
        one outcome per record, in order.

    Raises:
        ValueError: a folder of frames whose record does not give its rate.
    """
    if features is None:
        require_rates(records)
    lengths = [len(processor.tokenizer(record.answer)["input_ids"]) for record in records]
    order = sorted(range(len(records)), key=lengths.__getitem__)
    outcomes: dict[int, Outcome] = {}
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    for batch in track(batches, "Asking", console=Console(stderr=True), disable=not progress):
        inputs, unreadable = _read(processor, [records[index] for index in batch], features)
        for index, problem in zip(batch, unreadable, strict=True):
            if problem is not None:
                outcomes[index] = Outcome(records[index].kind, False, 0, 0, 0.0, (), problem)
        asked = [index for index in batch if index not in outcomes]
        if not asked:
            continue
        own = [retention[index] for index in asked] if isinstance(retention, Sequence) else retention
        call = {"retention": own, "max_visual_tokens": max_visual_tokens, "reencode": reencode}
        method = selection if orders is None else _first_of([orders[index] for index in asked])
        answers, chosen = answer(model, processor, inputs, lengths[batch[-1]] + 2, selection=method, **call)
        visual_tokens = [math.prod(grid) for grid in model.model.merged_grid(inputs["video_grid_thw"])]
        for row, index in enumerate(asked):
            record = records[index]
            kept = tuple(chosen.kept_indices[row].tolist())
            correct = answers[row] == record.answer
            rho = float(chosen.rho[row])
            outcomes[index] = Outcome(record.kind, correct, len(kept), visual_tokens[row], rho, kept)
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
    given = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()}
    output = model.generate(
        **given, **call, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True
    )
    return decode_answers(processor, output, inputs["input_ids"].shape[1]), output.qtsplus


def decode_answers(processor: Any, output: Any, prompt_length: int) -> list[str]:
    """The texts behind the prompts in what `generate` returned."""
    texts = processor.batch_decode(output.sequences[:, prompt_length:], skip_special_tokens=True)
    return [text.strip() for text in texts]


def _first_of(orders: Sequence[np.ndarray]) -> Method:
    """A selection that keeps of each row of one batch the first n of its tokens in a given order."""
    rows = iter(orders)

    def keep_first(candidates: Candidates, n: int) -> torch.Tensor:
        return torch.as_tensor(next(rows)[:n], device=candidates.device).sort().values

    return keep_first


def _read(
    processor: Any, records: Sequence[VideoRecord], features: Mapping[str, Mapping[str, torch.Tensor]] | None
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
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return SkippedRecord(str(record.video), reason)
    return None


def _videos(records: Sequence[VideoRecord]) -> dict[str, Any]:
    """The videos of records as the processor takes them, each at the rate of its record."""
    rates = [record.fps for record in records]
    videos = {"videos": [record.video for record in records]}
    return videos if all(rate is None for rate in rates) else {**videos, "fps": rates}


def model_inputs(
    processor: Any,
    records: Sequence[VideoRecord],
    features: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> dict[str, Any]:
    """Prompts that end where the answer begins, with pixels or features; see [`exact_match`]."""
    prompts = [prompt_of(processor, record) for record in records]
    queries = [record.query or record.question for record in records]
    if features is None:
        return dict(processor(text=prompts, query=queries, padding=True, return_tensors="pt", **_videos(records)))
    found = [features[str(record.video)] for record in records]
    grids = torch.cat([video["video_grid_thw"] for video in found])
    seconds = torch.cat([video["second_per_grid_ts"] for video in found])
    return {
        **prompt_inputs(processor, prompts, grids, seconds, queries),
        "video_features": [video["video_features"] for video in found],
        "video_grid_thw": grids,
        "second_per_grid_ts": seconds,
    }


def prompt_of(processor: Any, record: VideoRecord) -> str:
    """The prompt of a question about a video, which ends where the answer begins."""
    content = [{"type": "video"}, {"type": "text", "text": record.question}]
    messages = [{"role": "user", "content": content}]
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def accuracy(correct: Sequence[bool]) -> tuple[float, float, float]:
    """Share of correct answers with the bounds of its 95% Wilson interval."""
    n, z = len(correct), 1.96
    share = sum(correct) / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding leaves none out


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """
    Questions, accuracy with its interval and kept fraction (`None` where no video could be read), the same per kind,
    and the videos that could not be read, with the number of their questions.
    """

    def row(chosen: Sequence[Outcome]) -> dict[str, float | int | None]:
        share, low, high = accuracy([outcome.correct for outcome in chosen])
        visual_tokens = sum(outcome.visual_tokens for outcome in chosen)
        kept = sum(outcome.kept_tokens for outcome in chosen) / visual_tokens if visual_tokens else None
        return {"questions": len(chosen), "accuracy": share, "low": low, "high": high, "kept": kept}

    kinds = sorted({outcome.kind for outcome in outcomes})
    problems = Counter(outcome.unreadable for outcome in outcomes if outcome.unreadable is not None)
    return {
        **row(outcomes),
        "kinds": {kind: row([outcome for outcome in outcomes if outcome.kind == kind]) for kind in kinds},
        "unreadable": [
            {"video": problem.name, "reason": problem.reason, "questions": count} for problem, count in problems.items()
        ],
    }


__all__ = ["Outcome", "accuracy", "answer", "decode_answers", "exact_match", "model_inputs", "prompt_of", "summarise"]
