"""From rendered videos to a trained model, by the commands that a user types."""

import json

import yaml
from typer.testing import CliRunner

from benchmarks.cli import app as laboratory
from qtsplus.cli import app


def test_data_and_train(tmp_path):
    data = ["tinyworld", "--out", str(tmp_path / "data"), "--size", "2", "--seconds", "8", "--max-objects", "2"]
    result = CliRunner().invoke(laboratory, data)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert {record["source"] for record in records} >= {"caption", "vqa"}

    recipe = {
        "model": {"variant": "qtsplus-tiny", "selector": {"budget": "rho"}},
        "data": {"train_files": [str(tmp_path / "data" / "train.jsonl")]},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    result = CliRunner().invoke(laboratory, ["train", str(tmp_path / "recipe.yaml")])
    assert result.exit_code == 0, result.output
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert {"loss_lm", "rho", "n", "kept_fraction", "threshold"} <= set(history[0])

    answer = CliRunner().invoke(
        app,
        [
            "ask",
            str(tmp_path / "data" / "train" / "000000.mp4"),
            "What is there?",
            "--model",
            str(tmp_path / "run"),
            "--json",
        ],
    )
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["visual_tokens"] == 288


def test_crowds_by_the_command(tmp_path):
    command = ["tinyworld", "--crowd", "--out", str(tmp_path), "--size", "2", "--seconds", "1"]
    result = CliRunner().invoke(laboratory, [*command, "--split", "test", "--max-objects", "6"])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert {(record["crowd"], record["max_objects"], record["seconds"]) for record in records} == {(True, 6, 1)}


def test_an_unknown_split_ends_in_one_line(tmp_path):
    result = CliRunner().invoke(laboratory, ["tinyworld", "--out", str(tmp_path), "--size", "1", "--split", "dev"])
    assert result.exit_code == 2
    assert "expected one of" in result.output
