"""Two passes in the learned benchmark: every question has regions of its own encoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.exact_match import Outcome
from qtsplus.layout_qtsplus import lay_out
from qtsplus.mixin_qtsplus import choose
from qtsplus.prompt_qtsplus import IMAGE, VIDEO, CompactPrompt, splice, take_inputs
from qtsplus.session import EncodedVideo, encode
from qtsplus.two_passes import SecondPass, TwoPasses, second_pass

from ..exact_match import model_inputs

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
    tile = None if model.model.tile_side is None else TILE
    passes = TwoPasses(tokens=min(max(LEAST_TOKENS, 2 * retention), 1.0), tile=tile)
    names = {str(record.video) for record in records}
    videos = {name: encode(model, processor, name, two_passes=passes) for name in sorted(names)}
    asked: list[TwiceAsked] = []
    for start in range(0, len(records), batch_size):
        batch = records[start : start + batch_size]
        seconds = [_second(model, processor, record, videos[str(record.video)], retention) for record in batch]
        known = {
            name: {**_described(video.large.chunks), "video_features": video.features}
            for name, video in videos.items()
            if video.large is not None
        }
        inputs = model_inputs(processor, batch, known)
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
            asked.append(TwiceAsked(outcome, len(videos[str(record.video)].features), len(second.features)))
    return asked


def second_prompt(
    model: Any, inputs: Mapping[str, Any], passes: Sequence[SecondPass], **selection: Any
) -> CompactPrompt:
    """
    The shortened prompts of questions about whole videos, of which `passes` have encoded some tokens: the others are as
    if not kept, and what is there stays at its place. For `model.generate_from`.

    Args:
        inputs: the model's, `[B, S]`, with the grids of the whole videos.
        selection: the fields of `SelectionInputs`; `retention` is that of each pass if it is left out.
    """
    retention, features = [one.retention for one in passes], [one.features for one in passes]
    visual, choice = take_inputs({"retention": retention, **inputs, **selection, "video_features": features})
    layout = lay_out(model.model, visual, inputs["input_ids"], inputs.get("attention_mask"))
    layout = layout.narrow([one.places for one in passes])
    some = {IMAGE: [], VIDEO: features}
    selected, qtsplus = choose(model.model, layout, some, choice, sample_gate=False)
    return splice(model.model, layout, some, selected, qtsplus, pad_left=True)


def _second(model: Any, processor: Any, record: VideoRecord, video: EncodedVideo, retention: float) -> SecondPass:
    assert video.large is not None
    known = {str(record.video): {**_described(video), "video_features": video.features}}
    return second_pass(model, video.large, model_inputs(processor, [record], known), retention=retention)


def _described(video: Any) -> dict[str, torch.Tensor]:
    """The grid of a video, and its seconds."""
    return {
        "video_grid_thw": video.video_grid_thw,
        "second_per_grid_ts": torch.tensor(video.second_per_grid_ts),
    }


__all__ = ["TwiceAsked", "ask_twice"]
