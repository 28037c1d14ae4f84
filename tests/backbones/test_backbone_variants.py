"""The variants on other backbones than Qwen2.5-VL, counted on the meta device."""

from pathlib import Path

import pytest
import torch

from qtsplus.common.folders import read_json
from qtsplus.hub.backbones import backbone_of
from qtsplus.hub.card import matching_variant
from qtsplus.hub.checkpoint import on_meta
from qtsplus.hub.files import hub_configs, variants
from qtsplus.training.plan import make_plan
from qtsplus.training.recipe import load_stages

ROOT = Path(__file__).resolve().parents[2]
# The selector, and all that is not the selector: the size of the published model.
SIZES = {
    "internvl2.5-8b": (529_648_897, 8_075_365_376),
    "llava-video-7b": (397_380_353, 8_030_348_832),
    "qwen3-vl-8b": (529_648_897, 8_767_123_696),
    "qwen3.5-9b": (529_648_897, 9_409_813_744),
}
# Height and width of a frame's grid, and its placeholders in the prompt.
FRAMES = {
    **{"internvl2.5-8b": (16, 256), "llava-video-7b": (14, 14 * 15)},
    **{"qwen3-vl-8b": (32, 256), "qwen3.5-9b": (32, 256)},
}
VARIANT = pytest.mark.parametrize("variant", SIZES)


def load(variant):
    folder = hub_configs() / variant
    backbone = backbone_of(read_json(folder / "config.json")["model_type"])
    return backbone, on_meta(backbone.config.from_pretrained(folder))


def test_no_variant_is_forgotten():
    assert {name for name in variants() if not name.startswith("qtsplus-")} == set(SIZES)


@VARIANT
def test_published_sizes(variant):
    _, model = load(variant)
    selector = sum(parameter.numel() for parameter in model.model.qtsplus.parameters())
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert (selector, everything - selector) == SIZES[variant]
    assert 2 * sum(model.model.qtsplus.mrope_section) == model.model.qtsplus.head_dim
    assert matching_variant(model.config) == variant


@VARIANT
def test_a_prompt_fits_the_models_sizes(variant):
    """What the processor lays out per frame is what the model expects of its own grid."""
    _, model = load(variant)
    settings = read_json(hub_configs() / variant / "processor_config.json")
    side, placeholders = FRAMES[variant]
    assert settings.get("image_seq_length", placeholders) == placeholders
    spans = model.model.visual_spans(2, model.model.merged_grid(torch.tensor([[4, side, side]])))
    assert sum(span.length for span in spans) == 4 * placeholders
    for part in ("image_processor", "video_processor"):
        if "patch_size" in settings[part]:  # it cuts the patches itself
            vision = model.config.vision_config
            assert (settings[part]["patch_size"], settings[part]["merge_size"]) == (
                vision.patch_size,
                vision.spatial_merge_size,
            )
    assert settings.get("video_newline", "row") == getattr(model.config, "video_newline", "row")
    assert settings.get("video_placeholder_id", model.config.video_token_id) == model.config.video_token_id


@VARIANT
def test_the_recipe_trains_the_selector_alone(variant):
    overrides = ["training.use_cpu=true", f"model.variant={variant}"]
    (recipe,) = load_stages(ROOT / "recipes" / "paper.yaml", overrides)
    assert recipe.training.freeze_vision_model
    assert recipe.training.freeze_language_model
    total = sum(SIZES[variant])
    assert f" of {total:,} parameters are trained" in make_plan(recipe).lines[0]
