"""Reads checkpoints of the reference implementation (github Siyou-Li/QTSplus) into ours."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from ..configuration_qtsplus import Qwen2_5_VLQTSplusConfig

_RENAMES = [
    (r"^model\.qts_plus\.selector\.", "model.qtsplus."),
    (r"(reencode_layers\.\d+)\.core\.", r"\1."),
    (r"\.ffn\.net\.", ".ffn."),
    (r"^model\.vision_tower\.", "model.visual."),
    (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
]

_SELECTOR_FIELDS = {
    "rho_min": "qts_plus_rho_min",
    "rho_max": "qts_plus_rho_max",
    "n_max": "qts_plus_nmax",
    "tau_s": "qts_plus_tau_s",
    "dropout": "qts_plus_block_dropout",
    "scoring_layers": "qts_plus_scoring_layers",
    "reencode_layers": "qts_plus_reencode_layers",
    "lambda_t": "lambda_t",
    "lambda_m": "lambda_m",
    "lambda_s": "lambda_s",
}


def rename_reference_key(key: str) -> str:
    """The name in our model of a parameter of a reference checkpoint."""
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


def convert_reference_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    A reference checkpoint's tensors under our names.

    The running mean of rho is absent there and starts empty; `lm_head.weight` is passed on where it is present.
    """
    converted = {rename_reference_key(key): tensor for key, tensor in weights.items()}
    converted["model.qtsplus.rho_history"] = torch.zeros(2, dtype=torch.int64)
    return converted


def convert_reference_config(config: Mapping[str, Any], vision_config: Mapping[str, Any]) -> Qwen2_5_VLQTSplusConfig:
    """
    Our configuration for a reference checkpoint: its gate, its sequential positions and its re-encoder without time.

    Args:
        config: the checkpoint's config.json, a flat text configuration with `qts_plus_*` fields.
        vision_config: the vision tower's configuration, which such a checkpoint does not carry.

    Raises:
        ValueError: not the configuration of a reference checkpoint.
    """
    if config.get("model_type") != "qts_plus_qwen2_5_vl_causal_lm":
        raise ValueError(
            f"model_type={config.get('model_type')!r}: expected a reference QTSplus checkpoint on Qwen2.5-VL, "
            "'qts_plus_qwen2_5_vl_causal_lm'."
        )
    selector = {name: config[source] for name, source in _SELECTOR_FIELDS.items() if source in config}
    if not config.get("qts_plus_reencode", True):
        selector["reencode_layers"] = 0
    selector.update(gate="gumbel", position_ids="sequential", reencode_rope=False)
    ours = {*_SELECTOR_FIELDS.values(), "model_type", "architectures", "auto_map", "transformers_version"}
    text = {key: value for key, value in config.items() if key not in ours and not key.startswith("qts_plus")}
    token_ids = {key: config[key] for key in ("image_token_id", "video_token_id") if key in config}
    return Qwen2_5_VLQTSplusConfig(
        text_config=text,
        vision_config={key: value for key, value in vision_config.items() if key != "model_type"},
        qtsplus_config=selector,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **token_ids,
    )


__all__ = ["convert_reference_config", "convert_reference_weights", "rename_reference_key"]
