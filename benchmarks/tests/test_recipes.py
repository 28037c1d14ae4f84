"""The recipes of the tiny models: the laboratory's trainer runs them, and the library knows none of its losses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.teaching.tiny import SETS
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
        assert "trainable parameters" in make_plan(stage).lines[0]


def test_the_library_knows_none_of_its_losses():
    with pytest.raises(ValueError, match="training.naming_weight is no field"):
        load_stages(RECIPES / "crowd-base.yaml")[0]


def test_the_card_of_qtsplus_tiny_names_them():
    card = json.loads((hub_configs() / "qtsplus-tiny" / "card.json").read_text())
    assert all(f"benchmarks/recipes/{name}.yaml" in card["recipe"] for name in ("open-base", "qtsplus-open"))


def test_the_stages_of_the_base_are_those_that_were_measured():
    vision, stills, short, long = load_stages(RECIPES / "crowd-base.yaml", (), TinyWorldTrainer)
    assert (vision.training.max_steps, vision.training.freeze_vision_model, vision.data.features) == (1200, False, None)
    assert vision.training.looking_weight == 0 and vision.training.retention_range is None
    for stage, bounds, epochs in ((stills, [0.35, 1.0], 1), (short, [0.1, 1.0], 2), (long, [0.05, 1.0], 4)):
        assert stage.training.freeze_vision_model and stage.data.features == "runs/features"
        assert (stage.training.retention_range, stage.training.num_train_epochs) == (bounds, epochs)
        assert (stage.training.naming_weight, stage.training.looking_weight) == (0.5, 0.5)
    selector = load_stages(RECIPES / "crowd.yaml", (), TinyWorldTrainer)[0]
    assert selector.model.weights == str(long.output_dir)
    files = [file for stage in (vision, stills, short, long, selector) for file in stage.data.train_files]
    assert {Path(file).parts[1] for file in files} == set(SETS)


def test_the_crowds_model_is_made_from_nothing_and_not_twice(tmp_path):
    settings = ("training.max_steps=1", "training.per_device_train_batch_size=1", "training.save_strategy=no")
    steps = [part for setting in settings for part in ("--set", setting)]
    command = ["tiny", "--work", str(tmp_path / "work"), "--seed", "3", "--share", "0.0001", *steps]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    folder = tmp_path / "work/runs/crowd"
    config = json.loads((folder / "config.json").read_text())["qtsplus_config"]
    assert (config["selection"], config["reduction"], config["query_states"]) == ("qtsplus", "sum", "layer")
    assert "Videos 1 of 9" in result.stderr and "vision, stills, short, long" in result.stderr
    assert str(folder) in "".join(result.stdout.split()) and "loss" not in result.stdout
    record = json.loads((tmp_path / "work/data/still/train.jsonl").read_text().splitlines()[0])
    assert record["seed"] == 300_000
    written = (folder / "model.safetensors").stat().st_mtime_ns
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and "crowd is finished" in again.stderr
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    other = CliRunner().invoke(app, [*command[:3], "--seed", "4", *command[5:]])
    assert other.exit_code == 2 and "first=300000, not 400000" in other.stderr


def test_an_empty_base_is_not_the_working_folder():
    for command in (["learned", "--test", "a"], ["attention", "--test", "a"], ["ablation", "a"]):
        result = CliRunner().invoke(app, [*command, "--base", ""])
        assert result.exit_code == 2 and "--base is empty" in result.output
