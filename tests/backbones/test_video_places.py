"""A video of which some tokens were encoded: the others are as if not kept, whatever the backbone."""

import pytest
import torch

from qtsplus.compression_qtsplus import _runs
from qtsplus.selection_qtsplus import METHODS


def scattered(grid):
    """Some tokens of a grid: every third of the first step, and the second half of the last one."""
    t, h, w = grid
    return torch.cat([torch.arange(0, h * w, 3), torch.arange(t * h * w - h * w // 2, t * h * w)])


@pytest.fixture
def encoded(model, prepare):
    """Inputs with features in the place of pixels, some tokens of each video, and their features alone."""
    inputs = prepare("video", "two videos")
    grid = inputs["video_grid_thw"]
    whole = model.encode_videos(inputs.pop("pixel_values_videos"), grid)
    places = [scattered(own) for own in model.model.merged_grid(grid)]
    return inputs, whole, places, [own[there] for own, there in zip(whole, places, strict=True)]


@pytest.fixture
def as_if_kept(encoded, monkeypatch):
    """A call that keeps these tokens of whole videos."""
    _, whole, places, some = encoded
    sizes = [len(own) for own in whole]
    kept = [places[0], torch.cat([places[1], sizes[1] + places[2]])]
    monkeypatch.setitem(METHODS, "diversity", lambda candidates, n: kept[len(candidates.visual) - 1])
    retention = [len(kept[0]) / sizes[0], len(kept[1]) / sum(sizes[1:])]
    return {"video_features": whole, "selection": "diversity", "retention": retention}


def test_as_if_the_others_had_not_been_kept(model, encoded, as_if_kept):
    """At their true positions, for the language model and for the re-encoder."""
    inputs, _, places, some = encoded
    with torch.no_grad():
        expected = model(**inputs, **as_if_kept)
        given = model(**inputs, video_features=some, video_places=places, selection="all")
    torch.testing.assert_close(given.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(given.qtsplus.columns, expected.qtsplus.columns)
    counts = [len(own) for own in places]
    assert given.qtsplus.num_tokens.tolist() == [counts[0], counts[1] + counts[2]]


def test_generating(model, encoded, as_if_kept):
    inputs, _, places, some = encoded
    call = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    given = model.generate(**inputs, video_features=some, video_places=places, selection="all", **call)
    assert torch.equal(given, model.generate(**inputs, **as_if_kept, **call))


@pytest.mark.parametrize("apart", (False, True), ids=("the prompt's question", "a question apart"))
def test_attention_selects_among_them_as_in_a_prompt_of_them(model, encoded, apart):
    """Where all tokens are there, the language model reads the same prompt, with whatever question."""
    inputs, whole, _, _ = encoded
    call = {"selection": "lm_attention", "retention": 0.3}
    if apart:
        call["query_input_ids"] = torch.full((2, 3), 30)
    every = [torch.arange(len(own)) for own in whole]
    with torch.no_grad():
        expected = model(**inputs, video_features=whole, **call).qtsplus
        given = model(**inputs, video_features=whole, video_places=every, **call).qtsplus
    for one, other in zip(given.log_relevance, expected.log_relevance, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("selection", ("qtsplus", "lm_attention", "temporal_redundancy", "uniform"))
def test_selecting_among_them(model, encoded, selection):
    inputs, _, places, some = encoded
    call = {"selection": selection, "retention": 0.5, "query_input_ids": torch.full((2, 3), 30)}
    with torch.no_grad():
        given = model(**inputs, video_features=some, video_places=places, **call).qtsplus
    for row, count in enumerate((len(places[0]), len(places[1]) + len(places[2]))):
        assert len(given.kept_indices[row]) == -(-count // 2) and int(given.kept_indices[row].max()) < count


def test_every_token_is_the_whole_video(model, encoded):
    inputs, whole, _, _ = encoded
    every = [list(range(len(own))) for own in whole]
    call = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "retention": 0.4}
    expected = model.generate(**inputs, video_features=whole, **call)
    assert torch.equal(model.generate(**inputs, video_features=whole, video_places=every, **call), expected)


def test_whole_steps_stay_neighbours_in_time():
    """For a method that looks at the step before."""
    assert _runs(torch.arange(4, 12), (3, 2, 2)) == [(2, 1, 4)]
    assert _runs(torch.tensor([0, 5, 9, 10]), (3, 2, 2)) == [(1, 1, 1), (1, 1, 1), (1, 1, 2)]
    assert _runs(torch.tensor([1, 2, 5, 6, 8]), (3, 2, 2)) == [(2, 1, 2), (1, 1, 1)]


@pytest.mark.parametrize("places", [[], [0, 9999], [1, 0], [0, 0], [-1], [0.5], [[0]]], ids=str)
def test_places_that_the_grid_has_not(model, encoded, places):
    inputs, _, good, some = encoded
    with pytest.raises(ValueError, match=r"video_places 0 is .*: expected some of the \d+ tokens of the grid"):
        model(**inputs, video_features=some, video_places=[places, *good[1:]])


def test_places_without_their_features(model, prepare, encoded):
    inputs, _, places, some = encoded
    with pytest.raises(ValueError, match="2 video_places: expected one row per video"):
        model(**inputs, video_features=some, video_places=places[1:])
    with pytest.raises(ValueError, match="video_features 0 has shape .*the tokens of its video_places"):
        model(**inputs, video_features=some, video_places=[[0], *places[1:]])
    with pytest.raises(ValueError, match="Got video_places without video_features"):
        model(**prepare("video", "two videos"), video_places=places)
