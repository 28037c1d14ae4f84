"""What bad command lines are about, and how each has to end."""

import json
import shutil
from pathlib import Path

from PIL import Image
from typer import Typer
from typer.testing import CliRunner

from bad_command_lines import RECIPE
from tiny import write_stock

CAPTION = '{"vision_id": "v", "caption": "A dog runs."}'


CHOICE = (
    '{"vision_id": "v", "question": "What?", "answer": "A",'
    ' "options": {"A": "red", "B": "blue", "C": "green", "D": "grey"}}'
)


def make_corpus(folder: Path, video: Path, published: Path) -> dict[str, str]:
    """Files and folders by the names that stand in braces in the command lines: good ones, and every kind of bad."""
    _write_frames(folder / "frames", [(56, 56), (56, 56)])
    _write_frames(folder / "uneven_frames", [(56, 56), (84, 56)])
    (folder / "broken_frames").mkdir()
    (folder / "broken_frames/0.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "empty_folder").mkdir()
    (folder / "empty").touch()
    (folder / "garbage").write_bytes(bytes(range(256)) * 8)
    (folder / "cut").write_bytes(video.read_bytes()[:200])
    (folder / "text").write_text("A text.\n")
    record = {"video": str(video), "question": "What?", "answer": "red", "kind": "colour"}
    (folder / "records").write_text(json.dumps(record))
    (folder / "captions").write_text(CAPTION)
    (folder / "choices").write_text(CHOICE)
    _write_models(folder, published)
    paths = {path.name: str(path) for path in folder.iterdir()}
    for name in ("missing", "out", "recipe"):
        paths[name] = str(folder / name)
    (folder / "recipe").write_text(RECIPE.format(**paths))
    paths["video"] = str(video)
    paths["model"] = str(published)
    return paths


def _write_frames(folder: Path, sizes: list[tuple[int, int]]) -> None:
    folder.mkdir()
    for index, size in enumerate(sizes):
        Image.new("RGB", size).save(folder / f"{index}.png")


def _write_models(folder: Path, published: Path) -> None:
    """Folders that hold no model that could be asked."""
    write_stock(published, folder / "stock")
    fields = json.loads((published / "config.json").read_text())
    weights = (published / "model.safetensors").read_bytes()

    def copy(name: str) -> Path:
        return shutil.copytree(published, folder / name)

    def write_config(name: str, content: bytes) -> None:
        (copy(name) / "config.json").write_bytes(content)

    def write_fields(name: str, **changes: object) -> None:
        write_config(name, json.dumps(fields | changes).encode())

    (copy("cut_weights") / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (copy("garbage_weights") / "model.safetensors").write_bytes(b"\xff" * 64)
    (copy("no_weights") / "model.safetensors").unlink()
    (copy("adapter") / "adapter_config.json").write_text("{}")
    for path in copy("no_tokenizer").glob("tokenizer*"):
        path.unlink()
    write_config("broken_config", b'{"model_type": ')
    write_config("binary_config", bytes(range(128, 256)))
    write_config("list_config", b"[1, 2]")
    write_fields("number_type", model_type=5)
    write_fields("foreign", model_type="bert", auto_map={})
    write_fields("wrong_types", text_config=fields["text_config"] | {"hidden_size": "wide"})


def assert_refused(arguments: list[str], app: Typer) -> None:
    result = CliRunner().invoke(app, arguments)
    shortened = [argument[:200] for argument in arguments]
    shown = f"{shortened}: {result.stderr[-2000:]} {result.exception!r}"
    assert isinstance(result.exception, SystemExit), shown
    assert result.exit_code == 2, shown
    assert "Traceback" not in result.stderr, shown
    messages = [line for line in result.stderr.splitlines() if line.startswith("qtsplus: ")]
    if not messages:
        assert "─ Error ─" in result.stderr, f"not a message of Typer either: {shown}"
        return
    (message,) = messages
    assert len(message) > len("qtsplus: ") + 8, shown


def fill(argument: str, corpus: dict[str, str]) -> str:
    for name, path in corpus.items():
        argument = argument.replace("{" + name + "}", path)
    return argument.replace("{{", "{").replace("}}", "}")
