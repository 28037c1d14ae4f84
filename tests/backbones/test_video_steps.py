"""A video of which some steps in time were encoded: the others are as if not kept, whatever the backbone."""

import pytest
import torch

from qtsplus.selection_qtsplus import METHODS

STEPS = [[0, 2], [1], [0, 1]]  # of the long video, and of two short ones


@pytest.fixture
def encoded(model, prepare):
    """Inputs with features in the place of pixels, and those of `STEPS` alone."""
    inputs = prepare("video", "two videos")
    grid = inputs["video_grid_thw"]
    whole = model.encode_videos(inputs.pop("pixel_values_videos"), grid)
    some = [
        own.unflatten(0, (int(t), -1))[steps].flatten(0, 1)
        for own, t, steps in zip(whole, grid[:, 0], STEPS, strict=True)
    ]
    return inputs, whole, some


def test_as_if_the_others_had_not_been_kept(model, encoded, monkeypatch):
    """At their true positions, for the language model and for the re-encoder."""
    inputs, whole, some = encoded
    sizes = [len(own) for own in whole]
    per_step = [size // int(t) for size, t in zip(sizes, inputs["video_grid_thw"][:, 0], strict=True)]
    tokens = [
        torch.tensor(steps)[:, None] * count + torch.arange(count) for steps, count in zip(STEPS, per_step, strict=True)
    ]
    kept = [tokens[0].flatten(), torch.cat([tokens[1].flatten(), sizes[1] + tokens[2].flatten()])]
    monkeypatch.setitem(METHODS, "diversity", lambda candidates, n: kept[len(candidates.grids) - 1])
    retention = [len(kept[0]) / sizes[0], len(kept[1]) / sum(sizes[1:])]
    with torch.no_grad():
        expected = model(**inputs, video_features=whole, selection="diversity", retention=retention)
        given = model(**inputs, video_features=some, video_steps=STEPS, selection="all")
    torch.testing.assert_close(given.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(given.qtsplus.columns, expected.qtsplus.columns)
    assert given.qtsplus.num_tokens.tolist() == [len(own) for own in kept]


def test_every_step_is_the_whole_video(model, encoded):
    inputs, whole, _ = encoded
    steps = [list(range(int(t))) for t in inputs["video_grid_thw"][:, 0]]
    call = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "retention": 0.4}
    expected = model.generate(**inputs, video_features=whole, **call)
    assert torch.equal(model.generate(**inputs, video_features=whole, video_steps=steps, **call), expected)


@pytest.mark.parametrize("steps", [[], [0, 99], [1, 0], [0, 0], [-1]], ids=str)
def test_steps_that_the_grid_has_not(model, encoded, steps):
    inputs, _, some = encoded
    with pytest.raises(ValueError, match="video_steps 0 is .*: expected some of the . steps of the grid, ascending"):
        model(**inputs, video_features=some, video_steps=[steps, *STEPS[1:]])


def test_steps_without_their_features(model, prepare, encoded):
    inputs, _, some = encoded
    with pytest.raises(ValueError, match="2 video_steps: expected one list per video"):
        model(**inputs, video_features=some, video_steps=STEPS[1:])
    with pytest.raises(ValueError, match="video_features 0 has shape"):
        model(**inputs, video_features=some, video_steps=[[0], *STEPS[1:]])
    with pytest.raises(ValueError, match="Got video_steps without video_features"):
        model(**prepare("video", "two videos"), video_steps=STEPS)
