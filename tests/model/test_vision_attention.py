"""The vision tower attends in all windows of a layer at once, and gets what stock gets window by window."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from model_checks import shared_model
from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.model.encoding_qtsplus import PatchProjection, attend_within
from tiny import PATCH_VALUES, seeded, stock_twin, tiny_model

SDPA = torch.nn.functional.scaled_dot_product_attention
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))


class CallCount(TorchFunctionMode):
    """Counts the calls of scaled dot-product attention."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is SDPA
        return func(*args, **(kwargs or {}))


def encode(model, grid, pixels):
    return model.model.visual(pixels, grid_thw=grid).pooler_output


def count_calls(model, grid, pixels):
    with CallCount() as count, torch.no_grad():
        encode(model, grid, pixels)
    return count.calls


def video(*grids):
    """(t, h, w) in merged tokens -> grids in patches and pixels."""
    grid = torch.tensor(grids) * torch.tensor([1, 2, 2])
    patches = int(grid.prod(-1).sum())
    return grid, torch.randn(patches, PATCH_VALUES, generator=seeded(0))


@pytest.fixture(scope="module")
def models():
    model = tiny_model()
    return model, stock_twin(model)


@settings(max_examples=25, deadline=None)
@given(grids=st.lists(SIZES, min_size=1, max_size=3))
def test_the_numbers_are_stock_s(models, grids):
    ours, stock = models
    grid, pixels = video(*grids)
    with torch.no_grad():
        encoded = encode(ours, grid, pixels)
        expected = encode(stock, grid, pixels)
    assert_close(encoded, expected, atol=1e-5, rtol=1e-5)


def test_the_gradients_are_stock_s():
    grid, pixels = video((2, 3, 5), (1, 2, 2))

    def gradients(model):
        features = encode(model, grid, pixels)
        features.square().sum().backward()
        return {name: weight.grad for name, weight in model.model.visual.named_parameters()}

    model = tiny_model()
    expected = gradients(stock_twin(model))
    assert_close(gradients(model), expected, atol=1e-4, rtol=1e-4)


def one_by_one(query, key, value, lengths):
    """The readable twin."""
    pieces = []
    for sequence in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        attended = SDPA(*(states.transpose(0, 1) for states in sequence))
        pieces.append(attended.transpose(0, 1))
    return torch.cat(pieces)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    heads=st.integers(1, 3),
)
def test_by_length_is_one_by_one(lengths, heads):
    torch.manual_seed(0)
    shape = (sum(lengths), 3, heads, 8)
    states = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    interleaved = states.unbind(1)  # not contiguous, as the tower's
    weights = torch.randn_like(states[:, 0])
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)

    def gradient_of(attended):
        (gradient,) = torch.autograd.grad((attended * weights).sum(), states)
        return gradient

    attended = attend_within(*interleaved, bounds)
    expected = one_by_one(*map(torch.clone, interleaved), lengths)
    assert_close(attended, expected, atol=1e-12, rtol=1e-12)
    gradient = gradient_of(attended)
    assert_close(gradient, gradient_of(expected), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("height", "width", "calls"),
    [
        (8, 8, 1 + 1),
        (9, 8, 2 + 1),
        (9, 11, 3 + 1),
    ],
    ids=["whole windows", "a narrow edge", "two edges and a corner"],
)
def test_calls_per_layer_do_not_grow_with_the_windows(height, width, calls):
    """`calls` are of a window layer and of a full layer; the tiny model has two of each."""
    for frames in (1, 6):
        grid, pixels = video((frames, height, width))
        assert count_calls(shared_model(), grid, pixels) == 2 * calls


@pytest.mark.parametrize("name", ["eager", {"vision_config": "eager"}])
def test_another_attention_is_stock_s(tmp_path, name):
    shared_model().save_pretrained(tmp_path)
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tmp_path, attn_implementation=name)
    pixels = video((2, 8, 8))
    assert count_calls(model, *pixels) == 0
    model.set_attn_implementation({"vision_config": "sdpa"})
    assert count_calls(model, *pixels) == 4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("patches", [1, 63])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 0),
        (torch.float64, 1e-12),
        (torch.bfloat16, 0.05),
    ],
)
def test_the_patch_projection_is_stock_s_convolution(patches, bias, dtype, tolerance):
    torch.manual_seed(0)
    size = (2, 14, 14)
    convolution = torch.nn.Conv3d(
        3,
        40,
        kernel_size=size,
        stride=size,
        bias=bias,
        dtype=dtype,
    )
    projection = copy.deepcopy(convolution)
    projection.__class__ = PatchProjection
    pixels = torch.randn(patches, 3, *size, dtype=dtype)
    weights = torch.randn(patches, 40, 1, 1, 1, dtype=dtype)

    def output_and_gradients(layer):
        output = layer(pixels)
        gradients = torch.autograd.grad((output * weights).sum(), list(layer.parameters()))
        return output, gradients

    output, gradients = output_and_gradients(projection)
    expected, expected_gradients = output_and_gradients(convolution)
    assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert_close(gradients, expected_gradients, atol=10 * tolerance, rtol=tolerance)
