"""Asks a model the questions of a JSONL file of records and counts the answers that match."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import track

from ..training.dataset import VideoRecord


@dataclass(frozen=True)
class Outcome:
    """One question: its kind, whether the answer was the record's, and the tokens kept of those there were."""

    kind: str
    correct: bool
    kept_tokens: int
    visual_tokens: int


def exact_match(
    model: Any,
    processor: Any,
    records: Sequence[VideoRecord],
    *,
    retention: float | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> list[Outcome]:
    """
    Greedy answers to records with a video, compared with the records' own, letter for letter.

    Args:
        model, processor: as `qtsplus.session.load` gives them.
        retention: fraction of the visual tokens to keep; the model's decision when absent.
        batch_size: questions at a time.

    Returns:
        one outcome per record, in order.
    """
    longest = max(len(processor.tokenizer(record.answer)["input_ids"]) for record in records) + 2
    outcomes = []
    batches = [records[start : start + batch_size] for start in range(0, len(records), batch_size)]
    for batch in track(batches, "Asking", disable=not progress):
        prompts = []
        for record in batch:
            content = [{"type": "video"}, {"type": "text", "text": record.question}]
            messages = [{"role": "user", "content": content}]
            prompts.append(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        inputs = processor(
            text=prompts,
            videos=[record.video for record in batch],
            query=[record.query or record.question for record in batch],
            padding=True,
            return_tensors="pt",
        ).to(model.device)
        output = model.generate(
            **inputs, retention=retention, max_new_tokens=longest, do_sample=False, return_dict_in_generate=True
        )
        answers = processor.batch_decode(output.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        visual_tokens = (inputs["input_ids"] == processor.video_token_id).sum(1).tolist()
        kept = output.qtsplus.n.tolist()
        for record, answer, n, m in zip(batch, answers, kept, visual_tokens, strict=True):
            outcomes.append(Outcome(record.kind, answer.strip() == record.answer, n, m))
    return outcomes


def accuracy(outcomes: Sequence[Outcome]) -> tuple[float, float, float]:
    """Share of correct answers with the bounds of its 95% Wilson interval."""
    n, z = len(outcomes), 1.96
    share = sum(one.correct for one in outcomes) / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return share, centre - half, centre + half


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Questions, accuracy with its interval, kept fraction, and the same per kind."""

    def row(chosen: Sequence[Outcome]) -> dict[str, float | int]:
        share, low, high = accuracy(chosen)
        kept = sum(one.kept_tokens for one in chosen) / sum(one.visual_tokens for one in chosen)
        return {"questions": len(chosen), "accuracy": share, "low": low, "high": high, "kept": kept}

    kinds = sorted({one.kind for one in outcomes})
    return {**row(outcomes), "kinds": {kind: row([one for one in outcomes if one.kind == kind]) for kind in kinds}}


__all__ = ["Outcome", "accuracy", "exact_match", "summarise"]
