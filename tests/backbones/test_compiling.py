"""Decoding compiles as stock's does: into as many graphs, whole."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from tiny import assert_same, batch, prompt, stock_twin, tiny_model
from tiny_backbones import BACKBONES

EACH = [one if one.name == "qwen2_5_vl" else pytest.param(one, marks=pytest.mark.slow) for one in BACKBONES]
CALL = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}


@pytest.fixture(autouse=True)
def clean_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs(model, *prompts):
    """What `generate` last returns where decoding is compiled without a break, and into how many graphs for all."""
    compiling = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiling._compile_all_devices = True  # Transformers compiles on a GPU alone
    torch._dynamo.reset()
    counters.clear()
    for inputs in prompts:
        output = model.generate(**inputs, **CALL, compile_config=compiling)
    assert not counters["graph_break"]
    return output, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backbone", EACH, ids=lambda one: one.name, indirect=True, scope="session")
def test_decoding_is_as_many_graphs_as_stocks(backbone, all_tokens, model, stock, prepare):
    inputs = prepare("video")
    try:
        _, count = graphs(stock, backbone.stock_inputs(all_tokens, inputs))
    except torch._dynamo.exc.Unsupported:  # Transformers 5.17 branches on the position with `longrope`
        pytest.skip("stock does not compile whole")
    output, own_count = graphs(model, {**inputs, "retention": 0.3})
    assert own_count == count >= 1
    assert_same(output, model.generate(**inputs, **{**CALL, "cache_implementation": None}, retention=0.3))


def test_three_prompts_of_different_lengths_are_compiled_once_as_by_stock():
    model = tiny_model()
    # The longest first: a longer one than before would need a larger static cache.
    prompts = [batch(prompt(videos=[(4, 8, 8)], question=words)) for words in (14, 9, 5)]
    _, count = graphs(stock_twin(tiny_model(selection="all", reencode_layers=0)), *prompts)
    _, own_count = graphs(model, *[{**inputs, "retention": 0.3} for inputs in prompts])
    assert own_count == count == 1
