"""The published variants, counted on the meta device."""

import json

import pytest
import torch

from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.hub.files import hub_configs, variants


def on_meta(name):
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / name)
    with torch.device("meta"):
        return Qwen2_5_VLQTSplusForConditionalGeneration(config)


def count(module, trainable=False):
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable)


def test_the_fine_tuned_variant_trains_the_published_number():
    """Vision frozen, language model and selector trained; the embeddings are tied, so the head adds nothing."""
    model = on_meta("qtsplus-3b-ft")
    published = count(model.model.qtsplus) + count(model.model.language_model)
    assert published == 3_215_495_937
    everything = count(model)
    assert everything - count(model.model.visual) == published
    assert round(100 * published / everything, 2) == 82.78


def test_part_of_the_selector_never_has_a_gradient():
    """The published size counts the last scoring layer's values, output and feed-forward; they are frozen here."""
    selector = on_meta("qtsplus-3b").model.qtsplus
    everything = count(selector)
    frozen = everything - count(selector, trainable=True)
    assert round(100 * frozen / everything, 1) == 29.6


def test_a_new_selector_has_what_was_measured_best():
    selector = Qwen2_5_VLQTSplusConfig().qtsplus_config
    assert (selector.gate, selector.reduction, selector.query_states) == ("soft", "mean", "layer")
    assert (selector.budget, selector.null_token) == ("loss", True)


def test_a_field_of_a_saved_selector_may_be_changed(tmp_path):
    Qwen2_5_VLQTSplusConfig(qtsplus_config={"reduction": "max"}).save_pretrained(tmp_path)
    changed = Qwen2_5_VLQTSplusConfig.from_pretrained(tmp_path, qtsplus_config={"n_max": 7}).qtsplus_config
    assert (changed.n_max, changed.reduction) == (7, "max")


@pytest.mark.parametrize("name", variants())
def test_every_variant_says_what_its_selector_is(name):
    content = json.loads((hub_configs() / name / "config.json").read_text())["qtsplus_config"]
    assert {"gate", "reduction", "query_states"} <= content.keys()
