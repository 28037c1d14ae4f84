"""The recipes of qtsplus-tiny: the laboratory's trainer runs them, and the library knows none of its losses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.teaching.trainer import TinyWorldTrainer
from qtsplus.hub.files import hub_configs
from qtsplus.training.models import load_model
from qtsplus.training.recipe import dry_run, load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "benchmarks" / "recipes"
NAMES = sorted(path.name for path in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_dry_run(name, tmp_path, monkeypatch):
    """What starts from another recipe's result is counted from the bundled configuration of its model."""
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(RECIPES / name, trainer_class=TinyWorldTrainer)
    assert isinstance(recipe.training, TinyWorldTrainer.arguments_class)
    if recipe.model.variant is None:
        with pytest.raises(ValueError, match="There is no folder runs/"):
            dry_run(recipe)
        overrides = ["model.weights=null", "model.variant=qtsplus-tiny"]
        recipe = load_recipe(RECIPES / name, overrides, TinyWorldTrainer)
    assert "trainable parameters" in dry_run(recipe)


def test_the_library_knows_none_of_its_losses():
    with pytest.raises(ValueError, match="'training' has no field muon_scale, naming_weight"):
        load_recipe(RECIPES / "qtsplus-tiny-vision.yaml")


def test_the_card_of_qtsplus_tiny_names_them():
    card = json.loads((hub_configs() / "qtsplus-tiny" / "card.json").read_text())
    assert "benchmarks/recipes/qtsplus-tiny.yaml" in card["recipe"]


def test_the_recipe_of_the_vision_tower_turns_rows_and_columns_further():
    args = load_recipe(RECIPES / "qtsplus-tiny-vision.yaml", trainer_class=TinyWorldTrainer).model
    plain, changed = (
        load_model(args.variant, None, {}, language_model=fields) for fields in (None, args.language_model)
    )
    ours, stock = (model.model.language_model.rotary_emb.inv_freq for model in (changed, plain))
    expected = stock.clone()
    expected[[8, 9, 12, 13]] = expected.new_tensor([0.5, 0.25, 0.5, 0.25])
    assert ours.tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    assert changed.config.qtsplus_config.to_dict() == plain.config.qtsplus_config.to_dict()


@pytest.mark.parametrize(
    ("name", "before"), [("", "-base"), ("-base", "-short"), ("-short", "-stills"), ("-stills", "-vision")]
)
def test_the_recipe_that_makes_missing_weights_is_named(name, before, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", str(RECIPES / f"qtsplus-tiny{name}.yaml")])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"There is no folder runs/qtsplus-tiny{before}" in line and f"qtsplus-tiny{before}.yaml first" in line
