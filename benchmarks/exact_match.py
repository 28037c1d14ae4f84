"""Asks many questions about features that were encoded once, each with a budget of its own."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.exact_match import Outcome
from qtsplus.model.methods_qtsplus import Method
from qtsplus.model.prompt_qtsplus import take_inputs

# By video, `video_features` `[k, d]`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`.
Features = Mapping[str, Mapping[str, torch.Tensor]]


def exact_match(
    model: Any,
    processor: Any,
    records: Sequence[VideoRecord],
    features: Features,
    *,
    retention: float | Sequence[float] | None = None,
    selection: str | Method | None = None,
    max_visual_tokens: int | None = None,
    reencode: bool = True,
    batch_size: int = 16,
) -> list[Outcome]:
    """
    As `qtsplus.evaluation.exact_match`, of videos that were encoded before.

    Args:
        retention: one for all records or one for each.
        selection, max_visual_tokens, reencode: as for `generate`.
        batch_size: questions at a time, which are asked in the order of the lengths of their answers.
    """
    lengths = [len(processor.text_ids(record.answer)) for record in records]
    order = sorted(range(len(records)), key=lengths.__getitem__)
    outcomes: dict[int, Outcome] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        inputs = model_inputs(processor, [records[index] for index in batch], features)
        retentions = [retention[index] for index in batch] if isinstance(retention, Sequence) else retention
        call = {"retention": retentions, "max_visual_tokens": max_visual_tokens, "reencode": reencode}
        answers, chosen = answer(model, processor, inputs, lengths[batch[-1]] + 2, selection=selection, **call)
        visual_tokens = [math.prod(grid) for grid in model.model.merged_grid(inputs["video_grid_thw"])]
        for row, index in enumerate(batch):
            correct, kept = answers[row] == records[index].answer, tuple(chosen.kept_indices[row].tolist())
            outcomes[index] = Outcome(records[index], correct, visual_tokens[row], float(chosen.rho[row]), kept)
    return [outcomes[index] for index in range(len(records))]


def compress(base: Any, sample_gate: Any = None, **inputs: Any) -> Any:
    """The shortened prompts of a model without a head, as its pass makes them of `inputs`."""
    prompt = [inputs.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids")]
    return base.shorten(*prompt, *take_inputs(inputs), sample_gate=sample_gate)


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
