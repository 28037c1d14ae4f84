"""Whatever is typed or written wrongly ends in exit code 2 and one line, and never in a traceback."""

import hashlib
import random
from pathlib import Path

import pytest

from bad_command_lines import command_lines, recipe_files, record_files
from qtsplus.cli import app
from refusals import assert_refused, fill

LINES = command_lines()


def beginning(line):
    """The name of a test, in ASCII."""
    text = line if isinstance(line, bytes) else " ".join(line)
    return ascii(text[:60])


@pytest.mark.parametrize("line", LINES, ids=beginning)
def test_a_bad_command_line_is_refused(line, corpus, shared_model):
    assert_refused([fill(argument, corpus) for argument in line], app)


@pytest.mark.parametrize("content", record_files(), ids=beginning)
def test_a_bad_record_is_refused(content, corpus, shared_model, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(content)
    assert_refused(["eval", str(tmp_path / "bad.jsonl"), "--model", corpus["model"]], app)


@pytest.mark.parametrize("content", recipe_files(), ids=beginning)
def test_a_bad_recipe_is_refused(content, corpus, tmp_path):
    (tmp_path / "bad.yaml").write_bytes(content)
    assert_refused(["train", str(tmp_path / "bad.yaml"), "--dry-run"], app)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_two_mistakes_are_one_line_and_change_nothing_that_was_there(corpus, shared_model, tmp_path, monkeypatch):
    """A bad line of a command with the options of another bad line of it."""
    monkeypatch.chdir(tmp_path)  # where an empty name must not lead
    rng = random.Random(20261123)
    folder = Path(corpus["empty"]).parent
    before = digests(folder)
    for _ in range(100):
        line = rng.choice(LINES)
        same_command = [other for other in LINES if other[0] == line[0]]
        options = [word for word in rng.choice(same_command) if word.startswith("--") and "=" in word]
        both = [*line, *options]
        assert_refused([fill(argument, corpus) for argument in both], app)
    assert digests(folder) == before
    assert not list(tmp_path.iterdir())
