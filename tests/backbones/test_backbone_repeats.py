"""Steps of a video that repeat the one before are encoded once, on every backbone."""

import pytest
import torch
from torch.testing import assert_close

from qtsplus.model import encoding_qtsplus
from qtsplus.model.encoding_qtsplus import encode_modality
from tiny import assert_same
from tiny_backbones import each_unlike


@pytest.fixture
def video(model, prepare):
    """Three videos: the first stands still behind its first step in time, the last one from its beginning."""
    inputs = prepare("video", "two videos")
    grid = inputs["video_grid_thw"]
    pixels = inputs["pixel_values_videos"].clone()
    rows = model.model.pixel_rows(grid)
    first, _, last = (own.unflatten(0, (t, -1)) for own, t in zip(pixels.split(rows), grid[:, 0].tolist(), strict=True))
    first[2:] = first[1]
    last[:] = last[0]
    return {**inputs, "pixel_values_videos": pixels}


@pytest.fixture
def seen(model, monkeypatch):
    """Rows of pixels that the vision tower was given, call by call."""
    rows = []
    encode_pixels = model.model.encode_pixels

    def count(modality, pixels, grid):
        rows.append(len(pixels))
        return encode_pixels(modality, pixels, grid)

    monkeypatch.setattr(model.model, "encode_pixels", count)
    return rows


def every_step(monkeypatch):
    """From here on every step is encoded."""
    monkeypatch.setattr(encoding_qtsplus, "new_steps", lambda steps: torch.ones(len(steps), dtype=torch.bool))


def taken(inputs):
    return inputs["pixel_values_videos"], inputs["video_grid_thw"]


@each_unlike
def test_a_step_is_encoded_once(model, video, seen, monkeypatch):
    once = model.encode_videos(*taken(video))
    few = sum(seen)
    seen.clear()
    every_step(monkeypatch)
    every = model.encode_videos(*taken(video))
    grid = taken(video)[1]
    long, short, _ = (rows // t for rows, t in zip(model.model.pixel_rows(grid), grid[:, 0].tolist(), strict=True))
    assert few == 2 * long + (int(grid[1, 0]) + 1) * short < sum(seen)
    for one, other in zip(once, every, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-5)
    steps = once[0].unflatten(0, (int(grid[0, 0]), -1))
    assert_same(steps[1:2].expand_as(steps[1:]), steps[1:])
    assert not torch.equal(steps[0], steps[1])


@each_unlike
def test_the_answer_stays(model, video, monkeypatch):
    call = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    once = model.generate(**video, **call)
    every_step(monkeypatch)
    features = model.encode_videos(*taken(video))
    rest = {name: value for name, value in video.items() if name != "pixel_values_videos"}
    assert_same(once, model.generate(**rest, video_features=features, **call))


@each_unlike
def test_gradients_of_repeated_steps_add_up(backbone, processor, video, monkeypatch):
    gradients = []
    for _ in range(2):
        model = backbone.build(processor).train()
        features = encode_modality(model.model, 2, *taken(video))
        sum(own.square().mean() for own in features).backward()
        vision = next(part for part in ("visual", "vision_tower") if hasattr(model.model, part))
        gradients.append(
            [weight.grad for weight in getattr(model.model, vision).parameters() if weight.grad is not None]
        )
        every_step(monkeypatch)
    assert gradients[0]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_nothing_equals_what_is_not_a_number():
    values = torch.tensor([1.0, 1.0, 2.0, float("nan"), float("nan"), 2.0])
    assert encoding_qtsplus.new_steps(values[:, None].expand(-1, 6)).tolist() == [True, False, True, True, True, True]
