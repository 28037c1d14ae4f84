"""The recipes of the tiny models: the laboratory's trainer runs them, and the library knows none of its losses."""

import json
from pathlib import Path

import pytest

from benchmarks.teaching.trainer import TinyWorldTrainer
from qtsplus.hub.files import hub_configs
from qtsplus.training.plan import make_plan
from qtsplus.training.recipe import load_stages

RECIPES = Path(__file__).resolve().parents[2] / "benchmarks" / "recipes"
NAMES = sorted(path.name for path in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_is_planned(name):
    """What starts from another's result is counted from the bundled configuration of its model."""
    overrides = ["model.weights=null", "model.variant=qtsplus-tiny"]
    for stage in load_stages(RECIPES / name, overrides, TinyWorldTrainer):
        assert isinstance(stage.training, TinyWorldTrainer.arguments_class)
        stage.model.weights = None
        assert "parameters are trained" in make_plan(stage).lines[0]


def test_the_library_knows_none_of_its_losses():
    with pytest.raises(ValueError, match="training.naming_weight is no field"):
        load_stages(RECIPES / "open-base.yaml")[0]


def test_the_card_of_qtsplus_tiny_names_them():
    card = json.loads((hub_configs() / "qtsplus-tiny" / "card.json").read_text())
    assert all(f"benchmarks/recipes/{name}.yaml" in card["recipe"] for name in ("open-base", "qtsplus-open"))
