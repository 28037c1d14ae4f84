"""What long runs leave on disk goes on after an interruption, and is read with distrust: damaged, later or foreign."""

import json
import os

import pytest
from typing_extensions import TypedDict

from qtsplus.common.journals import Journal, Line, Schema, seal, unseal, write_json


class Settings(TypedDict):
    model: str


SETTINGS = {"model": "tiny"}
NUMBERS = Schema(Settings, Line[str, int])


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", SETTINGS, NUMBERS)
    journal.add("a", 1)
    journal.add("b", 2)
    return journal.path


def test_an_interrupted_run_goes_on_and_a_line_that_was_cut_counts_as_missing(path, monkeypatch):
    path.write_text(path.read_text() + '{"key": "c", "val')
    warnings = []
    monkeypatch.setattr("qtsplus.common.journals.logger.warning_once", warnings.append)
    for settings in (None, SETTINGS):  # a reader warns too; only who writes the file repairs it
        journal = Journal(path, settings)
        assert journal.done == {"a": 1, "b": 2}
        assert f"The last line of {path} was cut off" in warnings.pop()
    journal.add("c", {"seconds": 1.5})
    os.utime(path, ns=(0, 0))
    assert Journal(path, SETTINGS).done == {"a": 1, "b": 2, "c": {"seconds": 1.5}}
    assert path.stat().st_mtime_ns == 0, "a whole one is left as it is: another process may be adding to it"


def test_other_settings_are_refused(path):
    settings = dict(SETTINGS, repeats=(1, 2))
    with pytest.raises(ValueError, match=r"was begun with repeats=None, not \[1, 2\]: go on with the same settings"):
        Journal(path, settings)
    path.unlink()
    Journal(path, settings).add("a", 1)
    assert Journal(path, settings).done == {"a": 1}


def test_only_the_whole_result_is_left(tmp_path):
    result = tmp_path / "speed-cpu.json"
    write_json(result, {"b": [1, 2.5], "a": None})
    with pytest.raises(TypeError):
        write_json(result, {"a": object()})
    assert [*tmp_path.iterdir()] == [result]
    assert json.loads(result.read_text()) == {"b": [1, 2.5], "a": None}


@pytest.mark.parametrize("document", [{"a": [1.5, None, "ü\udcff"]}, {"b": {"c": "}, "}}])
def test_what_was_sealed_is_read_again(document):
    line = seal(document).encode() + b"\n"
    assert unseal(line) == document


def test_every_changed_byte_is_found(path):
    whole = path.read_bytes()
    for place in range(len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=rf"Line [123] of {path} cannot be used: .+ So ") as error:
            Journal(path, schema=NUMBERS)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("c", "3", "value is '3'; expected a valid integer"),
        ("c", None, "value is null"),
        (3, 3, "key is 3; expected a text"),
        ("c", [[]], "value is "),
    ],
)
def test_keys_and_values_are_those_of_the_schema(path, key, value, reason):
    Journal(path).add(key, value)
    with pytest.raises(ValueError, match=rf"Line 4 of .*{reason}.*remove it, and run the same command again"):
        Journal(path, SETTINGS, NUMBERS)


def test_settings_are_those_of_the_schema(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path, {"model": 1})
    with pytest.raises(ValueError, match=r"Line 1 of .*model is 1; expected a text"):
        Journal(path, schema=NUMBERS)


def test_another_format_is_refused_by_every_reader(path):
    later = Schema(Settings, Line[str, int], format=3)
    for settings in (None, SETTINGS):
        with pytest.raises(ValueError, match="another version of qtsplus wrote it, in format 1, not 3"):
            Journal(path, settings, later)


def test_a_lost_first_line_is_named(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    reason = r"Line 1 of .*: another version of qtsplus wrote it, in format None.* So choose another folder"
    with pytest.raises(ValueError, match=reason):
        Journal(path, SETTINGS, NUMBERS)


@pytest.mark.parametrize("line", ["[" * 100_000, "[]", "1" * 5000, "\x00", "{}", '{"check": 1}', "{'a': 1}", ""])
def test_what_is_no_entry_is_one_line(path, line):
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="Line 4 of .* cannot be used") as error:
        Journal(path, schema=NUMBERS)
    assert "\n" not in str(error.value)
