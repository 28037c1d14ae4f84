"""A Hub folder is complete, is written whole or not at all, and never eats a user's files."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.common.folders import WRITTEN
from qtsplus.hub.convert import convert
from qtsplus.hub.publish import assemble_folder
from qtsplus.model.generation_qtsplus import code_of
from tiny import load_bundled

CODE = {path.name for name in ("modeling", "processing") for path in code_of(f"qtsplus.model.{name}_qtsplus")}


def test_a_folder_holds_all_that_a_hub_user_needs(tiny_published):
    names = {path.name for path in tiny_published.iterdir()}
    assert names == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors", "processor_config.json"),
        *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
        *CODE,
        WRITTEN,
    }


def test_the_code_is_all_that_the_entry_files_import(tiny_published):
    names = {path.name for path in tiny_published.glob("*.py")}
    for name in names:
        imported = re.findall(r"^\s*from \.(\w+) import", (tiny_published / name).read_text(), re.MULTILINE)
        assert {f"{module}.py" for module in imported} <= names, name


def test_the_card_says_how_the_bundled_weights_were_made(tiny_published):
    card = (tiny_published / "README.md").read_text()
    assert "trained from scratch on rendered videos" in card and "license: apache-2.0" in card
    assert "random (" not in card and "weights are random" not in card


def test_the_cards_snippet_runs(tiny_published, tiny_mp4, capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", (tiny_published / "README.md").read_text(), re.DOTALL)
    exec(snippet.replace("org/qtsplus-tiny", str(tiny_published)).replace("video.mp4", str(tiny_mp4)), {})
    assert capsys.readouterr().out


def test_a_saved_model_is_published_with_its_weights(tmp_path):
    model, processor = load_bundled()
    model.save_pretrained(tmp_path / "saved")
    processor.save_pretrained(tmp_path / "saved")
    folder = assemble_folder(tmp_path / "saved", tmp_path / "hub")
    again = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(folder).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again[name]), name
    assert "license: apache-2.0" in (folder / "README.md").read_text(), "which a model of these sizes has"
    whole = assemble_folder("qtsplus-tiny", tmp_path / "whole")
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}


def test_a_model_without_a_processor_is_not_published(tmp_path):
    load_bundled()[0].save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="The processor of .*saved cannot be used"):
        assemble_folder(tmp_path / "saved", tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_a_card_that_somebody_wrote_stays(tiny_published, tmp_path):
    source = shutil.copytree(tiny_published, tmp_path / "mine")
    card = (source / "README.md").read_text().replace("# qtsplus-tiny", "# My words")
    (source / "README.md").write_text(card)
    folder = assemble_folder(source, tmp_path / "hub", repository="lab/tiny")
    assert (folder / "README.md").read_text() == card.replace("org/qtsplus-tiny", "lab/tiny")


def test_weights_that_do_not_fit_are_not_published(tiny_published, tmp_path):
    source = shutil.copytree(tiny_published, tmp_path / "mine")
    weights = load_file(source / "model.safetensors")
    del weights["model.qtsplus.budget.mlp.0.bias"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 missing: model\.qtsplus\.budget\.mlp\.0\.bias"):
        assemble_folder(source, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_a_folder_is_not_published_onto_itself(tmp_path):
    folder = assemble_folder("qtsplus-tiny", tmp_path / "hub", repository="lab/seven")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for make, target in [(assemble_folder, folder), (assemble_folder, folder / "new"), (convert, folder / "new")]:
        with pytest.raises(ValueError, match="is in the source .*hub; choose another folder"):
            make(folder, target)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_earlier_assembly_is_replaced(tiny_published, tmp_path):
    assemble_folder("qtsplus-tiny", tmp_path / "hub")
    assemble_folder(tiny_published, tmp_path / "hub")
    assert (tmp_path / "hub" / "README.md").read_text() == (tiny_published / "README.md").read_text().replace(
        "org/qtsplus-tiny", "org/hub"
    )


@pytest.mark.parametrize("name", ["README.md", "config.json", "thesis.tex"])
def test_what_was_changed_since_and_what_is_not_ours_stays(tmp_path, name):
    folder = assemble_folder("qtsplus-tiny", tmp_path / "hub")
    (folder / name).write_text("my words")
    with pytest.raises(FileExistsError, match=name):
        assemble_folder("qtsplus-tiny", folder)
    assert (folder / name).read_text() == "my words"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": '{"model_type": "qwen2_5_vl"}'}, "no QTSplus model: its model_type is 'qwen2_5_vl'"),
        ({"config.json": '{"model_type": "qwen2_5_vl_qtsplus", "qtsplus_config": {}}'}, "no weights"),
        ({"adapter_config.json": "{}"}, "adapter"),
    ],
)
def test_a_folder_that_cannot_be_published_says_why(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        assemble_folder(tmp_path, tmp_path.with_name("hub"))


def test_a_quantized_model_is_not_published(tiny_published, tmp_path):
    source = shutil.copytree(tiny_published, tmp_path / "int8")
    path = source / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "torchao"}}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="int8 is quantized; take the checkpoint that it was made from"):
        assemble_folder(source, tmp_path / "hub")
