"""What is known of a variant, for its model card."""

from typing import Any

from ..backbones import backbone_of
from .files import hub_configs, variants
from .folder import read_json


def card_data(variant: str | None, *names: str) -> dict[str, Any]:
    """What is known of a variant of `hub_configs` (licence, base model, what its card tells), or only some `names`."""
    if variant is None or not (hub_configs() / variant / "card.json").exists():
        return {}
    data = read_json(hub_configs() / variant / "card.json")
    return {name: value for name, value in data.items() if not names or name in names}


def matching_variant(config: Any, preferred: str | None = None) -> str | None:
    """The variant whose backbone has this one's sizes, `preferred` before others; `None` if none has."""
    names = variants() if preferred is None else [preferred, *variants()]
    return next(
        (name for name in names if _sizes(read_json(hub_configs() / name / "config.json")) == _sizes(config)), None
    )


def _sizes(config: Any) -> list[Any]:
    if isinstance(config, dict):
        config = backbone_of(config["model_type"]).config(**config)
    text, vision = config.text_config, config.vision_config
    return [
        config.model_type,
        *(getattr(text, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")),
        *(text.num_attention_heads, text.num_key_value_heads, config.tie_word_embeddings),
        *(
            getattr(vision, name, None)
            for name in ("depth", "hidden_size", "intermediate_size", "out_hidden_size", "patch_size")
        ),
    ]
