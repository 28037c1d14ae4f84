"""Steps of a video that repeat the one before are encoded once, on every backbone."""

import pytest
import torch
from torch.testing import assert_close

from qtsplus.model import encoding_qtsplus
from qtsplus.model.encoding_qtsplus import encode_modality
from qtsplus.model.prompt_qtsplus import VIDEO
from tiny import assert_same, without
from tiny_backbones import each_unlike


@pytest.fixture
def video(model, prepare):
    """Three videos: the first stands still behind its first step in time, the last one from its beginning."""
    inputs = prepare("video", "two videos")
    grid = inputs["video_grid_thw"]
    pixels = inputs["pixel_values_videos"].clone()
    inputs["pixel_values_videos"] = pixels
    first, _, last = pixels.split(model.model.pixel_rows(grid))
    steps = grid[:, 0].tolist()
    steps_of_first = first.unflatten(0, (steps[0], -1))
    steps_of_first[2:] = steps_of_first[1]
    steps_of_last = last.unflatten(0, (steps[2], -1))
    steps_of_last[:] = steps_of_last[0]
    return inputs


@pytest.fixture
def seen(model, monkeypatch):
    """Rows of pixels that the vision tower was given, call by call."""
    rows = []
    encode_pixels = model.model.encode_pixels

    def count(pixels, grid):
        rows.append(len(pixels))
        return encode_pixels(pixels, grid)

    monkeypatch.setattr(model.model, "encode_pixels", count)
    return rows


def every_step(monkeypatch):
    """From here on every step is encoded."""

    def all_new(videos):
        return [torch.ones(len(steps), dtype=torch.bool) for steps in videos]

    monkeypatch.setattr(encoding_qtsplus, "new_steps", all_new)


def encode(model, inputs):
    return model.encode_videos(inputs["pixel_values_videos"], inputs["video_grid_thw"])


@each_unlike
def test_a_step_is_encoded_once(model, video, seen, monkeypatch):
    once = encode(model, video)
    rows = sum(seen)
    grid = video["video_grid_thw"]
    steps = grid[:, 0].tolist()
    totals = model.model.pixel_rows(grid)
    of_first, of_second, of_third = (total // t for total, t in zip(totals, steps, strict=True))
    assert rows == 2 * of_first + steps[1] * of_second + of_third
    seen.clear()
    every_step(monkeypatch)
    every = encode(model, video)
    assert rows < sum(seen)
    assert_close(once, every, atol=1e-5, rtol=1e-5)
    first, second, *others = once[0].unflatten(0, (steps[0], -1))
    assert_same(others, [second] * len(others))
    assert not torch.equal(first, second)


@each_unlike
def test_the_answer_stays(model, video, monkeypatch):
    call = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
    }
    once = model.generate(**video, **call)
    every_step(monkeypatch)
    features = encode(model, video)
    rest = without(video, "pixel_values_videos")
    assert_same(once, model.generate(**rest, video_features=features, **call))


@each_unlike
def test_gradients_of_repeated_steps_add_up(backbone, processor, video, monkeypatch):
    def gradients():
        model = backbone.build(processor).train()
        features = encode_modality(
            model.model,
            VIDEO,
            video["pixel_values_videos"],
            video["video_grid_thw"],
        )
        loss = sum(tokens.square().mean() for tokens in features)
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    once = gradients()
    every_step(monkeypatch)
    assert once
    assert_close(once, gradients(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("at_a_time", [1, 2, 32])
def test_nothing_equals_what_is_not_a_number(at_a_time, monkeypatch):
    monkeypatch.setattr(encoding_qtsplus, "STEPS_COMPARED", at_a_time)
    values = torch.tensor([1.0, 1.0, 2.0, float("nan"), float("nan"), 2.0])
    steps = values[:, None].expand(-1, 6)
    assert encoding_qtsplus.new_steps([steps])[0].tolist() == [True, False, True, True, True, True]
