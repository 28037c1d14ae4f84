"""The speed, memory and cost benchmarks at toy size with other backbones."""

import math

import numpy as np
import pytest
import torch

from benchmarks.files import read_result
from benchmarks.speed import memory, speed
from benchmarks.speed.cost import stage_costs
from benchmarks.speed.shapes import MODEL_SHAPES, SIDES, build_pair, make_config, make_processor
from pairs import assert_one_model, counted_flops

# The toys' (time, height, width) in tokens.
GRIDS = {
    "internvl2.5-8b": (4, 16, 16),
    "llava-video-7b": (4, 14, 14),
    "qwen3-vl-8b": (2, 4, 3),
    "qwen3.5-9b": (2, 4, 3),
}
# Tokens of the whole models' and the CPU's videos, as the pages say.
TOKENS = {
    **{"internvl2.5-8b": (30_720, 4_096), "llava-video-7b": (29_400, 3_920)},
    **{"qwen3-vl-8b": (180_000, 4_032), "qwen3.5-9b": (180_000, 4_032)},
}


@pytest.fixture(params=GRIDS)
def toy(request):
    return MODEL_SHAPES[f"{request.param}-tiny"]


def test_both_sides_are_one_model(toy):
    assert_one_model(build_pair(toy, "cpu", torch.float32))


def test_speed(toy, tmp_path):
    document = read_result(speed.run_speed(toy.name, tmp_path, dtype="float32", repeats=1, progress=False))
    tokens = math.prod(GRIDS[toy.variant])
    assert toy.grid == GRIDS[toy.variant]
    assert toy.visual_tokens == document["tokens"]["visual_tokens"] == tokens
    (stock,), (ours,) = (document["repeats"][side] for side in SIDES)
    assert stock["visual_tokens_to_lm"] == tokens and ours["visual_tokens_to_lm"] == -(-11 * tokens // 100)
    assert [point["stock"]["visual_tokens_to_lm"] for point in document["frames"]] == [tokens // 2]
    assert all(run[stage] > 0 for run in (stock, ours) for stage in ("vision", "prefill", "per_token"))
    assert stock["decode"] + stock["preprocess"] + stock["vision"] + stock["prefill"] <= stock["file_to_first_token"]
    assert ours["reading"] + ours["vision"] + ours["selection"] + ours["prefill"] <= ours["file_to_first_token"]
    for side in SIDES:
        for stage, row in document["cost"][side].items():
            assert row["seconds"] == document["seconds"][side][stage]["median"]
    assert {"vision", "prefill"} <= set(document["cost"]["stock"])
    assert f"## {toy.name}" in (tmp_path / "summary.md").read_text()


def test_the_vision_towers_operations_are_those_that_pytorch_counts(toy):
    models, processor = build_pair(toy, "cpu", torch.float32), make_processor(toy)
    (width, height) = toy.size
    frames = np.random.default_rng(0).integers(256, size=(toy.frames, height, width, 3), dtype=np.uint8)
    pixels, grid = processor.preprocess_frames(frames, processor.grid_of(toy.frames, height, width))
    total = counted_flops(lambda: models["ours"].encode_videos(pixels, grid))
    assert total == stage_costs(make_config(toy), toy.grid, 10, 5, 0.11)["stock"]["vision"].flops


def test_memory(toy, tmp_path, monkeypatch):
    """Both sides get to a first token; of a process that has run tests before, memory says nothing."""
    monkeypatch.setattr(
        memory, "in_own_process", lambda function, **arguments: {**function(**arguments), "extra_mb": [100.0]}
    )
    sizes = {"tokens": 2000, "heads": 4, "key_value_heads": 2, "head_dim": 16, "question_tokens": 16}
    document = read_result(
        memory.run_memory(toy.name, tmp_path, dtype="float32", repeats=1, relevance=sizes, progress=False)
    )
    assert document["repeats"]["stock"]["weights_mb"] < document["repeats"]["ours"]["weights_mb"]


@pytest.mark.parametrize("name", TOKENS)
def test_shapes(name):
    whole, quarter = MODEL_SHAPES[name], MODEL_SHAPES[f"{name}-cpu"]
    assert whole.whole and not quarter.whole and whole.sweep and quarter.sweep
    assert (whole.visual_tokens, quarter.visual_tokens) == TOKENS[name]
    large, small = make_config(whole), make_config(quarter)
    assert large.text_config.hidden_size == small.text_config.hidden_size
    assert large.text_config.num_hidden_layers == 4 * small.text_config.num_hidden_layers
    depths = [
        getattr(config.vision_config, "depth", None) or config.vision_config.num_hidden_layers
        for config in (large, small)
    ]
    assert round(depths[0] / depths[1]) == 4
    assert large.text_config.vocab_size > 90_000 > small.text_config.vocab_size


def test_the_operations_of_linear_attention_are_those_that_pytorch_counts():
    """Of a prompt of whole chunks: PyTorch pads the last one."""
    toy = MODEL_SHAPES["qwen3.5-9b-tiny"]
    model, text, length = build_pair(toy, "cpu", torch.float32)["stock"], make_config(toy).text_config, 128
    embeds, positions = torch.randn(1, length, text.hidden_size), torch.arange(length).expand(3, 1, -1)
    total = counted_flops(lambda: model(inputs_embeds=embeds, position_ids=positions, logits_to_keep=1))
    # It counts causal attention as if it were full, no triangular systems, and a convolution's padding.
    keys, values = text.linear_key_head_dim, text.linear_num_value_heads * text.linear_value_head_dim
    future = 2 * text.num_attention_heads * text.head_dim * length**2
    systems = length * 64 * (text.linear_num_value_heads * keys + values)
    kernel = text.linear_conv_kernel_dim
    padding = (kernel - 1) * 2 * kernel * (2 * text.linear_num_key_heads * keys + values)
    expected = stage_costs(make_config(toy), (2, 4, 4), length - 32, 5, 1.0)["stock"]["prefill"].flops
    # Older versions of Transformers multiply matrices for the angles of the three rotary axes.
    angles = 2 * 3 * length * sum(text.rope_parameters["mrope_section"])
    assert total - (expected + future - systems + padding) in (0, angles)
