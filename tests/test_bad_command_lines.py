"""Whatever is typed or written wrongly ends in exit code 2 and one line, and never in a traceback."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from bad_command_lines import RECIPE, command_lines, recipe_files, record_files
from qtsplus import session
from qtsplus.cli import app
from qtsplus.hub.convert import convert


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tiny_mp4, tiny_published) -> dict[str, str]:
    """Files and folders by the names that stand in braces in the command lines: good ones, and every kind of bad."""
    folder = tmp_path_factory.mktemp("corpus")

    def write(name: str, content: bytes) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    for name, sizes in (("frames", ((56, 56), (56, 56))), ("uneven_frames", ((56, 56), (84, 56)))):
        (folder / name).mkdir()
        for index, size in enumerate(sizes):
            Image.new("RGB", size).save(folder / name / f"{index}.png")
    write("broken_frames/0.png", b"\x89PNG\r\n\x1a\n")
    write("empty", b"")
    write("garbage", bytes(range(256)) * 8)
    write("cut", tiny_mp4.read_bytes()[:200])
    write("text", b"A text.\n")
    (folder / "empty_folder").mkdir()
    _write_models(folder, tiny_published)
    record = {"video": str(tiny_mp4), "question": "What?", "answer": "red", "kind": "colour"}
    write("records", json.dumps(record).encode())
    names = [path.name for path in folder.iterdir()]
    paths = {name: str(folder / name) for name in (*names, "missing", "out", "recipe")}
    write("recipe", RECIPE.format(**paths).encode())
    return {**paths, "video": str(tiny_mp4), "model": str(tiny_published)}


def _write_models(folder: Path, published: Path) -> None:
    """Folders that hold no model that could be asked."""
    config = json.loads((published / "config.json").read_text())
    weights = (published / "model.safetensors").read_bytes()

    def write(name: str, content: bytes, weights: bytes | None = weights) -> None:
        shutil.copytree(published, folder / name)
        (folder / name / "config.json").write_bytes(content)
        (folder / name / "model.safetensors").unlink()
        if weights is not None:
            (folder / name / "model.safetensors").write_bytes(weights)

    def changed(**values: object) -> bytes:
        return json.dumps({**config, **values}).encode()

    convert(published, folder / "stock")
    write("cut_weights", changed(), weights[: len(weights) // 2])
    write("garbage_weights", changed(), b"\xff" * 64)
    write("no_weights", changed(), None)
    write("broken_config", b'{"model_type": ')
    write("binary_config", bytes(range(128, 256)))
    write("list_config", b"[1, 2]")
    write("typeless", json.dumps({name: value for name, value in config.items() if name != "model_type"}).encode())
    write("number_type", changed(model_type=5))
    write("foreign", changed(model_type="bert", auto_map={}))
    write("wrong_types", changed(text_config={**config["text_config"], "hidden_size": "wide"}))
    write("no_tokenizer", changed())
    for path in (folder / "no_tokenizer").glob("tokenizer*"):
        path.unlink()
    write("adapter", changed())
    (folder / "adapter" / "adapter_config.json").write_text("{}")


@pytest.fixture(scope="module")
def shared_model(tiny_published):
    """Loads the good model once; any other is loaded as ever."""
    load, good = session.load, session.load(tiny_published, "cpu")

    def loaded(model, device=None, dtype="auto", **more):
        return good if (model, device) == (str(tiny_published), None) else load(model, device, dtype, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "load", loaded)
        yield


def assert_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    shown = f"{[argument[:200] for argument in arguments]}: {result.stderr[-2000:]} {result.exception!r}"
    assert isinstance(result.exception, SystemExit), shown
    assert result.exit_code == 2, shown
    assert "Traceback" not in result.stderr, shown
    lines = [line for line in result.stderr.splitlines() if line.startswith("qtsplus: ")]
    assert len(lines) == 1 or (not lines and "─ Error ─" in result.stderr), shown
    assert not lines or len(lines[0]) > len("qtsplus: ") + 8, shown


def fill(argument: str, corpus: dict[str, str]) -> str:
    for name, path in corpus.items():
        argument = argument.replace("{" + name + "}", path)
    return argument.replace("{{", "{").replace("}}", "}")


LINES = command_lines()


@pytest.mark.parametrize("line", LINES, ids=[f"{i}-{' '.join(line)[:60]!a}" for i, line in enumerate(LINES)])
def test_a_bad_command_line_is_refused(line, corpus, shared_model):
    assert_refused([fill(argument, corpus) for argument in line])


@pytest.mark.parametrize("content", record_files(), ids=lambda content: f"{content[:60]!a}")
def test_a_bad_record_is_refused(content, corpus, shared_model, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(content)
    assert_refused(["eval", "records", str(tmp_path / "bad.jsonl"), "--model", corpus["model"]])


@pytest.mark.parametrize("content", recipe_files(), ids=lambda content: f"{content[:60]!a}")
def test_a_bad_recipe_is_refused(content, corpus, tmp_path):
    (tmp_path / "bad.yaml").write_bytes(content)
    assert_refused(["train", str(tmp_path / "bad.yaml"), "--dry-run"])
