"""The published variants' configurations."""

from pathlib import Path

import pytest
from transformers import GenerationConfig, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.common.folders import read_json
from qtsplus.hub.card import card_data
from qtsplus.hub.checkpoint import on_meta
from qtsplus.hub.files import hub_configs, variants
from qtsplus.model.generation_qtsplus import auto_map
from qtsplus.training.recipe import load_stages

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# Those on other backbones: tests/backbones/test_backbone_variants.py.
ON_QWEN2_5_VL = [name for name in variants() if name.startswith("qtsplus-")]


def load(variant):
    return Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / variant)


def test_the_tiny_configuration_fits_its_tokenizer(tiny_processor):
    config, tokenizer = load("qtsplus-tiny"), tiny_processor.tokenizer
    token_id = tokenizer.convert_tokens_to_ids
    assert config.text_config.vocab_size == len(tokenizer)
    assert config.video_token_id == token_id("<|video_pad|>")
    assert config.image_token_id == token_id("<|image_pad|>")
    assert config.vision_start_token_id == token_id("<|vision_start|>")
    assert config.vision_end_token_id == token_id("<|vision_end|>")
    assert config.turn_end_token_id == config.text_config.eos_token_id == token_id("<|im_end|>")
    assert config.text_config.pad_token_id == config.text_config.bos_token_id == tokenizer.pad_token_id
    for name, value in tiny_processor.query_token_ids.items():
        assert getattr(config, name) == value, name
    generation_config = GenerationConfig.from_pretrained(hub_configs() / "qtsplus-tiny")
    assert generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert generation_config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("variant", "hidden_size", "tied", "lambdas"),
    [
        ("qtsplus-3b", 2048, True, (0.1, 0.17, 0.05)),
        ("qtsplus-3b-ft", 2048, True, (0.2, 0.3, 0.05)),
        ("qtsplus-7b", 3584, False, (0.1, 0.17, 0.05)),
    ],
)
def test_published_sizes_and_the_papers_hyperparameters(variant, hidden_size, tied, lambdas):
    config = load(variant)
    selector = config.qtsplus_config
    assert config.text_config.hidden_size == config.vision_config.out_hidden_size == hidden_size
    assert config.tie_word_embeddings is tied
    head_dim = hidden_size // config.text_config.num_attention_heads
    assert 2 * sum(config.text_config.rope_parameters["mrope_section"]) == head_dim
    assert (selector.lambda_t, selector.lambda_m, selector.lambda_s) == lambdas
    assert (selector.tau_s, selector.rho_min, selector.rho_max, selector.n_max) == (0.5, 0.05, 0.5, 25600)


@pytest.mark.parametrize("variant", ON_QWEN2_5_VL)
def test_every_variant_builds_and_brings_all_that_its_repository_needs(variant):
    folder = hub_configs() / variant
    model = on_meta(load(variant))
    assert model.config.auto_map == auto_map(Qwen2_5_VLQTSplusForConditionalGeneration)
    assert read_json(folder / "processor_config.json")["auto_map"] == {
        "AutoProcessor": "processing_qtsplus.Qwen2_5_VLQTSplusProcessor"
    }
    generation = GenerationConfig.from_pretrained(folder)
    assert model.config.text_config.eos_token_id in generation.eos_token_id
    vision = model.config.vision_config
    for processor in (Qwen2VLImageProcessor.from_pretrained(folder), Qwen2VLVideoProcessor.from_pretrained(folder)):
        sizes = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
        assert sizes == (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)


@pytest.mark.parametrize("variant", ON_QWEN2_5_VL)
def test_every_variant_says_what_its_card_needs_and_which_recipe_makes_it(variant):
    card = card_data(variant)
    assert {"license", "weights", "training_data", "recipe"} <= card.keys()
    if variant != "qtsplus-tiny":
        assert card["base_model"].startswith("Qwen/Qwen2.5-VL-") and card["base_model_relation"] == "finetune"
        recipe, _, setting = card["recipe"].partition(" --set ")
        settings = ["training.use_cpu=true", "training.relevance_heads=[[0, 0]]", *([setting] if setting else [])]
        first = load_stages(RECIPES.parent / recipe, settings)[0]
        assert first.model.variant == variant and first.model.weights == card["base_model"]
