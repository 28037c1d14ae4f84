"""The published variants, counted on the meta device."""

import pytest
import torch

from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.hub.files import hub_configs, variants

SELECTOR = {"qtsplus-3b": 129_557_249, "qtsplus-3b-ft": 129_557_249, "qtsplus-7b": 397_380_353}


def on_meta(name):
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / name)
    with torch.device("meta"):
        return Qwen2_5_VLQTSplusForConditionalGeneration(config)


def count(module, trainable=False):
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable)


@pytest.mark.parametrize("name", SELECTOR)
def test_the_selector_has_the_published_size(name):
    assert count(on_meta(name).model.qtsplus) == SELECTOR[name]


def test_the_fine_tuned_variant_trains_the_published_number():
    """Vision frozen, language model and selector trained; the embeddings are tied, so the head adds nothing."""
    model = on_meta("qtsplus-3b-ft")
    published = count(model.model.qtsplus) + count(model.model.language_model)
    assert published == 3_215_495_937
    assert count(model) - count(model.model.visual) == published
    assert round(100 * published / count(model), 2) == 82.78


def test_part_of_the_selector_never_has_a_gradient():
    """The published size counts the last scoring layer's values, output and feed-forward; they are frozen here."""
    selector = on_meta("qtsplus-3b").model.qtsplus
    frozen = count(selector) - count(selector, trainable=True)
    assert round(100 * frozen / count(selector), 1) == 29.6


@pytest.mark.parametrize("name", [name for name in variants() if name.startswith("qtsplus-")])
def test_every_variant_is_complete(name):
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / name)
    assert set(config.auto_map) == {
        "AutoConfig",
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoModelForImageTextToText",
        "AutoModelForMultimodalLM",
    }
    assert config.architectures == ["Qwen2_5_VLQTSplusForConditionalGeneration"]
    assert (hub_configs() / name / "generation_config.json").exists()
