"""`qtsplus bench attention` at toy size: what needs no training, beside a trained selector and the baselines."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.learned import policies, untrained
from benchmarks.world.tinyworld import build_dataset
from qtsplus.training.models import make_model


@pytest.fixture(scope="module")
def setting(tmp_path_factory, tiny_processor):
    folder = tmp_path_factory.mktemp("untrained")
    build_dataset(folder, "test", 2, seconds=(2,), max_objects=20, progress=False, crowd=True)
    make_model("qtsplus-tiny", None).save_pretrained(folder / "base")
    tiny_processor.save_pretrained(folder / "base")
    return folder


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(untrained, "TIMED", 2)
    kept = ("uniform", "fewer_frames")
    monkeypatch.setattr(policies, "BASELINES", {name: policies.BASELINES[name] for name in kept})


def run(folder, *more):
    options = [f"--{name}={folder / path}" for name, path in (("test", "test.jsonl"), ("out", "out"), ("work", "work"))]
    return CliRunner().invoke(app, ["attention", f"--base={folder / 'base'}", *options, *more])


def test_everything_that_needs_no_training_stands_beside(setting):
    result = run(setting, f"--trained={setting / 'base'}")
    assert result.exit_code == 0, result.output
    document = json.loads((setting / "out" / "lm-attention.json").read_text())
    pooled = {(row["policy"], row["retention"]): row for row in document["rows"] if row["seed"] is None}
    others = {f"base_{name}" for name in (policies.ATTENTION, *policies.BASELINES, *policies.WRONG_QUESTIONS)}
    assert {name for name, share in pooled if share == 0.1} == {"qtsplus", *policies.WRONG_QUESTIONS, *others}
    assert {("base_all", 1.0), ("base_lm_attention", None), ("base_lm_attention", 0.05)} < set(pooled)
    choosers = {row["model"] for row in document["question_driven"]}
    assert choosers == {"qtsplus", "base_lm_attention"}
    seconds = document["seconds"][0]
    assert set(seconds) >= {"qtsplus", "base_all", "base_lm_attention"} and min(seconds.values()) > 0
    text = (setting / "out" / "lm-attention.md").read_text()
    for words in ("| the language model's attention, nothing trained; base model |", "(layer 2, ", "needle tokens"):
        assert words in text
    again = run(setting, f"--trained={setting / 'base'}")
    assert again.exit_code == 0 and "asked" not in again.output  # all is there


def test_a_base_without_a_trained_selector_stands_alone(setting):
    result = run(setting, "--name=alone")
    assert result.exit_code == 0, result.output
    rows = json.loads((setting / "out" / "alone.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {"base"}
    result = run(setting, f"--base={setting / 'base'}", f"--trained={setting / 'base'}")
    assert result.exit_code == 2 and "1 trained models for 2 bases" in result.output
