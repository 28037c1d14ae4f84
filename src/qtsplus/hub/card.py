"""The model card (README.md) of a Hub repository, and what is known of a variant for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData

from ..common.folders import read_json
from .files import hub_configs, variants
from .loading import load_config

ORIGIN = ("license", "license_name", "license_link", "base_model")
SECTIONS = ("weights", "training_data", "recipe", "results", "limits")
_TEXT_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
)
_VISION_SIZES = ("depth", "hidden_size", "intermediate_size", "out_hidden_size", "patch_size")


def model_card(model, repository: str, about: Mapping) -> str:
    """
    The text of a repository's README.md, with its YAML front matter, for a model on any device.

    Args:
        repository: the repository's id, such as `"org/QTSplus-3B"`, for the usage that is shown.
        about: what is known of the weights. The [`SECTIONS`] go into the text; everything else (`license`,
            `base_model`, ...) is front matter.
    """
    about = dict(about)
    sections = {section: about.pop(section, None) for section in SECTIONS}
    if "base_model" in about:
        about.setdefault("base_model_relation", "finetune")
    front_matter = ModelCardData(
        library_name="transformers",
        pipeline_tag="video-text-to-text",
        tags=["custom_code", "qtsplus", "video", "token-selection"],
        **about,
    )
    text = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    return jinja2.Template(text, trim_blocks=True, keep_trailing_newline=True).render(
        front_matter=front_matter.to_yaml().strip(),
        name=repository.rpartition("/")[2],
        backbone=model.backbone_name,
        repository=repository,
        base_model=about.get("base_model"),
        parameters=model.num_parameters(),
        selector_parameters=sum(parameter.numel() for parameter in model.model.qtsplus.parameters()),
        layers=model.config.text_config.num_hidden_layers,
        width=model.config.text_config.hidden_size,
        **sections,
        **model.config.qtsplus_config.to_dict(),
    )


def card_data(variant: str | None, *names: str) -> dict:
    """What is known of a variant of `hub_configs` (licence, base model, what its card tells), or only some `names`."""
    if variant is None:
        return {}
    data = read_json(hub_configs() / variant / "card.json")
    return {name: data[name] for name in names or data if name in data}


def matching_variant(config) -> str | None:
    """The variant whose backbone has this one's sizes; `None` if none has."""
    for name in variants():
        if _sizes(load_config(hub_configs() / name)) == _sizes(config):
            return name
    return None


def _sizes(config) -> list[Any]:
    sizes = [config.model_type, config.tie_word_embeddings]
    sizes += [getattr(config.text_config, name) for name in _TEXT_SIZES]
    sizes += [getattr(config.vision_config, name, None) for name in _VISION_SIZES]
    return sizes
