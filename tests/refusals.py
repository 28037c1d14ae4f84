"""What bad command lines are about, and how each has to end."""

import json
import shutil
from pathlib import Path

from PIL import Image
from typer import Typer
from typer.testing import CliRunner

from bad_command_lines import RECIPE
from tiny import write_stock


def make_corpus(folder: Path, video: Path, published: Path) -> dict[str, str]:
    """Files and folders by the names that stand in braces in the command lines: good ones, and every kind of bad."""

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
    write("cut", video.read_bytes()[:200])
    write("text", b"A text.\n")
    (folder / "empty_folder").mkdir()
    _write_models(folder, published)
    record = {"video": str(video), "question": "What?", "answer": "red", "kind": "colour"}
    write("records", json.dumps(record).encode())
    write("captions", b'{"vision_id": "v", "caption": "A dog runs."}')
    options = {"A": "red", "B": "blue", "C": "green", "D": "grey"}
    write("choices", json.dumps({"vision_id": "v", "question": "What?", "options": options, "answer": "A"}).encode())
    names = [path.name for path in folder.iterdir()]
    paths = {name: str(folder / name) for name in (*names, "missing", "out", "recipe")}
    write("recipe", RECIPE.format(**paths).encode())
    return {**paths, "video": str(video), "model": str(published)}


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

    write_stock(published, folder / "stock")
    write("cut_weights", changed(), weights[: len(weights) // 2])
    write("garbage_weights", changed(), b"\xff" * 64)
    write("no_weights", changed(), None)
    write("broken_config", b'{"model_type": ')
    write("binary_config", bytes(range(128, 256)))
    write("list_config", b"[1, 2]")
    write("number_type", changed(model_type=5))
    write("foreign", changed(model_type="bert", auto_map={}))
    write("wrong_types", changed(text_config={**config["text_config"], "hidden_size": "wide"}))
    write("no_tokenizer", changed())
    for path in (folder / "no_tokenizer").glob("tokenizer*"):
        path.unlink()
    write("adapter", changed())
    (folder / "adapter" / "adapter_config.json").write_text("{}")


def assert_refused(arguments: list[str], app: Typer) -> None:
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
