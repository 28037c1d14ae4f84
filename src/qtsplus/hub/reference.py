"""Checkpoints of the reference implementation (github Siyou-Li/QTSplus): their configuration and names in ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLVisionConfig

from ..configuration_qtsplus import Qwen2_5_VLQTSplusConfig
from .checkpoint import StoredTensor
from .files import hub_configs
from .folder import read_json, reading

_TOWER = "model.vision_tower."
MODEL_TYPE = "qts_plus_qwen2_5_vl_causal_lm"

# The vision towers that a checkpoint without its own configuration may have, by the variant that carries it.
_KNOWN_VISION = {"Qwen2.5-VL-3B": "qtsplus-3b", "Qwen2.5-VL-7B": "qtsplus-7b"}

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
    Our configuration for a reference checkpoint: its gate, its sequential positions and its re-encoder without time.

    Args:
        config: the checkpoint's config.json, a flat text configuration with `qts_plus_*` fields.
        vision_config: the vision tower's configuration, which such a checkpoint does not carry.

    Raises:
        ValueError: not the configuration of a reference checkpoint.
    """
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"model_type={config.get('model_type')!r}: expected a reference QTSplus checkpoint on Qwen2.5-VL, "
            f"{MODEL_TYPE!r}."
        )
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


def find_vision_config(
    folder: Path, weights: Mapping[str, StoredTensor], given: Path | None
) -> tuple[dict[str, Any], str]:
    """
    The configuration of the vision tower of a reference checkpoint, and where it was taken from.

    Args:
        folder: the checkpoint's.
        weights: its tensors, by their own names.
        given: a vision configuration, a whole Qwen2.5-VL one, or a folder with either; comes first.

    Raises:
        ValueError: what was given is neither; or nothing was given, and the tower is not one of those that are known.
    """
    if given is not None:
        return _read_vision_config(given), f"{given}, as given"
    return _known_vision_config(folder, weights)


def _read_vision_config(path: Path) -> dict[str, Any]:
    content = read_json(path / "config.json" if path.is_dir() else path)
    vision = content.get("vision_config", content)
    if not isinstance(vision, dict) or not {"depth", "out_hidden_size"} <= vision.keys():
        raise ValueError(
            f"{path} is no configuration of a Qwen2.5-VL vision tower: expected one with depth, hidden_size, "
            "out_hidden_size, or a whole config.json with it as vision_config."
        )
    with reading(path):
        Qwen2_5_VLVisionConfig(**{key: value for key, value in vision.items() if key not in _NOT_VISION})
    return vision


def _known_vision_config(folder: Path, weights: Mapping[str, StoredTensor]) -> tuple[dict[str, Any], str]:
    """One of the known towers, if the checkpoint's depth and widths are exactly its."""
    shapes = {name: tensor.shape for name, tensor in weights.items() if name.startswith(_TOWER)}
    blocks = {name.split(".")[3] for name in shapes if name.startswith(f"{_TOWER}blocks.")}
    for name, variant in _KNOWN_VISION.items():
        vision = Qwen2_5_VLVisionConfig(**read_json(hub_configs() / variant / "config.json")["vision_config"])
        patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        expected = {
            f"{_TOWER}patch_embed.proj.weight": (vision.hidden_size, *patch),
            f"{_TOWER}blocks.0.mlp.gate_proj.weight": (vision.intermediate_size, vision.hidden_size),
            f"{_TOWER}merger.mlp.2.weight": (vision.out_hidden_size, vision.hidden_size * vision.spatial_merge_size**2),
        }
        if len(blocks) == vision.depth and expected.items() <= shapes.items():
            return vision.to_dict(), f"the known one of {name}, whose depth and widths are the checkpoint's"
    raise ValueError(
        f"{folder} carries no configuration of its vision tower, and its shapes are not those of "
        f"{' or '.join(_KNOWN_VISION)}: give one with --vision-config, such as vision/config.json."
    )
