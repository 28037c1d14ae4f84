"""The published variants, counted on the meta device."""

import json

import pytest
import torch

from qtsplus import QTSplusConfig, Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
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
    assert count(model) - count(model.model.visual) == published
    assert round(100 * published / count(model), 2) == 82.78


def test_part_of_the_selector_never_has_a_gradient():
    """The published size counts the last scoring layer's values, output and feed-forward; they are frozen here."""
    selector = on_meta("qtsplus-3b").model.qtsplus
    frozen = count(selector) - count(selector, trainable=True)
    assert round(100 * frozen / count(selector), 1) == 29.6


def test_a_new_selector_has_what_was_measured_best_and_an_older_folder_what_it_had(tmp_path):
    """Saved configurations are explicit; those that do not say are older than the fields."""

    def kind(config):
        names = ("gate", "reduction", "query_states", "budget", "null_token")
        return tuple(getattr(config.qtsplus_config, name) for name in names)

    new = Qwen2_5_VLQTSplusConfig(qtsplus_config={"n_max": 5})
    assert kind(new) == kind(Qwen2_5_VLQTSplusConfig()) == ("soft", "mean", "layer", "loss", True)
    new.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["qtsplus_config"]["reduction"] == "mean"
    assert content["qtsplus_config"]["query_states"] == "layer"
    for name in ("reduction", "query_states", "budget", "null_token"):
        del content["qtsplus_config"][name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert kind(Qwen2_5_VLQTSplusConfig.from_pretrained(tmp_path)) == ("soft", "max", "embeddings", "rho", False)
    assert QTSplusConfig.from_pretrained(tmp_path).reduction == "max"
    changed = Qwen2_5_VLQTSplusConfig.from_pretrained(tmp_path, qtsplus_config={"n_max": 7}).qtsplus_config
    assert (changed.n_max, changed.reduction) == (7, "max")
    del content["qtsplus_config"]  # a stock configuration gets a new selector
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert kind(Qwen2_5_VLQTSplusConfig.from_pretrained(tmp_path)) == kind(new)


@pytest.mark.parametrize("name", variants())
def test_every_variant_says_what_its_selector_is(name):
    content = json.loads((hub_configs() / name / "config.json").read_text())["qtsplus_config"]
    assert {"gate", "reduction", "query_states"} <= content.keys()
