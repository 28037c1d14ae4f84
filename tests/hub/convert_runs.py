"""Runs `qtsplus convert`, and reads and edits the folders of its tests."""

import json

from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.cli import app


def run(source, target, *arguments):
    command = ["convert", str(source), "--out", str(target)]
    command.extend(arguments)
    return CliRunner().invoke(app, command)


def assert_refused(result, *words):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def weights(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def read_json(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def write_json(content, folder, name="config.json"):
    (folder / name).write_text(json.dumps(content))


def edit_json(folder, name="config.json", **values):
    content = read_json(folder, name)
    content.update(values)
    write_json(content, folder, name)


def load_model(folder):
    return Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder, dtype="auto")


def selector_config(folder):
    return Qwen2_5_VLQTSplusConfig.from_pretrained(folder).qtsplus_config


def rewrite(folder, change):
    """Has `change` edit the dictionary of tensors of a folder's only file of weights."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
