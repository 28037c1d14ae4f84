"""A video of which some tokens were encoded: the others are as if not kept, whatever the backbone."""

import pytest
import torch
from torch.testing import assert_close

from qtsplus.model.layout_qtsplus import lay_out
from qtsplus.model.mixin_qtsplus import choose
from qtsplus.model.prompt_qtsplus import IMAGE, VIDEO, splice, take_inputs
from tiny import assert_same, compress
from tiny_backbones import each_unlike


def scattered(grid):
    """Some tokens of a grid: every third of the first step, and the second half of the last one."""
    t, h, w = grid
    return torch.cat([torch.arange(0, h * w, 3), torch.arange(t * h * w - h * w // 2, t * h * w)])


@pytest.fixture
def encoded(model, prepare):
    """Inputs with features in place of pixels, some tokens of each video, and what a second pass encoded."""
    inputs = prepare("video", "two videos")
    grid = inputs["video_grid_thw"]
    whole = model.encode_videos(inputs.pop("pixel_values_videos"), grid)
    return inputs, whole, [scattered(own) for own in model.model.merged_grid(grid)]


def shortened(model, inputs, whole, places, **selection):
    """The shortened prompts, of which only the tokens at `places` are there."""
    features = {IMAGE: [], VIDEO: [one[own] for one, own in zip(whole, places, strict=True)]}
    visual, choice = take_inputs({**inputs, **selection, "video_features": features[VIDEO]})
    layout = lay_out(model.model, visual, inputs["input_ids"], inputs["attention_mask"]).narrow(places)
    selected, qtsplus = choose(model.model, layout, features, choice, sample_gate=False)
    return splice(model.model, layout, features, selected, qtsplus, pad_left=True)


def as_if_kept(whole, places):
    """A call that keeps these tokens of whole videos: one in the first row, two in the second."""
    sizes = [len(own) for own in whole]
    kept = [places[0], torch.cat([places[1], sizes[1] + places[2]])]
    retention = [len(kept[0]) / sizes[0], len(kept[1]) / sum(sizes[1:])]
    return {
        "video_features": whole,
        "selection": lambda candidates, n: kept[len(candidates.visual) - 1],
        "retention": retention,
    }


@each_unlike
def test_as_if_the_others_had_not_been_kept(model, encoded):
    """At their true positions, for the language model and for the re-encoder."""
    inputs, whole, places = encoded
    given = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    with torch.no_grad():
        expected = compress(model.model, **given, **as_if_kept(whole, places), pad_left=True)
        some = shortened(model, given, whole, places, selection="all")
    for name in ("input_ids", "attention_mask", "position_ids", "next_position"):
        assert torch.equal(getattr(some, name), getattr(expected, name)), name
    assert_same(some.qtsplus.columns, expected.qtsplus.columns)
    for one, other in zip(some.features["video"], expected.features["video"], strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-5)
    counts = [len(own) for own in places]
    assert some.qtsplus.num_tokens.tolist() == [counts[0], counts[1] + counts[2]]


@each_unlike
def test_generating(model, encoded):
    inputs, whole, places = encoded
    call = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    prompt = shortened(model, inputs, whole, places, selection="all")
    expected = model.generate(**inputs, **as_if_kept(whole, places), **call)
    assert_same(model.generate_from(prompt, **call), expected)


@pytest.mark.parametrize("apart", (False, True), ids=("the prompt's question", "a question apart"))
@each_unlike
def test_attention_selects_among_them_as_in_a_prompt_of_them(model, encoded, apart):
    """Where all tokens are there, the language model reads the same prompt, with whatever question."""
    inputs, whole, _ = encoded
    call = {"selection": "lm_attention", "retention": 0.3}
    if apart:
        call["query_input_ids"] = torch.full((2, 3), 30)
    every = [torch.arange(len(own)) for own in whole]
    with torch.no_grad():
        expected = model(**inputs, video_features=whole, **call).qtsplus
        given = shortened(model, inputs, whole, every, **call).qtsplus
    for one, other in zip(given.log_relevance, expected.log_relevance, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("selection", ("qtsplus", "lm_attention", "temporal_redundancy", "uniform"))
@each_unlike
def test_selecting_among_them(model, encoded, selection):
    inputs, whole, places = encoded
    call = {"selection": selection, "retention": 0.5, "query_input_ids": torch.full((2, 3), 30)}
    with torch.no_grad():
        given = shortened(model, inputs, whole, places, **call).qtsplus
    for row, count in enumerate((len(places[0]), len(places[1]) + len(places[2]))):
        assert len(given.kept_indices[row]) == -(-count // 2)
        assert int(given.kept_indices[row].max()) < count


@each_unlike
def test_whole_steps_stay_neighbours_in_time(model, encoded):
    """For a method that looks at the step before."""
    inputs, whole, _ = encoded
    visual, _ = take_inputs({**inputs, "video_features": whole})
    layout = lay_out(model.model, visual, inputs["input_ids"], inputs["attention_mask"])
    (span, *_) = layout.competing(layout.rows[0])
    (t, h, w) = layout.grids[span.modality][span.index]
    rest = [torch.arange(len(own)) for own in whole[1:]]
    assert layout.grids_of(span) == [(t, h, w)]

    def grids(places):
        return layout.narrow([torch.tensor(places), *rest]).grids_of(span)

    frame = h * w
    assert grids(list(range(frame, t * frame))) == [(t - 1, 1, frame)]
    assert grids([1, 2, frame + 1, frame + 2]) == [(2, 1, 2)]
    assert grids([0, frame + 1, frame + 2]) == [(1, 1, 1), (1, 1, 2)]
