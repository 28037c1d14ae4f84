"""Checkpoints of the reference implementation (github Siyou-Li/QTSplus): their configuration and names in ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLVisionConfig

from ..configuration_qtsplus import Qwen2_5_VLQTSplusConfig
from .files import hub_configs
from .folder import read_json, reading

MODEL_TYPE = "qts_plus_qwen2_5_vl_causal_lm"

# A checkpoint carries no configuration of its vision tower: by the language model's width, the variant that has it.
_KNOWN_VISION = {2048: "qtsplus-3b", 3584: "qtsplus-7b"}

# By our name theirs, and what their code takes where a configuration does not say.
_SELECTOR_FIELDS = {
    "rho_min": ("qts_plus_rho_min", 0.05),
    "rho_max": ("qts_plus_rho_max", 0.5),
    "n_max": ("qts_plus_nmax", 2560),
    "tau_s": ("qts_plus_tau_s", 0.1),
    "dropout": ("qts_plus_block_dropout", 0.0),
    "scoring_layers": ("qts_plus_scoring_layers", 1),
    "reencode_layers": ("qts_plus_reencode_layers", 1),
    "lambda_t": ("lambda_t", 1.0),
    "lambda_m": ("lambda_m", 1.7),
    "lambda_s": ("lambda_s", 0.05),
}


def convert_reference_config(config: Mapping[str, Any], vision_config: Mapping[str, Any]) -> Qwen2_5_VLQTSplusConfig:
    """
    Our configuration for a reference checkpoint, with its gate, its sequential positions and its re-encoder without
    time, of its config.json (a flat text configuration with `qts_plus_*` fields) and its vision tower's configuration.
    """
    # Their qts_plus_n_heads is never read: the selector has the language model's heads, as ours.
    selector = {name: config.get(source, default) for name, (source, default) in _SELECTOR_FIELDS.items()}
    for name in ("scoring_layers", "reencode_layers"):
        selector[name] = max(selector[name], 1)
    if not config.get("qts_plus_reencode", True):
        selector["reencode_layers"] = 0
    selector |= {"gate": "gumbel", "query_states": "embeddings", "reduction": "max", "budget": "rho"}
    selector |= {"null_token": False, "position_ids": "sequential", "reencode_rope": False}
    known = {*Qwen2_5_VLTextConfig().to_dict(), "rope_scaling", "rope_theta", "head_dim"}
    text = {key: value for key, value in config.items() if key in known and key not in _NOT_TEXT}
    token_ids = {key: config[key] for key in _TOKEN_IDS if key in config}
    return Qwen2_5_VLQTSplusConfig(
        text_config=text,
        vision_config={key: value for key, value in vision_config.items() if key not in _NOT_VISION},
        qtsplus_config=selector,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **token_ids,
    )


_TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_NOT_TEXT = {"model_type", "architectures", "auto_map", "transformers_version", "_name_or_path"}
_NOT_VISION = _NOT_TEXT | {"dtype", "torch_dtype"}


def find_vision_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """
    The configuration of the vision tower of a reference checkpoint, by its folder's `vision_config.json` (such a
    configuration, or a whole Qwen2.5-VL one), or else by its language model, in its config.json; a `ValueError` where
    that is none of those that are known. Whether it fits its weights is checked with them.
    """
    path = folder / "vision_config.json"
    if not path.exists():
        variant = _KNOWN_VISION.get(config.get("hidden_size", 0))
        if variant is None:
            raise ValueError(
                f"The checkpoint carries no configuration of its vision tower, and its width is none of "
                f"{', '.join(map(str, _KNOWN_VISION))}: put one there, as {path}."
            )
        path = hub_configs() / variant / "config.json"
    content = read_json(path)
    with reading(path):
        vision = content.get("vision_config", content)
        Qwen2_5_VLVisionConfig(**{key: value for key, value in vision.items() if key not in _NOT_VISION})
    return vision
