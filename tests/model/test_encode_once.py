"""A video is encoded once, in chunks of any size, and asked about as often as one likes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import qtsplus.model.encoding_qtsplus as encoding
from model_checks import mixed_inputs, shared_model, trainable, with_labels
from qtsplus.model.encoding_qtsplus import chunk_steps
from qtsplus.model.methods_qtsplus import METHODS
from tiny import PATCH_VALUES, batch, prompt, seeded, stock_twin, tiny_model


def encoded(model, inputs, **options):
    """The same inputs with features in place of the videos' pixels."""
    inputs = dict(inputs)
    pixels = inputs.pop("pixel_values_videos")
    grid = inputs["video_grid_thw"]
    inputs["video_features"] = model.encode_videos(pixels, grid, **options)
    return inputs


COUNT = st.integers(1, 9)


COST = st.integers(1, 81)


@given(
    sizes=st.lists(st.tuples(COUNT, COST), max_size=4),
    capacity=st.integers(1, 200),
)
def test_chunks_hold_everything_in_order_and_no_more_than_they_may(sizes, capacity):
    counts = [count for count, _ in sizes]
    costs = [cost for _, cost in sizes]
    chunks = []
    for chunk in chunk_steps(counts, capacity, costs):
        steps = []
        for piece in chunk:
            steps += [(piece.index, step) for step in range(piece.first, piece.stop)]
        chunks.append(steps)

    def cost_of(steps):
        return sum(costs[index] for index, _ in steps)

    every_step = []
    for index, count in enumerate(counts):
        every_step += [(index, step) for step in range(count)]
    assert sum(chunks, []) == every_step
    for steps in chunks:
        assert len(steps) == 1 or cost_of(steps) <= capacity
    for before, after in pairwise(chunks):
        with_next = before + after[:1]
        assert cost_of(with_next) > capacity, "the next step would have had room in the chunk before"


def test_a_cpu_encodes_2048_patches_at_a_time_and_gets_stock_s_numbers():
    model = tiny_model()
    rows = []

    def note(module, args):
        (pixels,) = args
        rows.append(len(pixels))

    grid = torch.tensor([[30, 8, 10], [1, 4, 4], [2, 10, 14]])
    patches = int(grid.prod(-1).sum())
    pixels = torch.randn(patches, PATCH_VALUES, generator=seeded(0))
    model.model.visual.register_forward_pre_hook(note)
    features = torch.cat(model.encode_videos(pixels, grid))
    assert rows == [25 * 80, 5 * 80 + 16 + 2 * 140]
    with torch.no_grad():
        expected = stock_twin(model).model.visual(pixels, grid_thw=grid)
    assert_close(features, expected.pooler_output, atol=1e-5, rtol=1e-5)


def test_training_encodes_a_batch_at_once(monkeypatch):
    """Ranks that share weights must call them equally often."""
    monkeypatch.setattr(encoding, "PATCHES_PER_CHUNK_ON_CPU", 10)
    model = tiny_model().train()
    calls = []
    model.model.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    model(**with_labels(mixed_inputs())).loss.backward()
    assert len(calls) == 2  # the images and the videos


def test_gradients_reach_the_features():
    inputs = with_labels(batch(prompt(videos=[(4, 4, 8)]), prompt(videos=[(2, 4, 4)], seed=1)))
    from_pixels = tiny_model(gate="noiseless").train()
    from_features = tiny_model(gate="noiseless").train()
    from_pixels(**inputs).loss.backward()
    inputs = encoded(from_features, inputs)
    by_column = [features.T.contiguous().T for features in inputs["video_features"]]  # contiguous or not is the same
    inputs["video_features"] = [features.requires_grad_() for features in by_column]
    from_features(**inputs).loss.backward()
    for features in inputs["video_features"]:
        assert features.grad.any()
    for name, parameter in trainable(from_features).items():
        if ".visual." in name:  # zeros, so that no process of several waits for it
            assert not parameter.grad.any(), name
        else:
            expected = from_pixels.get_parameter(name)
            assert_close(parameter.grad, expected.grad, atol=1e-6, rtol=1e-5)


def test_features_of_another_dtype_are_cast():
    model = tiny_model().double()
    inputs = batch(prompt(videos=[(2, 4, 4)]))
    inputs = encoded(model, inputs)
    inputs["video_features"] = [features.float() for features in inputs["video_features"]]
    assert torch.isfinite(model(**inputs).logits).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pixel_values_videos": torch.zeros(1, PATCH_VALUES)},
            "pixels and video_features: pass one",
        ),
        (
            {"video_features": [torch.zeros(8, 64)] * 2},
            r"2 video_features: expected one per video \(1\)",
        ),
        (
            {"video_features": [torch.zeros(7, 64)]},
            r"\(7, 64\): expected a tensor \(8, 64\), the merged tokens of its grid",
        ),
        (
            {"video_features": [[0.0]]},
            r"video_features 0 is list: expected a tensor \(8, 64\)",
        ),
        (
            {"video_features": [torch.zeros(8, 64, dtype=torch.int64)]},
            "video_features 0 is of torch.int64: expected floating-point numbers",
        ),
        (
            {"video_grid_thw": None, "second_per_grid_ts": None},
            "Got video pixels or features alone",
        ),
    ],
    ids=["pixels too", "count", "shape", "a list", "whole numbers", "no grid"],
)
@pytest.mark.parametrize("method", ["forward", "generate"])
def test_features_that_do_not_fit(method, change, message):
    model = shared_model()
    inputs = encoded(model, batch(prompt(videos=[(2, 4, 4)])))
    inputs |= change
    with pytest.raises(ValueError, match=message):
        getattr(model, method)(**inputs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("call", [{}, {"retention": 0.5}], ids=["own budget", "half"])
@pytest.mark.parametrize("selection", METHODS)
@pytest.mark.parametrize("budget", ["rho", "loss"])
def test_features_that_are_not_finite_are_refused(budget, selection, call, value):
    if selection == "all":
        call = {}
    model = tiny_model(selection=selection, budget=budget)
    videos = [(2, 4, 4), (4, 4, 4)]
    inputs = encoded(model, batch(prompt(videos=videos), prompt(videos=videos[:1], seed=1)))
    inputs["video_features"][1][3, 5] = value
    for method in (model, model.generate):
        with pytest.raises(ValueError, match="finite (values|features)"):
            method(**inputs, **call)


@pytest.mark.parametrize("frames", [0, -2, 1.5, True])
def test_nothing_and_no_count_of_frames_are_refused(frames):
    inputs = batch(prompt(videos=[(2, 4, 4)]))
    with pytest.raises(ValueError, match="frames_per_chunk"):
        encoded(shared_model(), inputs, frames_per_chunk=frames)
    with pytest.raises(ValueError, match="got no videos"):
        shared_model().encode_videos(None, None)
