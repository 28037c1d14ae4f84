"""Command lines that nobody thought of, from the commands' own options: each ends in a line and a code that fits it."""

import hashlib
import random
import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from bad_command_lines import NO_MODELS, NO_VIDEOS
from qtsplus import loading
from qtsplus.cli import app
from qtsplus.indexing import index
from refusals import fill

LINES = 300
# A line that every command takes; options are put behind, changed or taken away.
GOOD = {
    "ask": ["{video}", "What moves?", "--model", "{model}", "--max-new-tokens", "2"],
    "index": ["{videos}", "--out", "{out}", "--model", "{model}"],
    "watch": ["{video}", "What moves?", "--model", "{model}", "--timeout", "1", "--max-new-tokens", "2"],
    "batch": ["{records}", "--out", "{out}.jsonl", "--model", "{model}", "--max-new-tokens", "2"],
    "demo": ["--out", "{out}"],
    "convert": ["{stock}", "--out", "{out}", "--variant", "qtsplus-tiny"],
    "publish": ["{model}", "--to", "{out}"],
    "train": ["{recipe}", "--dry-run"],
    "calibrate": ["{model}", "{records}", "--out", "{out}.json"],
    "eval": ["{records}", "--model", "{model}"],
    "data check": ["{records}"],
    "data make": ["vscq2", "{records}", "--out", "{out}", "--endpoint", "http://127.0.0.1:9/v1", "--teacher", "x"],
}
FILES = (
    *(
        "{video}",
        "{records}",
        "{recipe}",
        "{frames}",
        "{broken_frames}",
        "{model}",
        "/dev/null/x",
        ".",
        "..",
        "~",
        "ключ",
    ),
    *(*NO_VIDEOS, *NO_MODELS),
)
NUMBERS = ("0", "-1", "1", "2", "0.5", "1e12", "-0.0", "nan", "inf", "1e-300", "9" * 30, "abc", "", "½", "0x10")
TEXTS = (
    *("", " ", "x", "../../evil", "a/b", "a/b/c", "<|video_pad|>", "<|im_end|>"),
    *("selection=uniform", "training.seed=1"),
    *("training.output_dir=", "model.variant=nobody", "n_max=1", "cpu", "tpu", "auto", "all", "uniform", "qtsplus"),
    *("{", "\udcff", "\x1b[31m", "x" * 200_000, "1/2", "2/1", "mit", "HF_TOKEN", '{"a": 1}', "[" * 5000),
)


def callbacks(typer_app: typer.Typer, prefix: str = "") -> dict[str, Callable]:
    """The functions behind the commands, by what is typed for them."""
    named = {prefix + (one.name or one.callback.__name__): one.callback for one in typer_app.registered_commands}
    for group in typer_app.registered_groups:
        named |= callbacks(group.typer_instance, f"{prefix}{group.name} ")
    return named


def options_of(callback: Callable) -> dict[str, Any]:
    """The types of a command's options, by what is typed for them."""
    options = {}
    for name, hint in get_type_hints(callback, include_extras=True).items():
        kind, *declared = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if declared and isinstance(declared[0], typer.models.OptionInfo):
            options[(declared[0].param_decls or (f"--{name.replace('_', '-')}",))[0]] = kind
    return options


OPTIONS = {name: options_of(callback) for name, callback in callbacks(app).items() if name in GOOD}


def draw(rng: random.Random) -> list[str]:
    """A command with one to three options changed, repeated, left out or added."""
    name = rng.choice(sorted(OPTIONS))
    line = list(GOOD[name])
    for _ in range(rng.randint(1, 3)):
        option, kind = rng.choice(sorted(OPTIONS[name].items(), key=str))
        place = rng.randrange(len(line)) if line else 0
        if line and rng.random() < 0.15:
            del line[place]
        elif line and rng.random() < 0.15:
            line[place] = rng.choice(FILES)
        elif kind is bool:
            line.append(option)
        else:
            line += [option, rng.choice(TEXTS if rng.random() < 0.1 else values(kind))]
    return [*name.split(), *line]


def values(kind: Any) -> tuple[str, ...]:
    """What an option of a type may be given, for better or worse."""
    inner = [one for one in get_args(kind) if one is not type(None)]
    if inner:
        return values(inner[0])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return (*(one.value for one in kind), "", "best")
    return {Path: FILES, int: NUMBERS, float: NUMBERS}.get(kind, TEXTS)


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.slow
def test_any_command_line_ends_in_a_line_and_changes_nothing_that_was_there(
    corpus, shared_model, tmp_path, monkeypatch
):
    rng, home = random.Random(20261123), tmp_path / "here"
    home.mkdir()
    (home / "notes.txt").write_text("mine")
    monkeypatch.chdir(home)
    corpus_folder = Path(corpus["empty"]).parent
    videos, library = tmp_path / "videos", tmp_path / "library"
    videos.mkdir()
    shutil.copy(corpus["video"], videos)
    index(videos, library, *loading.load(corpus["model"], "cpu"), name=corpus["model"])
    corpus = {**corpus, "videos": str(videos), "library": str(library)}
    before, wrong = digest(corpus_folder), []
    for number in range(LINES):
        places = {**corpus, "out": str(tmp_path / f"out{number}")}
        line = [fill(argument, places) for argument in draw(rng)]
        result = CliRunner().invoke(app, line)
        said = [text for text in result.stderr.splitlines() if text.startswith("qtsplus: ")]
        ended = result.exception is None or isinstance(result.exception, SystemExit)
        if result.exit_code in (0, 1) and result.stdout.strip() and ended:  # 1: `data check` has found bad rows
            continue
        boxed = "─ Error ─" in result.stderr or "Usage:" in result.output
        fits = isinstance(result.exception, SystemExit) and result.exit_code in (1, 2)
        if not fits or "Traceback" in result.stderr or (len(said) != 1 and not boxed):
            shown = [argument[:80] for argument in line]
            wrong.append(f"{shown}: {result.exit_code} {result.exception!r:.200} {result.stderr[-300:]}")
    assert not wrong, "\n\n".join(wrong)
    after = digest(corpus_folder)
    changed = [path for path, content in before.items() if after.get(path) != content]
    assert [path for path in changed if "/stock/" not in path] == []  # that folder `convert` wrote, and may replace
    assert (home / "notes.txt").read_text() == "mine"
    assert all(path.name.strip() for path in home.iterdir())  # an empty name is no folder
