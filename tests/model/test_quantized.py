"""What tools that quantize do to a model, without them: `make test-quantization` runs torchao and bitsandbytes."""

import pytest
import torch
from torch import Tensor

from qtsplus.model.encoding_qtsplus import stored_parts
from qtsplus.model.methods_qtsplus import is_finite
from tiny import assert_same, batch, prompt, tiny_model

GRID = (2, 4, 6)  # 48 patches, 12 tokens


class QuantizedWeight(Tensor):
    """A weight as torchao has it: a few numbers and their scale, of which nothing can be summed."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers = numbers
        self.scale = scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return QuantizedWeight(tensors["numbers"], tensors["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


@pytest.mark.parametrize(("scale", "expected"), [(0.5, False), (float("nan"), True)])
def test_the_parts_of_a_quantized_weight_are_checked(scale, expected):
    weight = QuantizedWeight(torch.ones(2, 2, dtype=torch.int8), torch.full((2, 1), scale))
    assert [not is_finite(part) for part in stored_parts(weight)] == [False, expected]


@pytest.mark.parametrize(("value", "expected"), [(1.0, False), (float("nan"), True)])
def test_eight_bits_are_checked_too(value, expected):
    weight = torch.full((2, 2), value).to(torch.float8_e4m3fn)
    assert [not is_finite(part) for part in stored_parts(weight)] == [expected]


def plain_dicts(value):
    """As llm-compressor sends what a module is called with to its device."""
    if isinstance(value, dict):
        return {name: plain_dicts(part) for name, part in value.items()}
    return value


def test_hooks_may_make_plain_dicts_of_the_inputs():
    model = tiny_model().eval()
    inputs = batch(prompt(videos=[GRID]))
    expected = model.generate(**inputs, max_new_tokens=4)
    hook = model.model.register_forward_pre_hook(lambda _, args, kwargs: (args, plain_dicts(kwargs)), with_kwargs=True)
    assert_same(model.generate(**inputs, max_new_tokens=4), expected)
    hook.remove()


@pytest.mark.parametrize("budget", ["loss", "rho"])
def test_linear_layers_have_the_name_of_their_base(budget):
    """llm-compressor lists by it what it left as it was, and wants scales of all other linear layers."""
    selector = tiny_model(budget=budget).model.qtsplus
    linear = [module for module in selector.modules() if isinstance(module, torch.nn.Linear)]
    assert {type(module).__name__ for module in linear} == {"Linear"}
