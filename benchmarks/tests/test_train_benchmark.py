"""The training step's benchmark at toy size: what is trained, what is counted, and how it goes on."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.files import read_result
from benchmarks.speed import training_step
from benchmarks.speed.shapes import MODEL_SHAPES, SIDES, build

CALL = {"device": "cpu", "dtype": "float32", "attention": None, "frames": 4, "retention": 0.25, "repeats": 2}


@pytest.fixture
def here(monkeypatch):
    """Measures in this process; returns the sides that were measured."""
    measured = []

    def call(function, **arguments):
        measured.append(arguments["side"])
        return function(**arguments)

    monkeypatch.setattr(training_step, "in_own_process", call)
    return measured


@pytest.mark.parametrize(
    "shape", ["tiny", "internvl2.5-8b-tiny", "llava-video-7b-tiny", "qwen3-vl-8b-tiny", "qwen3.5-9b-tiny"]
)
def test_a_step_of_either_side(shape):
    stock, ours = (training_step.measure_step(side, shape, **CALL) for side in SIDES)
    for run in (stock, ours):
        assert len(run["seconds"]) == len(run["extra_mb"]) == CALL["repeats"] and min(run["seconds"]) > 0
    selector = build(MODEL_SHAPES[shape], "ours", "cpu", torch.float32).model.qtsplus
    selector.freeze_unused()
    trained = sum(parameter.numel() for parameter in selector.parameters() if parameter.requires_grad)
    assert ours["trained_parameters"] - stock["trained_parameters"] == trained
    assert ours["tokens"] < stock["tokens"]


@pytest.mark.parametrize("side", SIDES)
def test_all_but_the_vision_tower_is_updated(side):
    model = build(MODEL_SHAPES["tiny"], side, "cpu", torch.float32)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = {names[id(parameter)] for parameter in training_step._trained_parameters(model)}
    assert {name for name in names.values() if "visual" in name}.isdisjoint(trained)
    unused = {f"model.qtsplus.{name}" for name in getattr(model.model, "qtsplus", torch.nn.Module()).state_dict()}
    assert {name for name in names.values() if "visual" not in name} - trained <= unused
    assert any("embed_tokens" in name for name in trained)


def test_the_command(here, tmp_path):
    options = ["--shape", "tiny", "--dtype", "float32", "--frames", "4", "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["training-step", *options])
    assert result.exit_code == 0, result.output
    assert "train_step_speedup" in result.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"train-tiny.json", "summary.md"}
    document = read_result(tmp_path / "train-tiny.json")
    seconds = {side: document["repeats"][side]["seconds"][0] for side in SIDES}
    assert document["figures"]["train_step_speedup"] == seconds["stock"] / seconds["ours"]
    assert document["settings"]["frames"] == 4 and document["settings"]["gradient_checkpointing"]


@pytest.mark.parametrize("wrong", [["--frames", "0"], ["--retention", "0"], ["--shape", "huge"]])
def test_bad_input(wrong, tmp_path):
    result = CliRunner().invoke(app, ["training-step", "--shape", "tiny", *wrong, "--out", str(tmp_path)])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
