"""What is broken in a folder, convert and publish name in one line, and write nothing."""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.hub.loading import load

COMMANDS = {
    "convert": lambda source, out: ["convert", source, "--out", out],
    "publish": lambda source, out: ["publish", source, "--to", out],
}


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def as_folder(path):
    path.unlink()
    path.mkdir()


def nowhere(path):
    path.unlink()
    path.symlink_to(path.parent / "nowhere" / path.name)


def written(text):
    return lambda path: path.write_text(text)


def with_fields(**values):
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture(params=COMMANDS)
def command(request):
    return request.param


@pytest.fixture
def source(command, tiny_published, tiny_stock, tmp_path):
    return shutil.copytree(tiny_stock if command == "convert" else tiny_published, tmp_path / "source")


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("model.safetensors", cut, "model.safetensors is no whole safetensors file"),
        ("model.safetensors", written(""), "model.safetensors is no whole safetensors file"),
        ("model.safetensors", as_folder, "has no weights"),
        ("model.safetensors", nowhere, "has no weights"),
        ("config.json", cut, "config.json is not JSON"),
        ("config.json", written("[" * 100_000), "config.json is not JSON"),
        ("config.json", written("[1]"), "config.json holds no JSON object"),
        ("config.json", as_folder, "There is no config.json"),
        ("config.json", with_fields(image_token_id="x"), "image_token_id"),
        ("config.json", with_fields(dtype=[]), "config.json cannot be used: IndexError"),
        (
            "config.json",
            with_fields(qtsplus_config=3),
            "config.json cannot be used: qtsplus_config=3: expected the selector's fields",
        ),
        ("generation_config.json", cut, "generation_config.json"),
        ("generation_config.json", written("null"), "generation_config.json"),
        ("processor_config.json", cut, "processor_config.json is not JSON"),
        ("processor_config.json", with_fields(video_processor=3), "The processor of"),
        ("tokenizer.json", cut, "tokenizer.json is not JSON"),
        ("tokenizer.json", nowhere, "has a tokenizer without words"),
    ],
)
def test_a_broken_file_is_named_in_one_line(command, source, name, spoil, words, tmp_path):
    if command == "convert" and "qtsplus_config" in words:
        pytest.skip("a stock model has none")
    spoil(source / name)
    result = CliRunner().invoke(app, list(map(str, COMMANDS[command](source, tmp_path / "out"))))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert words in result.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def refusal_of(command, source, out):
    """The message of a command that writes nothing."""
    line = COMMANDS[command](source, out)
    result = CliRunner().invoke(app, [str(word) for word in line])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert not out.exists()
    return result.stderr


@pytest.fixture
def folder(tiny_published, tmp_path):
    return shutil.copytree(tiny_published, tmp_path / "folder")


@pytest.mark.parametrize("ids", [{"turn_end_token_id": 5}, {"user_turn_token_ids": [5, 6]}])
def test_ids_that_find_no_question_are_refused(folder, ids, tmp_path):
    with_fields(**ids)(folder / "config.json")
    message = "do not find the question that the chat template writes; expected user_turn_token_ids=["
    assert message in refusal_of("publish", folder, tmp_path / "out")
    with pytest.raises(ValueError, match=re.escape(message)):
        load(folder)


@pytest.mark.parametrize("name", ["image_token_id", "video_token_id"])
def test_placeholders_that_are_not_the_tokenizers_are_refused(folder, tiny_stock, tmp_path, name):
    """Otherwise a model would take a word for its video."""
    stock = shutil.copytree(tiny_stock, tmp_path / "stock")
    for path in (folder, stock):
        with_fields(**{name: 5})(path / "config.json")
    with pytest.raises(ValueError, match="but the placeholders of its tokenizer, '<.image_pad.>' and "):
        load(folder)
    assert "but the placeholders of its tokenizer" in refusal_of("convert", stock, tmp_path / "out")


def test_a_template_that_marks_questions_in_another_way_is_loaded(folder):
    """Neither the folder's ids nor the tokenizer's find its questions, which whoever asks gives apart."""
    (folder / "chat_template.jinja").write_text("{% for message in messages %}USER: <|video_pad|> Who?{% endfor %}")
    load(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "{absolute}", "shards/x.safetensors", "..", "", 5, None])
def test_an_index_that_names_files_elsewhere_is_refused(command, source, name, tmp_path):
    """Otherwise `publish` would copy what somebody else's index names."""
    path = source / "model.safetensors"
    weights = load_file(path)
    path.unlink()
    shards = source / "shards"
    shards.mkdir()
    elsewhere = tmp_path / "x.safetensors"
    save_file(weights, elsewhere, metadata={"format": "pt"})
    save_file(weights, shards / "x.safetensors", metadata={"format": "pt"})
    if name == "{absolute}":
        name = str(elsewhere)
    content = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, name)})
    (source / "model.safetensors.index.json").write_text(content)
    reason = f"index.json names {str(name)!r}; expected names of files beside it"
    assert reason in refusal_of(command, source, tmp_path / "out")
    if command == "publish":
        with pytest.raises(ValueError, match=re.escape(reason)):
            load(source)
