"""What cannot be loaded ends in one sentence that says what was given and what to do."""

import json
import pickle
import shutil

import pytest
import torch
from typer.testing import CliRunner

from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration, Qwen2_5_VLQTSplusProcessor
from qtsplus.asking import session
from qtsplus.cli import app
from qtsplus.hub import loading
from qtsplus.training.lora import add_lora, lora_config


@pytest.fixture
def folder(tiny_published, tmp_path):
    return shutil.copytree(tiny_published, tmp_path / "model")


def edit_config(folder, change):
    """Changes the content of a model's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def ask_on_command_line(video, model, *options):
    words = ["ask", video, "What?", "--model", model, *options]
    line = [str(word) for word in words]
    return CliRunner().invoke(app, line)


@pytest.mark.parametrize("name", ["/nonexistent", "./nowhere", "../a/b", "a/b/c", "nope", "qtsplus-3b"])
def test_a_folder_that_is_not_there(name):
    """Without asking the Hub for a repository of that name."""
    with pytest.raises(ValueError, match=f"There is no folder '{name}'; expected one, or a Hub id"):
        loading.load(name)


def test_a_stock_model(folder):

    def as_stock(config):
        del config["qtsplus_config"]
        del config["auto_map"]
        config["model_type"] = "qwen2_5_vl"

    edit_config(folder, as_stock)
    with pytest.raises(ValueError, match=f"is no QTSplus model.*'qwen2_5_vl'.*`qtsplus convert {folder} --out FOLDER`"):
        loading.load(folder)


@pytest.mark.parametrize("gone", [["tokenizer.json", "tokenizer_config.json"], ["processor_config.json"]])
def test_a_folder_without_its_processor(folder, gone):
    for name in gone:
        (folder / name).unlink()
    with pytest.raises(ValueError, match="The processor of .* cannot be used|has a tokenizer without words"):
        loading.load(folder)


class Bomb:
    def __reduce__(self):
        return print, ("executed",)


def with_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Bomb()}))


def with_n_max(folder):
    edit_config(folder, lambda config: config["qtsplus_config"].update(n_max="x"))


def with_gptq(folder):
    quantization = {"quant_method": "gptq", "bits": 4}
    edit_config(folder, lambda config: config.update(quantization_config=quantization))


BROKEN = {
    "gptq": (with_gptq, ""),
    "n_max": (with_n_max, "QTSplusConfig got n_max='x'; expected a whole number"),
    "pickle": (with_a_pickle, "UnpicklingError: Weights only load failed"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_one_line(folder, tiny_mp4, kind, capfd):
    spoil, words = BROKEN[kind]
    spoil(folder)
    result = ask_on_command_line(tiny_mp4, folder)
    assert result.exit_code == 2, result.stderr
    error = result.stderr.splitlines()[-1]
    assert error.startswith("qtsplus: ")
    assert str(folder) in error
    assert f"cannot be used: {words}" in error
    printed = capfd.readouterr().out + result.stdout
    assert "executed" not in printed


@pytest.mark.parametrize("kernel", ["org/kernel", "paged|org/kernel@main:f", {"text_config": "org/kernel"}], ids=str)
def test_a_configuration_fetches_no_kernel(folder, kernel):
    """Else Transformers runs code of the repository that it names."""
    edit_config(folder, lambda config: config.update(_attn_implementation=kernel))
    with pytest.raises(ValueError, match=r"names the kernel .*org/kernel.*, whose code does not run here"):
        loading.load(folder)


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_an_adapter_as_model_is_refused_by_what_it_is(folder, tmp_path, tiny_mp4, options):
    """As `save_pretrained` of PEFT writes it: without a config.json."""
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder)
    adapted = add_lora(model, lora_config(rank=2))
    adapter = tmp_path / "adapter"
    adapted.save_pretrained(adapter)
    assert not (adapter / "config.json").exists()
    result = ask_on_command_line(tiny_mp4, adapter, *options)
    assert result.exit_code == 2
    assert f"qtsplus: {adapter} holds a PEFT adapter; merge it" in result.stderr


def test_a_repository_that_the_hub_does_not_give(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="There is no folder 'org/nothing', and the Hub did not give it: "):
        loading.load("org/nothing")


@pytest.mark.parametrize("size", [0, -4, 1.5, "x", None])
def test_a_model_of_no_width(folder, size):
    edit_config(folder, lambda config: config["text_config"].update(hidden_size=size))
    with pytest.raises(ValueError, match="cannot be used"):
        loading.load(folder, "cpu")


def test_a_revision_of_a_folder(folder):
    with pytest.raises(ValueError, match="is a folder, and revision='main' is about a repository"):
        loading.load(folder, revision="main")


def test_a_revision_goes_to_the_model_and_its_processor(tiny_published, monkeypatch):
    config = loading.load_config(tiny_published)
    asked = []

    def stored(name, revision):
        asked.append(revision)
        return config.to_dict()

    def load_config(name, revision):
        asked.append(revision)
        return config

    def loading_from_the_folder(kind):
        load = kind.from_pretrained

        def from_pretrained(*names, revision, **options):
            asked.append(revision)
            return load(tiny_published, **options)

        return from_pretrained

    for kind in (Qwen2_5_VLQTSplusForConditionalGeneration, Qwen2_5_VLQTSplusProcessor):
        monkeypatch.setattr(kind, "from_pretrained", loading_from_the_folder(kind))
    monkeypatch.setattr(loading, "stored_config", stored)
    monkeypatch.setattr(loading, "load_config", load_config)
    loading.load("lab/tiny", revision="v1.0")
    assert asked == ["v1.0"] * 4


# What a model gives is handed on --------------------------------------------------------------------------------------


def test_a_question_longer_than_the_models_positions(loaded, tiny_mp4):
    with pytest.raises(ValueError, match=r"The question has \d+ tokens; expected fewer than the model's 32768"):
        session.ask(*loaded, tiny_mp4, "what " * 100_000)


BAD_RETENTIONS = ["0.1", True, torch.tensor(0.1), [0.1, 0.2], float("nan"), 0]


@pytest.mark.parametrize("retention", BAD_RETENTIONS, ids=repr)
def test_a_retention_that_is_no_fraction(loaded, tiny_mp4, retention):
    with pytest.raises(ValueError, match="retention"):
        session.ask(*loaded, tiny_mp4, "What moves?", retention=retention)
