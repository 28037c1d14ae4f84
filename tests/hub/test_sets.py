"""What a set holds, counted."""

import json

import pytest
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.data.records import Answer, Caption, Choice, VideoRecord
from qtsplus.data.statistics import count_set
from set_files import write_records

OPTIONS = {"A": "a cup", "B": "a very long rope", "C": "a hat", "D": "a phone"}
RECORDS = [
    Choice(vision_id="v_1.mp4", question="What is held?", options=OPTIONS, answer="B", type="object"),
    Choice(vision_id="v_1", question="What is worn?", options=OPTIONS, answer="C", type="object", difficulty="hard"),
    Choice(vision_id="v_2", question="What rings?", options=OPTIONS, answer="D", type="causal", difficulty="easy"),
    Answer(vision_id="v_2", question="Why does he climb?", answer="To reach the top.", type="causal"),
    Caption(vision_id="v_3", caption="A man climbs a wall."),
    VideoRecord("v_4", "Red? A. yes B. no Answer.", "B", query="Red?", options=("yes", "no"), source="mcq", kind="x"),
    VideoRecord(None, "What colour is grass?", "green"),
]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "set"
    write_records(folder / "vscq2-train.jsonl", RECORDS[:2])
    write_records(folder / "vscq2-test.jsonl", RECORDS[2:3])
    write_records(folder / "vqa.json", RECORDS[3:4])
    (folder / "journal.sqlite").write_text("sk-secret")
    return folder


def stats(*arguments):
    return CliRunner().invoke(app, ["data", "stats", *map(str, arguments)])


def test_everything_is_counted_once(tmp_path):
    write_records(tmp_path / "set.jsonl", RECORDS)
    told = count_set([tmp_path / "set.jsonl"]).as_dict()
    assert told["records"] == 7 and told["videos"] == 4 and told["files"] == {"set.jsonl": 7}
    assert told["kinds"] == {"single choice": 4, "free answer": 2, "caption": 1}
    assert told["types"] == {"object": 2, "causal": 2, "not said": 1, "x": 1}
    assert told["difficulties"] == {"easy": 1, "hard": 1, "not said": 2}
    assert told["letters"] == {"B": 2, "C": 1, "D": 1}
    assert told["texts"]["option"] == {"number": 14, "mean words": 32 / 14}
    assert told["texts"]["answer"]["number"] == 2 and told["texts"]["question"]["number"] == 6


def test_the_command_prints_tables_and_json(folder):
    result = stats(folder)
    assert result.exit_code == 0, result.output
    for words in ("vscq2-train.jsonl", "single choice", "object", "difficulty", "mean words", "about 2 videos"):
        assert words in result.stdout
    told = json.loads(stats(folder / "vscq2-train.jsonl", "--json").stdout)
    assert told["records"] == 2 and told["letters"] == {"B": 1, "C": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{missing}"], "There is no file"),
        (["{empty}"], "The set holds no record"),
        ([""], "is empty"),
        (["{bad}"], "Row 1 of"),
        (["{nothing}"], "nothing.jsonl holds no record"),
    ],
)
def test_what_cannot_be_counted_ends_in_one_line(arguments, message, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text("{}")
    (tmp_path / "nothing.jsonl").touch()
    names = {name: tmp_path / name for name in ("missing", "empty", "set")}
    names |= {name: tmp_path / f"{name}.jsonl" for name in ("bad", "nothing")}
    result = stats(*(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
