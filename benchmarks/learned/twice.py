"""Two passes in the learned benchmark: every question has regions of its own encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.exact_match import Outcome

from ..exact_match import model_inputs
from ..two_passes import TwoPasses, read_small, second_pass, second_prompt, tile_side

LEAST_TOKENS = 0.25  # encoded at full size, and twice as many as are kept at least
TILE = 2  # tokens a side: an object of TinyWorld fills one or two, and frames have six a side


@dataclass(frozen=True)
class TwiceAsked:
    """
    A question that was asked in two passes.

    Args:
        outcome: with `kept_indices` among all tokens of the video.
        small, large: tokens that the vision tower made in the first pass, and in the second one.
    """

    outcome: Outcome
    small: int
    large: int


def ask_twice(
    model: Any, processor: Any, records: Sequence[VideoRecord], retention: float, batch_size: int
) -> list[TwiceAsked]:
    """
    As [`exact_match`], in two passes.

    Args:
        retention: fraction of each whole video's tokens to keep.
    """
    tile = None if tile_side(model) is None else TILE
    passes = TwoPasses(tokens=min(max(LEAST_TOKENS, 2 * retention), 1.0), tile=tile)
    names = {str(record.video) for record in records}
    videos = {name: read_small(model, processor, name, passes) for name in sorted(names)}
    first = {name: {**_described(small), "video_features": small.features} for name, (small, _) in videos.items()}
    whole = {
        name: {**_described(large.chunks), "video_features": small.features} for name, (small, large) in videos.items()
    }
    asked: list[TwiceAsked] = []
    for start in range(0, len(records), batch_size):
        batch = records[start : start + batch_size]
        seconds = [
            second_pass(
                model,
                videos[str(record.video)][1],
                model_inputs(processor, [record], first),
                retention=retention,
            )
            for record in batch
        ]
        inputs = model_inputs(processor, batch, whole)
        inputs = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()}
        longest = max(len(processor.tokenizer(record.answer)["input_ids"]) for record in batch)
        output = model.generate_from(
            second_prompt(model, inputs, seconds),
            max_new_tokens=longest + 2,
            do_sample=False,
            return_dict_in_generate=True,
        )
        new = output.sequences[:, inputs["input_ids"].shape[1] :]
        answers = [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]
        for row, (record, second, text) in enumerate(zip(batch, seconds, answers, strict=True)):
            kept = tuple(second.places[output.qtsplus.kept_indices[row].cpu()].tolist())
            outcome = Outcome(record, text == record.answer, second.num_tokens, second.rho, kept)
            asked.append(TwiceAsked(outcome, len(videos[str(record.video)][0].features), len(second.features)))
    return asked


def _described(video: Any) -> dict[str, torch.Tensor]:
    """The grid of a video, and its seconds."""
    return {
        "video_grid_thw": video.video_grid_thw,
        "second_per_grid_ts": torch.tensor(video.second_per_grid_ts),
    }


__all__ = ["TwiceAsked", "ask_twice"]
