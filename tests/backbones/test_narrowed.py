"""A video of which some tokens were encoded: the others are as if not kept, whatever the backbone."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qtsplus.model.layout_qtsplus import lay_out
from qtsplus.model.mixin_qtsplus import choose
from qtsplus.model.prompt_qtsplus import IMAGE, VIDEO, splice, take_inputs
from tiny import assert_same, compress, run
from tiny_backbones import each_unlike

GREEDY = {
    "max_new_tokens": 4,
    "min_new_tokens": 4,
    "do_sample": False,
}


def scattered(grid):
    """Some tokens of a grid: every third of the first step, and the second half of the last one."""
    t, h, w = grid
    frame = h * w
    end = t * frame
    first_step = torch.arange(0, frame, 3)
    last_step = torch.arange(end - frame // 2, end)
    return torch.cat([first_step, last_step])


@dataclass
class Encoded:
    """A prompt with one video and a prompt with two, encoded, and the places of some tokens of each video."""

    inputs: dict[str, Tensor]
    features: list[Tensor]
    places: list[Tensor]

    @property
    def every_place(self):
        return [torch.arange(len(tokens)) for tokens in self.features]

    @property
    def counts(self):
        """How many tokens of each prompt are there."""
        first, second, third = map(len, self.places)
        return [first, second + third]

    def whole(self, **call):
        """Inputs with all tokens."""
        return {**self.inputs, "video_features": self.features, **call}

    def as_if_kept(self):
        """Inputs with all tokens, of which the selection keeps those that are there."""
        first, second, third = self.places
        sizes = list(map(len, self.features))
        second_row = torch.cat([second, sizes[1] + third])
        kept_by_videos = {1: first, 2: second_row}

        def choose_present(candidates, n):
            return kept_by_videos[len(candidates.visual)]

        retention = [
            len(first) / sizes[0],
            len(second_row) / (sizes[1] + sizes[2]),
        ]
        return self.whole(selection=choose_present, retention=retention)

    def layout(self, model, call):
        visual, choice = take_inputs(call)
        layout = lay_out(
            model.model,
            visual,
            self.inputs["input_ids"],
            self.inputs["attention_mask"],
        )
        return layout, choice

    def shortened(self, model, places, **selection):
        """The prompts, of which only the tokens at `places` are there."""
        tokens = [whole[own] for whole, own in zip(self.features, places, strict=True)]
        call = {**self.inputs, **selection, "video_features": tokens}
        layout, choice = self.layout(model, call)
        layout = layout.narrow(places)
        features = {IMAGE: [], VIDEO: tokens}
        selected, qtsplus = choose(
            model.model,
            layout,
            features,
            choice,
            sample_gate=False,
        )
        return splice(
            model.model,
            layout,
            features,
            selected,
            qtsplus,
            pad_left=True,
        )


@pytest.fixture
@torch.no_grad()
def encoded(model, prepare):
    inputs = prepare("video", "two videos")
    grid = inputs["video_grid_thw"]
    features = model.encode_videos(inputs.pop("pixel_values_videos"), grid)
    merged = model.model.merged_grid(grid)
    return Encoded(inputs, features, places=list(map(scattered, merged)))


@each_unlike
def test_as_if_the_others_had_not_been_kept(model, encoded):
    """At their true positions, for the language model and for the re-encoder."""
    expected = compress(model.model, **encoded.as_if_kept(), pad_left=True)
    some = encoded.shortened(model, encoded.places, selection="all")
    for name in ("input_ids", "attention_mask", "position_ids", "next_position"):
        assert_same(getattr(some, name), getattr(expected, name))
    assert_same(some.qtsplus.columns, expected.qtsplus.columns)
    assert_close(some.features["video"], expected.features["video"], atol=1e-5, rtol=1e-5)
    assert some.qtsplus.num_tokens.tolist() == encoded.counts


@each_unlike
def test_generating(model, encoded):
    prompt = encoded.shortened(model, encoded.places, selection="all")
    expected = model.generate(**encoded.as_if_kept(), **GREEDY)
    assert_same(model.generate_from(prompt, **GREEDY), expected)


@pytest.mark.parametrize("apart", [False, True], ids=["the prompt's question", "a question apart"])
@each_unlike
def test_attention_selects_among_them_as_in_a_prompt_of_them(model, encoded, apart):
    """Where all tokens are there, the language model reads the same prompt, with whatever question."""
    call = {"selection": "lm_attention", "retention": 0.3}
    if apart:
        call["query_input_ids"] = torch.full((2, 3), 30)
    expected = run(model, encoded.whole(**call)).qtsplus
    prompt = encoded.shortened(model, encoded.every_place, **call)
    assert_close(prompt.qtsplus.log_relevance, expected.log_relevance)


@pytest.mark.parametrize("selection", ["qtsplus", "lm_attention", "temporal_redundancy", "uniform"])
@each_unlike
def test_selecting_among_them(model, encoded, selection):
    prompt = encoded.shortened(
        model,
        encoded.places,
        selection=selection,
        retention=0.5,
        query_input_ids=torch.full((2, 3), 30),
    )
    for kept, count in zip(prompt.qtsplus.kept_indices, encoded.counts, strict=True):
        assert len(kept) == (count + 1) // 2
        assert kept.max() < count


@each_unlike
def test_each_step_that_is_left_has_a_grid(model, encoded):
    layout, _ = encoded.layout(model, encoded.whole())
    (span, *_) = layout.competing(layout.rows[0])
    grid = layout.grids[span.modality][span.index]
    assert layout.grids_of(span) == [tuple(grid)]
    _, h, w = grid
    frame = h * w
    places = torch.tensor([0, frame + 1, frame + 2])
    narrowed = layout.narrow([places, *encoded.every_place[1:]])
    assert narrowed.grids_of(span) == [(1, 1, 1), (1, 1, 2)]
