"""What a recipe leaves to compare: the variants that differ from it, and whether it teaches a budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtsplus.common.validation import parse_yaml
from qtsplus.training.models import make_config
from qtsplus.training.recipe import Recipe, load_stages

from ..teaching.trainer import TinyWorldTrainer
from . import policies
from .policies import DEFAULT

_SELECTOR = ("gate", "reduction", "scoring_layers", "query_states", "reencode_layers")


@dataclass(frozen=True)
class Plan:
    """
    Args:
        variants: by name what each changes of the recipe, [`DEFAULT`] first.
        own_budget: whether the recipe teaches a model how many tokens to ask for.
        adapted: whether it changes how kept tokens are read.
        selector: what the variants are about, as the recipe has it.
    """

    variants: dict[str, tuple[str, ...]]
    own_budget: bool
    adapted: bool
    selector: dict[str, Any]


def make_plan(recipe: Path, overrides: Sequence[str], base: Path, wanted: Sequence[str] = ()) -> Plan:
    """
    Args:
        recipe, overrides: as for [`load_stages`].
        base: where it starts from.
        wanted: names of variants; all if empty. [`DEFAULT`] is always among them.

    Raises:
        ValueError: an unknown variant, or a recipe that trains the vision tower.
    """
    unknown = sorted(set(wanted) - set(policies.VARIANTS))
    if unknown:
        raise ValueError(f"There is no variant {unknown[0]!r}; expected one of {', '.join(policies.VARIANTS)}.")
    read = load_stages(recipe, overrides, TinyWorldTrainer)[0]
    if not read.training.freeze_vision_model:
        raise ValueError(f"{recipe} trains the vision tower: the benchmark encodes the videos once for all models.")
    selector = make_config(None, str(base), read.model.selector).qtsplus_config
    chosen = {
        name: changes
        for name, changes in policies.VARIANTS.items()
        if name == DEFAULT
        or (name in (wanted or policies.VARIANTS) and not all(_holds(change, read, selector) for change in changes))
    }
    training = read.training
    return Plan(
        chosen,
        own_budget=_predicts_budget(read)
        and (selector.target_n is not None or any((selector.lambda_t, selector.lambda_m, selector.lambda_s))),
        adapted=not training.freeze_language_model or training.lora_rank > 0 or selector.reencode_layers > 0,
        selector={name: getattr(selector, name) for name in _SELECTOR if hasattr(selector, name)},
    )


def _predicts_budget(recipe: Recipe) -> bool:
    """Whether some of the steps leave the number of tokens to the budget head."""
    return recipe.training.retention_range is None or recipe.training.retention_share < 1


def _holds(change: str, recipe: Recipe, selector: Any) -> bool:
    """Whether a change would leave the recipe as it is."""
    key, _, value = change.partition("=")
    section, _, name = key.rpartition(".")
    source = {"model.selector": selector, "training": recipe.training}[section]
    return bool(getattr(source, name, None) == parse_yaml(value, repr(change)))


__all__ = ["Plan", "make_plan"]
