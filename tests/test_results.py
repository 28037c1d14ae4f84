"""What long runs leave on disk: whole files, and on the way there what an interruption must not lose."""

import json
import os

import pytest

from qtsplus.results import Journal, read_result, write_json

SETTINGS = {"shape": "cpu", "repeats": (1, 2)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / ".speed-cpu.jsonl"


def test_an_interrupted_run_goes_on(path):
    first = Journal(path, SETTINGS)
    first.add("a", {"seconds": 1.5})
    first.add("b", 2)
    assert Journal(path, SETTINGS).done == {"a": {"seconds": 1.5}, "b": 2}


def test_a_line_that_was_cut_counts_as_missing(path):
    Journal(path, SETTINGS).add("a", 1)
    path.write_text(path.read_text() + '{"key": "b", "val')
    journal = Journal(path, SETTINGS)
    assert journal.done == {"a": 1}
    journal.add("c", 3)
    assert Journal(path, SETTINGS).done == {"a": 1, "c": 3}


def test_a_whole_journal_is_left_as_it_is(path):
    """Another process may be adding to it."""
    Journal(path, SETTINGS).add("a", 1)
    os.utime(path, ns=(0, 0))
    assert Journal(path, SETTINGS).done == {"a": 1}
    assert path.stat().st_mtime_ns == 0


def test_other_settings_start_anew(path):
    Journal(path, SETTINGS).add("a", 1)
    assert Journal(path, {**SETTINGS, "repeats": (1, 3)}).done == {}
    assert Journal(path, SETTINGS).done == {}


def test_only_the_whole_result_is_left(path, tmp_path):
    journal = Journal(path, SETTINGS)
    journal.add("a", 1)
    journal.finish(tmp_path / "speed-cpu.json", {"a": 1})
    assert [file.name for file in tmp_path.iterdir()] == ["speed-cpu.json"]
    assert read_result(tmp_path / "speed-cpu.json") == {"a": 1}


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path):
    write_json(tmp_path / "result.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "result.json", {"a": object()})
    assert read_result(tmp_path / "result.json") == {"a": 1}


def test_results_are_plain_json(tmp_path):
    write_json(tmp_path / "result.json", {"b": [1, 2.5], "a": None})
    assert json.loads((tmp_path / "result.json").read_text()) == {"b": [1, 2.5], "a": None}
