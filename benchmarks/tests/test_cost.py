"""The cost model counts what PyTorch counts, and the pages' figures are its own."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.prompts import compress
from benchmarks.speed.cost import least_memory, stage_costs
from benchmarks.speed.cost_figures import cost_figures
from benchmarks.speed.shapes import MODEL_SHAPES, build_pair, make_config, make_processor, prompt_text
from pairs import counted_flops
from qtsplus.model.fields_qtsplus import REDUCTIONS
from qtsplus.model.lm_attention_qtsplus import attention_layer

TEXT, QUESTION, RETENTION = 10, 5, 0.11
BENCHMARKS = Path(__file__).parents[1]


def paper_costs():
    shape = MODEL_SHAPES["3b"]
    return stage_costs(make_config(shape), shape.grid, text_tokens=60, question_tokens=40, retention=RETENTION)


def test_counts_are_those_of_pytorch():
    shape = MODEL_SHAPES["tiny"]
    models = build_pair(shape, "cpu", torch.float32)
    costs = stage_costs(models["ours"].config, shape.grid, TEXT, QUESTION, RETENTION, bytes_per_value=4)
    tokens, width = shape.visual_tokens, models["ours"].config.text_config.hidden_size
    time, height, width_in_tokens = shape.grid

    pixels, grid = torch.randn(4 * tokens, 1176), torch.tensor([[time, 2 * height, 2 * width_in_tokens]])
    total = counted_flops(lambda: models["stock"].model.visual(pixels, grid))
    assert total == costs["stock"]["vision"].flops

    embeds = torch.randn(1, tokens + TEXT, width)
    positions = torch.arange(tokens + TEXT).expand(3, 1, -1)
    total = counted_flops(lambda: models["stock"](inputs_embeds=embeds, position_ids=positions, logits_to_keep=1))
    attention = models["stock"].config.text_config.num_hidden_layers * 4 * width * (tokens + TEXT) ** 2
    # PyTorch counts causal attention as if it were full; older versions of Transformers multiply matrices for the
    # angles of the three rotary axes.
    head_dim = width // models["stock"].config.text_config.num_attention_heads
    angles = 2 * 3 * (tokens + TEXT) * (head_dim // 2)
    assert total - attention / 2 - costs["stock"]["prefill"].flops in (0, angles)

    visual, query = [torch.randn(tokens, width)], [torch.randn(QUESTION, width)]
    place = [torch.zeros(3, tokens, dtype=torch.long)]
    for reduction in REDUCTIONS:
        models["ours"].config.qtsplus_config.reduction = reduction
        costs = stage_costs(models["ours"].config, shape.grid, TEXT, QUESTION, RETENTION, bytes_per_value=4)
        total = counted_flops(lambda: models["ours"].model.qtsplus(visual, query, place, retention=RETENTION))
        assert total == costs["ours"]["relevance"].flops + costs["ours"]["re-encode"].flops


@pytest.mark.parametrize("group", [32, 8192])
def test_attention_selection_is_the_first_layers_over_every_group(group):
    shape = MODEL_SHAPES["tiny"]
    model, tokens = build_pair(shape, "cpu", torch.float32)["ours"], shape.visual_tokens
    model.config.qtsplus_config.attention_group = group
    time, height, width = shape.grid
    processor = make_processor(shape)
    known = {"video_grid_thw": torch.tensor([[time, 2 * height, 2 * width]]), "second_per_grid_ts": [1.0]}
    inputs = processor(text=prompt_text(processor, "Where?"), return_tensors="pt", **known) | known
    inputs.pop("mm_token_type_ids", None)
    features, text = [torch.randn(tokens, 128)], inputs["input_ids"].shape[1] - tokens
    call = {"selection": "lm_attention", "retention": RETENTION, "reencode": False}
    total = counted_flops(lambda: compress(model.model, **inputs, video_features=features, **call))
    costs = stage_costs(model.config, shape.grid, text, 1, RETENTION, selection="lm_attention")["ours"]
    assert set(costs) == {"vision", "relevance", "prefill", "per_token"}
    groups = 2 if group == 32 else 1
    depth = attention_layer(model.config.text_config, model.config.qtsplus_config.attention_layer)
    attention = groups * depth * 4 * 128 * (tokens / groups + text) ** 2  # PyTorch counts it as if it were full
    assert total - attention / 2 == pytest.approx(costs["relevance"].flops, rel=0.01)


def test_windows_at_the_edge_are_smaller():
    """A frame of 9 x 16 tokens has windows of 4 x 4 and, in its last row, of 1 x 4."""
    shape = MODEL_SHAPES["cpu"]
    config = make_config(shape)
    config.vision_config.fullatt_block_indexes = []
    vision = stage_costs(config, (1, 9, 16), TEXT, QUESTION, RETENTION)["stock"]["vision"].flops
    config.vision_config.depth = 0
    without_blocks = stage_costs(config, (1, 9, 16), TEXT, QUESTION, RETENTION)["stock"]["vision"].flops
    weights, patches = 4 * 1280**2 + 3 * 1280 * 3420, 9 * 16 * 4
    attention = 4 * 1280 * (8 * 64**2 + 4 * 16**2)
    assert vision - without_blocks == 8 * (2 * patches * weights + attention)


def test_the_least_memory_of_a_question():
    """Weights, the video's features, the widest layer and the cache of the 3B, all of two bytes a value."""
    least = least_memory(make_config(MODEL_SHAPES["3b"]), num_tokens=10_000, length=1_000)
    selector = 129_557_249
    assert least == 2 * (3_754_622_976 + selector + 10_000 * 2048 + 1_000 * (2 * 11008 + 2048 + 36 * 2 * 2 * 128))


def test_the_figures_of_the_pages_are_of_this_model():
    assert json.loads((BENCHMARKS / "results" / "cost-model.json").read_text()) == cost_figures()


def test_the_notebook_has_the_costs_of_the_stages():
    notebook = (BENCHMARKS / "notebook.md").read_text()
    for side, stages in paper_costs().items():
        for stage, cost in stages.items():
            name = stage.replace("_", " ")
            assert f"| {side} | {name} | {cost.flops / 1e12:.3g} | {cost.bytes / 1e9:.3g} |" in notebook
