"""The published variants' configurations."""

from pathlib import Path

import pytest
from transformers import GenerationConfig, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from qtsplus import Qwen2_5_VLQTSplusConfig
from qtsplus.common.folders import read_json
from qtsplus.hub.backbones import backbone_of
from qtsplus.hub.card import card_data
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


@pytest.mark.parametrize("variant", variants())
def test_a_variant_brings_all_that_its_repository_needs(variant):
    folder = hub_configs() / variant
    backbone = backbone_of(read_json(folder / "config.json")["model_type"])
    config = backbone.config.from_pretrained(folder)
    assert config.auto_map == auto_map(backbone.model)
    assert config.architectures == [backbone.model.__name__]
    settings = read_json(folder / "processor_config.json")
    name = backbone.processor.__name__
    module = backbone.processor.__module__.rpartition(".")[2]
    assert settings["processor_class"] == name
    assert settings["auto_map"] == {"AutoProcessor": f"{module}.{name}"}
    assert config.text_config.eos_token_id in GenerationConfig.from_pretrained(folder).eos_token_id
    assert {"license", "weights", "training_data", "recipe"} <= card_data(variant).keys()


@pytest.mark.parametrize("variant", ON_QWEN2_5_VL)
def test_the_processors_cut_what_the_vision_tower_takes(variant):
    vision = load(variant).vision_config
    for kind in (Qwen2VLImageProcessor, Qwen2VLVideoProcessor):
        processor = kind.from_pretrained(hub_configs() / variant)
        sizes = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
        assert sizes == (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)


@pytest.mark.parametrize("variant", [name for name in variants() if name != "qtsplus-tiny"])
def test_a_card_names_the_recipe_and_the_base(variant):
    card = card_data(variant)
    assert card["base_model_relation"] == "finetune"
    recipe, *setting = card["recipe"].split(" --set ")
    settings = ["training.use_cpu=true", "training.relevance_heads=[[0, 0]]", *setting]
    first = load_stages(RECIPES.parent / recipe, settings)[0]
    assert first.model.variant == variant
    if variant in ON_QWEN2_5_VL:
        assert first.model.weights == card["base_model"]
