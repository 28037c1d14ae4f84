"""The speed, memory and cost benchmarks at toy size with other backbones."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model_checks import assert_one_model
from qtsplus.benchmark import memory, speed
from qtsplus.benchmark.cost import stage_costs
from qtsplus.benchmark.results import read_json
from qtsplus.benchmark.shapes import SHAPES, SIDES, build_pair, make_config, make_processor

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
FRAMES = 3
# Tokens of a frame.
SIZES = {"internvl2.5-8b": 16 * 16, "llava-video-7b": 14 * 14}


@pytest.fixture(params=SIZES)
def toy(request, monkeypatch):
    """The CPU's shape with narrow layers; its frames have as many tokens as ever."""
    shape = SHAPES[f"{request.param}-cpu"]
    text = {**WIDTHS, "hidden_size": 64, "num_key_value_heads": 1, "head_dim": 32}
    toy = replace(shape, name="toy", frames=FRAMES + 1, source_fps=8, size=(112, 112), text=text, vision=WIDTHS)
    monkeypatch.setitem(SHAPES, "toy", toy)
    monkeypatch.setitem(speed.SWEEPS, "toy", ("toy", (2,)))
    return toy


def test_both_sides_are_one_model(toy):
    assert_one_model(build_pair(toy, "cpu", torch.float32))


def test_speed(toy, tmp_path):
    document = read_json(speed.run_speed("toy", tmp_path, dtype="float32", repeats=1, progress=False))
    tokens = toy.frames * SIZES[toy.variant]
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
    assert "## toy" in (tmp_path / "summary.md").read_text()


def test_the_vision_towers_operations_are_those_that_pytorch_counts(toy):
    models, config = build_pair(toy, "cpu", torch.float32), make_config(toy)
    grid, side = (FRAMES, *toy.grid[1:]), make_processor(toy).video_processor.size["height"]
    pixels = torch.randn(FRAMES, 3, side, side)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        models["ours"].encode_videos(pixels, torch.tensor([grid]))
    assert counter.get_total_flops() == stage_costs(config, grid, 10, 5, 0.11)["stock"]["vision"].flops


def test_memory(toy, tmp_path, monkeypatch):
    """Both sides get to a first token; of a process that has run tests before, memory says nothing."""
    monkeypatch.setattr(
        memory, "in_own_process", lambda function, **arguments: {**function(**arguments), "extra_mb": [100.0]}
    )
    sizes = {"tokens": 2000, "heads": 4, "key_value_heads": 2, "head_dim": 16, "question_tokens": 16}
    document = read_json(
        memory.run_memory("toy", tmp_path, dtype="float32", repeats=1, relevance=sizes, progress=False)
    )
    assert document["repeats"]["stock"]["weights_mb"] < document["repeats"]["ours"]["weights_mb"]


def test_shapes():
    """What the pages say of them."""
    for name, frame in SIZES.items():
        whole, quarter = SHAPES[name], SHAPES[f"{name}-cpu"]
        assert whole.whole and not quarter.whole
        assert whole.visual_tokens == whole.frames * frame and quarter.visual_tokens == quarter.frames * frame
        large, small = make_config(whole), make_config(quarter)
        assert large.text_config.hidden_size == small.text_config.hidden_size
        assert large.text_config.num_hidden_layers == 4 * small.text_config.num_hidden_layers
        assert round(large.vision_config.num_hidden_layers / small.vision_config.num_hidden_layers) == 4
        assert large.text_config.vocab_size > 90_000 > small.text_config.vocab_size
    assert (SHAPES["internvl2.5-8b"].visual_tokens, SHAPES["llava-video-7b"].visual_tokens) == (30720, 29400)
    assert (SHAPES["internvl2.5-8b-cpu"].visual_tokens, SHAPES["llava-video-7b-cpu"].visual_tokens) == (4096, 3920)
