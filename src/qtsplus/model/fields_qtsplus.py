"""The fields of a [`QTSplusConfig`] and the values that each may have."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import get_args

from transformers import PreTrainedConfig

QUERY_STATES = ("embeddings", "layer")
REDUCTIONS = ("max", "mean", "sum")
POSITION_IDS = ("original", "sequential")
# The names of methods_qtsplus.METHODS. `selection` also takes `module:function` and `file.py:function`.
SELECTIONS = (
    "qtsplus",
    "uniform",
    "random",
    "all",
    "diversity",
    "coverage",
    "temporal_redundancy",
    "lm_attention",
)
CHOICES: dict[str, tuple[str, ...]] = {
    "budget": ("rho", "loss"),
    "query_states": QUERY_STATES,
    "reduction": REDUCTIONS,
    "gate": ("gumbel", "detached", "soft"),
    "position_ids": POSITION_IDS,
    "selection": SELECTIONS,
}
_ABOVE_0 = 1e-12
_LARGEST = 2**31 - 1
# The numeric fields by their range. The annotation of a field says whether only whole numbers are allowed.
_RANGES: dict[tuple[float, float], tuple[str, ...]] = {
    (_ABOVE_0, 1): ("rho_min", "rho_max", "attention_mass", "evidence_share", "seen_threshold", "seen_area"),
    (_ABOVE_0, _LARGEST): ("token_price", "tau_s", "trained_seconds", "target_n"),
    (1, _LARGEST): ("n_max", "budget_hidden_size", "attention_group", "scoring_layers"),
    (0, _LARGEST): ("attention_layer", "reencode_layers", "lambda_t", "lambda_m", "lambda_s"),
    (0, 1): ("rho_prior",),
    (0, 0.999): ("dropout",),
}


def check_fields(config: PreTrainedConfig, kinds: Mapping) -> None:
    """
    Raises `ValueError` for a value that is not of its field's kind, or out of its range.

    Args:
        kinds: the annotations of the fields, by their names.
    """
    for name in ("null_token", "reencode_rope"):
        holds = isinstance(getattr(config, name), bool)
        require(config, holds, [name], "true or false")
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        is_own_method = name == "selection" and isinstance(value, str) and ":" in value
        require(config, is_own_method or value in choices, [name], f"one of {choices}")
    for (least, most), names in _RANGES.items():
        for name in names:
            value = getattr(config, name)
            kind = kinds[name]
            if value is None and type(None) in get_args(kind):
                continue
            is_whole = kind in (int, int | None)
            types = int if is_whole else (int, float)
            is_number = isinstance(value, types) and not isinstance(value, bool)
            holds = is_number and least <= value <= most
            noun = "a whole number" if is_whole else "a number"
            require(config, holds, [name], f"{noun} from {least:,} to {most:,}")
    heads = config.attention_heads
    if heads is not None:
        are_different = are_ids(heads) and 0 < len(set(heads)) == len(heads)
        require(config, are_different, ["attention_heads"], "different whole numbers from 0 on, at least one")


def require(
    config: PreTrainedConfig,
    holds: bool,
    names: Iterable[str],
    expected: str,
) -> None:
    """Raises `ValueError` with the values of the fields `names` and what was `expected`, unless `holds`."""
    if not holds:
        given = ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
        raise ValueError(f"QTSplusConfig got {given}; expected {expected}.")


def are_ids(value) -> bool:
    """Whether a value is a list of whole numbers from 0 on, such as token ids or the indices of heads."""
    if not isinstance(value, (list, tuple)):
        return False
    return all(type(number) is int and number >= 0 for number in value)


def check_token_ids(config) -> None:
    """Raises `ValueError` for token ids, by which a question is found, that are none."""
    for name in ("user_turn_token_ids", "special_token_ids", "frame_text_token_ids"):
        ids = getattr(config, name, ())
        if not are_ids(ids):
            raise ValueError(f"{name}={ids!r}: expected a list of token ids, whole numbers from 0 on.")
    tags = config.tool_response_token_ids
    if tags and (len(tags) != 2 or not all(tags)):
        raise ValueError(f"tool_response_token_ids={tags!r}: expected the ids that begin a response and that end it.")


def check_names(names: Iterable[str], kinds: Mapping) -> None:
    """Raises `ValueError` for a field that neither [`QTSplusConfig`] nor every configuration of Transformers has."""
    for name in sorted(names):
        is_inherited = hasattr(PreTrainedConfig, name) or hasattr(PreTrainedConfig, f"_{name}")
        is_internal = name.startswith("_") or name == "auto_map"
        if name not in kinds and not is_inherited and not is_internal:
            nearest = get_close_matches(name, kinds, n=2, cutoff=0)
            raise ValueError(
                f"QTSplusConfig has no field {name!r}; the nearest are {' and '.join(nearest)}. If another version of "
                "qtsplus wrote it (`qtsplus_version` in config.json), install that version."
            )
