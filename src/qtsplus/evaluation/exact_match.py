"""Asks a model the questions of a JSONL file of records and counts the answers that match."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

from ..training.dataset import VideoRecord
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
    """

    kind: str
    correct: bool
    kept_tokens: int
    visual_tokens: int
    rho: float
    kept_indices: tuple[int, ...]


def exact_match(
    model: Any,
    processor: Any,
    records: Sequence[VideoRecord],
    *,
    retention: float | None = None,
    batch_size: int = 16,
    progress: bool = True,
    features: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> list[Outcome]:
    """
    Greedy answers to records with a video, compared with the records' own, letter for letter.

    Args:
        model, processor: as `qtsplus.session.load` gives them.
        retention: fraction of the visual tokens to keep; the model's decision when absent.
        batch_size: questions at a time; those with answers of like length are asked together.
        features: by video `video_features` `[k, d]`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`, which
            take the place of its pixels: a video that is asked about often is encoded once.

    Returns:
        one outcome per record, in order.
    """
    lengths = [len(processor.tokenizer(record.answer)["input_ids"]) for record in records]
    order = sorted(range(len(records)), key=lengths.__getitem__)
    outcomes: dict[int, Outcome] = {}
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    for batch in track(batches, "Asking", disable=not progress):
        asked = [records[index] for index in batch]
        inputs = model_inputs(processor, asked, features)
        output = model.generate(
            **{name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()},
            retention=retention,
            max_new_tokens=lengths[batch[-1]] + 2,
            do_sample=False,
            return_dict_in_generate=True,
        )
        answers = processor.batch_decode(output.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        visual_tokens = [math.prod(grid) for grid in model.model.merged_grid(inputs["video_grid_thw"])]
        chosen = output.qtsplus
        for row, (index, record) in enumerate(zip(batch, asked, strict=True)):
            kept = tuple(chosen.kept_indices[row].tolist())
            correct = answers[row].strip() == record.answer
            rho = float(chosen.rho[row])
            outcomes[index] = Outcome(record.kind, correct, len(kept), visual_tokens[row], rho, kept)
    return [outcomes[index] for index in range(len(records))]


def model_inputs(
    processor: Any,
    records: Sequence[VideoRecord],
    features: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> dict[str, Any]:
    """Prompts that end where the answer begins, with pixels or features; see [`exact_match`]."""
    prompts = []
    for record in records:
        content = [{"type": "video"}, {"type": "text", "text": record.question}]
        messages = [{"role": "user", "content": content}]
        prompts.append(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    queries = [record.query or record.question for record in records]
    if features is None:
        videos = [record.video for record in records]
        return dict(processor(text=prompts, videos=videos, query=queries, padding=True, return_tensors="pt"))
    found = [features[str(record.video)] for record in records]
    grids = torch.cat([one["video_grid_thw"] for one in found])
    seconds = torch.cat([one["second_per_grid_ts"] for one in found])
    return {
        **prompt_inputs(processor, prompts, grids, seconds, queries),
        "video_features": [one["video_features"] for one in found],
        "video_grid_thw": grids,
        "second_per_grid_ts": seconds,
    }


def accuracy(correct: Sequence[bool]) -> tuple[float, float, float]:
    """Share of correct answers with the bounds of its 95% Wilson interval."""
    n, z = len(correct), 1.96
    share = sum(correct) / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return share, centre - half, centre + half


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Questions, accuracy with its interval, kept fraction, and the same per kind."""

    def row(chosen: Sequence[Outcome]) -> dict[str, float | int]:
        share, low, high = accuracy([one.correct for one in chosen])
        kept = sum(one.kept_tokens for one in chosen) / sum(one.visual_tokens for one in chosen)
        return {"questions": len(chosen), "accuracy": share, "low": low, "high": high, "kept": kept}

    kinds = sorted({one.kind for one in outcomes})
    return {**row(outcomes), "kinds": {kind: row([one for one in outcomes if one.kind == kind]) for kind in kinds}}


__all__ = ["Outcome", "accuracy", "exact_match", "model_inputs", "summarise"]
