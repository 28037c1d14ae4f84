"""Whatever is typed or written wrongly ends in exit code 2 and one line, and never in a traceback."""

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
