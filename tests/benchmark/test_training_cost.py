"""The cost of training with attention distillation: what PyTorch counts, and what the page and the recipes say."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qtsplus.benchmark.cost import stage_costs
from qtsplus.benchmark.shapes import MODEL_SHAPES, build_pair, make_processor
from qtsplus.benchmark.training_cost import TRAINED_BYTES, language_model_step, training_costs, training_table
from qtsplus.hub.files import hub_configs
from qtsplus.training.models import load_config
from qtsplus.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
# By recipe: a shape with its processor, and the grid of a clip of 64 frames of 1280 x 720 pixels in tokens.
CLIPS = {
    "qtsplus-3b": ("3b", (32, 14, 26)),
    "qtsplus-7b": ("3b", (32, 14, 26)),
    "llava-video-7b": ("llava-video-7b", (64, 14, 14)),
    "internvl2.5-8b": ("internvl2.5-8b", (64, 16, 16)),
    "qwen3-vl-8b": ("qwen3-vl-8b", (32, 14, 26)),
    "qwen3.5-9b": ("qwen3.5-9b", (32, 14, 26)),
}
TEXT, QUESTION, RETENTION = 60, 40, 0.1


def counted(step) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def models():
    return build_pair(MODEL_SHAPES["tiny"], "cpu", torch.float32)


def test_a_step_of_the_frozen_language_model_is_what_pytorch_counts(models):
    model, length = models["stock"].train(), 40
    text = model.config.text_config
    forward = stage_costs(models["ours"].config, (1, 6, 5), length - 30, 5, 1.0)["stock"]["prefill"]
    model.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    embeds = torch.randn(1, length, text.hidden_size, requires_grad=True)
    positions = torch.arange(length).expand(3, 1, -1)

    def step():
        model(inputs_embeds=embeds, position_ids=positions, logits_to_keep=1, use_cache=False).logits.sum().backward()

    # PyTorch counts causal attention as if it were full.
    causal = 4 * text.num_hidden_layers * 2 * text.hidden_size * length**2
    assert counted(step) == pytest.approx(language_model_step(text, forward, length) + causal, rel=0.01)


def test_a_step_of_the_selector_costs_three_times_its_forward_pass(models):
    ours, shape = models["ours"], MODEL_SHAPES["tiny"]
    selector, width = ours.model.qtsplus.train(), ours.config.text_config.hidden_size
    selector.config.gate, selector.config.reduction = "detached", "mean"
    visual, query = [torch.randn(shape.visual_tokens, width)], [torch.randn(5, width)]
    place = [torch.zeros(3, shape.visual_tokens, dtype=torch.long)]

    def step():
        kept, qtsplus = selector(visual, query, place, retention=0.11)
        (kept[0].sum() + qtsplus.log_relevance[0].square().sum()).backward()

    costs = stage_costs(ours.config, shape.grid, 10, 5, 0.11)["ours"]
    assert counted(step) == pytest.approx(3 * (costs["relevance"].flops + costs["re-encode"].flops), rel=0.02)


def of_recipe(name, grid):
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", ["training.use_cpu=true"])
    config = load_config(recipe.model.variant, None, recipe.model.selector)
    return training_costs(config, grid, TEXT, QUESTION, RETENTION)


@pytest.fixture(scope="module")
def both_stages():
    return {name: (of_recipe(f"{name}-relevance", grid), of_recipe(name, grid)) for name, (_, grid) in CLIPS.items()}


def test_the_page_carries_the_table(both_stages):
    assert training_table(both_stages) in (ROOT / "docs" / "training.md").read_text()


def test_what_the_table_rests_on(both_stages):
    first, second = both_stages["qtsplus-3b"]
    assert first.resting == 129_557_249 * TRAINED_BYTES + (3_884_180_225 - 129_557_249) * 2
    assert (first.kept, second.kept) == (1165, 256)  # a tenth, and the paper's cap
    assert first.vision == second.vision and first.teacher == second.teacher
    assert first.features == 11_648 * 2048 * 2


@pytest.mark.parametrize("name", CLIPS)
def test_clips_are_as_large_as_the_recipes_allow(name):
    shape, grid = CLIPS[name]
    recipe = load_recipe(ROOT / "recipes" / f"{name}-relevance.yaml", ["training.use_cpu=true"])
    settings = recipe.data.processor_kwargs
    processor = make_processor(MODEL_SHAPES[shape])
    variant = json.loads((hub_configs() / name / "processor_config.json").read_text())["video_processor"]
    size = settings.get("size", variant.get("size")) if processor.native_resolution else None
    options = {} if size is None else {"size": size}
    time, height, width = processor.grid_of(settings["max_frames"], 720, 1280, **options)[0].tolist()
    merge = processor.video_processor.merge_size if processor.native_resolution else 1
    assert (time, height // merge, width // merge) == grid
