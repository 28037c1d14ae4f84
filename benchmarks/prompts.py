"""Prompts about features that were encoded once, and what a model makes of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qtsplus.data.records import VideoRecord
from qtsplus.model.prompt_qtsplus import take_inputs

# By video, `video_features` `[k, d]`, `video_grid_thw` `[1, 3]` and `second_per_grid_ts` `[1]`.
Features = Mapping[str, Mapping[str, torch.Tensor]]


def compress(base: Any, sample_gate: Any = None, **inputs: Any) -> Any:
    """The shortened prompts of a model without a head, as its pass makes them of `inputs`."""
    prompt = [inputs.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids")]
    return base.shorten(*prompt, *take_inputs(inputs), sample_gate=sample_gate)


def model_inputs(processor: Any, records: Sequence[VideoRecord], features: Features) -> dict[str, Any]:
    """Prompts about videos that were encoded before, which end where the answer begins."""
    conversations = [conversation(record.question) for record in records]
    query = [record.query or record.question for record in records]
    encoded = [features[str(record.video)] for record in records]
    times = {name: torch.cat([video[name] for video in encoded]) for name in ("video_grid_thw", "second_per_grid_ts")}
    inputs = processor.conversation_inputs(conversations, query=query, **times)
    return {**inputs, **times, "video_features": [video["video_features"] for video in encoded]}


def conversation(question: str) -> list[dict[str, Any]]:
    """A question about one video."""
    return [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
