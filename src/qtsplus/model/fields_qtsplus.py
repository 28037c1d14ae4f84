"""The fields of a [`QTSplusConfig`]: the values that each may have, and fields of other versions."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import get_args

from transformers import PreTrainedConfig

QUERY_STATES = ("embeddings", "layer")
REDUCTIONS = ("max", "mean", "sum")
POSITION_IDS = ("original", "sequential")
CHOICES: dict[str, tuple[str, ...]] = {
    "budget": ("rho", "mass", "loss"),
    "query_states": QUERY_STATES,
    "reduction": REDUCTIONS,
    "gate": ("gumbel", "detached", "soft"),
    "position_ids": POSITION_IDS,
}
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
_ABOVE_0 = 1e-12
_LARGEST = 2**31 - 1
# The range of every numeric field. Its annotation says whether only whole numbers are allowed, and whether `None` is.
_RANGES: dict[str, tuple[float, float]] = {
    "rho_min": (_ABOVE_0, 1),
    "rho_max": (_ABOVE_0, 1),
    "n_max": (1, _LARGEST),
    "token_price": (_ABOVE_0, 10**9),
    "relevance_mass": (_ABOVE_0, 1),
    "budget_hidden_size": (1, _LARGEST),
    "tau_s": (_ABOVE_0, 10**9),
    "attention_layer": (0, _LARGEST),
    "attention_group": (1, _LARGEST),
    "attention_mass": (_ABOVE_0, 1),
    "scoring_layers": (1, _LARGEST),
    "reencode_layers": (0, _LARGEST),
    "dropout": (0, 0.999),
    "evidence_share": (_ABOVE_0, 1),
    "seen_threshold": (_ABOVE_0, 1),
    "seen_area": (_ABOVE_0, 1),
    "trained_seconds": (_ABOVE_0, 10**9),
    "lambda_t": (0, 10**9),
    "lambda_m": (0, 10**9),
    "lambda_s": (0, 10**9),
    "rho_prior": (0, 1),
    "target_n": (_ABOVE_0, _LARGEST),
}


def check_fields(config: PreTrainedConfig, kinds: Mapping) -> None:
    """
    Raises `ValueError` for a value that is not of its field's kind, or out of its range.

    Args:
        kinds: the annotations of the fields, by their names.
    """
    for name, kind in kinds.items():
        value = getattr(config, name)
        if name in CHOICES:
            holds = value in CHOICES[name]
            expected = f"one of {CHOICES[name]}"
        elif name in _RANGES:
            is_absent = value is None and type(None) in get_args(kind)
            is_whole = kind in (int, int | None)
            least, most = _RANGES[name]
            holds = is_absent or (_is_number(value, is_whole) and least <= value <= most)
            noun = "a whole number" if is_whole else "a number"
            expected = f"{noun} from {least:,} to {most:,}"
        elif name == "selection":
            holds = isinstance(value, str) and (value in SELECTIONS or ":" in value)
            expected = f"one of {SELECTIONS}, or the 'module:function' of another method"
        elif name == "attention_heads":
            holds = value is None or (are_ids(value) and 0 < len(set(value)) == len(value))
            expected = "different whole numbers from 0 on, at least one"
        else:
            holds = isinstance(value, bool)
            expected = "true or false"
        require(config, holds, [name], expected)


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


def _is_number(value, is_whole: bool) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int if is_whole else (int, float))


def are_ids(value) -> bool:
    """Whether a value is a list of whole numbers from 0 on, such as token ids or the indices of heads."""
    if not isinstance(value, (list, tuple)):
        return False
    return all(_is_number(number, is_whole=True) and number >= 0 for number in value)


def unknown_fields(names: Iterable[str], kinds: Mapping) -> list[str]:
    """The `names`, sorted, that neither [`QTSplusConfig`] nor every configuration of Transformers has as a field."""
    unknown = []
    for name in sorted(names):
        is_inherited = hasattr(PreTrainedConfig, name) or hasattr(PreTrainedConfig, f"_{name}")
        is_internal = name.startswith("_") or name == "auto_map"
        if name not in kinds and not is_inherited and not is_internal:
            unknown.append(name)
    return unknown


def check_names(names: Iterable[str], kinds: Mapping) -> None:
    """Raises `ValueError` for a field that no [`QTSplusConfig`] has."""
    for name in unknown_fields(names, kinds):
        nearest = get_close_matches(name, kinds, n=2, cutoff=0)
        raise ValueError(f"QTSplusConfig has no field {name!r}; the nearest are {' and '.join(nearest)}.")
