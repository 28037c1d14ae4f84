"""What cannot be loaded ends in one sentence that says what was given and what to do."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration, Qwen2_5_VLQTSplusProcessor
from qtsplus.asking import session
from qtsplus.cli import app
from qtsplus.hub import loading
from qtsplus.training.lora import add_lora, lora_config


@pytest.fixture
def folder(tiny_published, tmp_path):
    return shutil.copytree(tiny_published, tmp_path / "model")


def test_no_name():
    for name in ("", "  "):
        with pytest.raises(ValueError, match="name is empty; expected a folder or a Hub id"):
            loading.load(name)


@pytest.mark.parametrize("name", ["/nonexistent", "./nowhere", "../a/b", "a/b/c", "nope", "qtsplus-3b"])
def test_a_folder_that_is_not_there(name):
    """Without asking the Hub for a repository of that name."""
    with pytest.raises(ValueError, match=f"There is no folder '{name}'; expected one, or a Hub id"):
        loading.load(name)


def test_a_file(folder):
    with pytest.raises(ValueError, match=r"There is no folder '.*config\.json'"):
        loading.load(folder / "config.json")


def test_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json in"):
        loading.load(tmp_path)


def test_a_stock_model(tiny_published, folder):
    config = json.loads((folder / "config.json").read_text())
    for name in ("qtsplus_config", "auto_map"):
        config.pop(name)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2_5_vl"}))
    with pytest.raises(ValueError, match=f"is no QTSplus model.*'qwen2_5_vl'.*`qtsplus convert {folder} --out FOLDER`"):
        loading.load(folder)


@pytest.mark.parametrize("gone", [["tokenizer.json", "tokenizer_config.json"], ["processor_config.json"]])
def test_a_folder_without_its_processor(folder, gone):
    for name in gone:
        (folder / name).unlink()
    with pytest.raises(ValueError, match=f"holds no processor; expected {gone[0]} beside the weights"):
        loading.load(folder)


@pytest.mark.parametrize("bytes_left", [0, 4, 1000, -1])
def test_weights_that_were_cut_off(folder, bytes_left):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:bytes_left])
    with pytest.raises(ValueError, match="The model '.*' cannot be used: SafetensorError"):
        loading.load(folder)


def test_an_index_of_weights_names_files_beside_it(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names '\.\./elsewhere\.safetensors'; expected names of files beside it"):
        loading.load(folder)


class Bomb:
    def __reduce__(self):
        return print, ("executed",)


def with_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Bomb()}))


def with_n_max(folder):
    config = json.loads((folder / "config.json").read_text())
    config["qtsplus_config"]["n_max"] = "x"
    (folder / "config.json").write_text(json.dumps(config))


def with_template(text):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def with_config(**values):
    def spoil(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (with_config(quantization_config={"quant_method": "gptq", "bits": 4}), ""),
        (with_n_max, "QTSplusConfig got n_max='x'; expected a whole number"),
        (with_a_pickle, "UnpicklingError: Weights only load failed"),
        (with_template("{% for message in"), "TemplateSyntaxError"),
        (with_template("{{ messages[0].nothing.more }}"), "UndefinedError"),
        (with_template("{{ messages + 1 }}"), "TypeError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_folder_is_one_line(folder, tiny_mp4, spoil, words, capfd):
    spoil(folder)
    result = CliRunner().invoke(app, ["ask", str(tiny_mp4), "What?", "--model", str(folder)])
    error = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and error.startswith("qtsplus: ") and str(folder) in error, result.stderr
    assert f"cannot be used: {words}" in error and "executed" not in capfd.readouterr().out + result.stdout


@pytest.mark.parametrize("kernel", ["org/kernel", "paged|org/kernel@main:f", {"text_config": "org/kernel"}], ids=str)
def test_a_configuration_fetches_no_kernel(folder, kernel):
    """Else Transformers runs code of the repository that it names."""
    with_config(_attn_implementation=kernel)(folder)
    with pytest.raises(ValueError, match=r"names the kernel .*org/kernel.*, whose code does not run here"):
        loading.load(folder)


def test_an_adapter_beside_a_model_is_not_added(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/other"}')
    with pytest.raises(ValueError, match="holds a PEFT adapter; merge it"):
        loading.load(folder)


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_an_adapter_as_model_is_refused_by_what_it_is(folder, tmp_path, tiny_mp4, options):
    """As `save_pretrained` of PEFT writes it: without a config.json."""
    adapted = add_lora(Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder), lora_config(rank=2))
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    result = CliRunner().invoke(app, ["ask", str(tiny_mp4), "What?", "--model", str(tmp_path / "adapter"), *options])
    error = f"qtsplus: {tmp_path / 'adapter'} holds a PEFT adapter; merge it"
    assert result.exit_code == 2 and error in result.stderr


def test_a_repository_that_the_hub_does_not_give(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="There is no folder 'org/nothing', and the Hub did not give it: "):
        loading.load("org/nothing")


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_pipe_in_a_folder_is_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"{name} is a pipe or a device; expected the files of a model"):
        loading.load(folder)


@pytest.mark.parametrize("size", [0, -4, 1.5, "x", None])
def test_a_model_of_no_width(folder, size):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["hidden_size"] = size
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be used"):
        loading.load(folder, "cpu")


@pytest.mark.parametrize("name", ["model.language_model.embed_tokens.weight", "model.visual.patch_embed.proj.weight"])
def test_weights_that_hold_nan(folder, name):
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[5] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"hold NaN or infinity, such as {name}"):
        loading.load(folder, "cpu")


def test_a_revision_of_a_folder(folder):
    with pytest.raises(ValueError, match="is a folder, and revision='main' is about a repository"):
        loading.load(folder, revision="main")


def test_a_device_without_values(tiny_published):
    with pytest.raises(ValueError, match="The device 'meta' holds no values"):
        loading.load(tiny_published, device="meta")


def test_a_revision_goes_to_the_model_and_its_processor(tiny_published, monkeypatch):
    asked, config = [], loading.load_config(tiny_published)
    for kind in (Qwen2_5_VLQTSplusForConditionalGeneration, Qwen2_5_VLQTSplusProcessor):

        def from_pretrained(*_, load=kind.from_pretrained, revision, **options):
            asked.append(revision)
            return load(tiny_published, **options)

        monkeypatch.setattr(kind, "from_pretrained", from_pretrained)
    monkeypatch.setattr(loading, "stored_config", lambda _, revision: asked.append(revision) or config.to_dict())
    monkeypatch.setattr(loading, "load_config", lambda _, revision: asked.append(revision) or config)
    loading.load("lab/tiny", revision="v1.0")
    assert asked == ["v1.0"] * 5


# What a model gives is handed on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("relevance", [None, "empty"])
def test_a_model_that_computed_no_relevance(loaded, tiny_mp4, monkeypatch, relevance):
    model, processor = loaded
    generate = model.generate

    def without_relevance(**inputs):
        output = generate(**inputs)
        output.qtsplus.relevance = None if relevance is None else [torch.empty(0)]
        return output

    monkeypatch.setattr(model, "generate", without_relevance)
    answer = session.ask(model, processor, tiny_mp4, "What moves?", max_new_tokens=2)
    assert 0 < sum(interval.weight for interval in answer.evidence) < 1 + 1e-6


def test_a_selection_is_of_one_call(loaded, tiny_mp4):
    model, processor = loaded
    video = session.encode(model, processor, tiny_mp4)
    kept = {}
    for name in (None, "uniform", "all"):
        answer = session.ask(model, processor, video, "What moves?", max_new_tokens=2, selection=name)
        kept[name] = answer.keep_map
    assert kept["all"].all() and not torch.equal(kept[None], kept["uniform"])
    assert model.config.qtsplus_config.selection == "qtsplus"


def test_a_question_longer_than_the_models_positions(loaded, tiny_mp4):
    with pytest.raises(ValueError, match=r"The question has \d+ tokens; expected fewer than the model's 32768"):
        session.ask(*loaded, tiny_mp4, "what " * 100_000)


@pytest.mark.parametrize("retention", ["0.1", True, torch.tensor(0.1), [0.1, 0.2], float("nan"), 0], ids=repr)
def test_a_retention_that_is_no_fraction(loaded, tiny_mp4, retention):
    with pytest.raises(ValueError, match="retention"):
        session.ask(*loaded, tiny_mp4, "What moves?", retention=retention)


@pytest.mark.parametrize(("most", "kept"), [(1, 1), (10_000, 16)])
def test_the_smaller_of_two_budgets_counts(loaded, tiny_mp4, most, kept):
    answer = session.ask(*loaded, tiny_mp4, "What?", retention=0.25, max_visual_tokens=most, max_new_tokens=1)
    assert answer.kept_tokens == kept
