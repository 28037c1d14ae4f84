"""`qtsplus batch`: every row of a file once, whatever is wrong with some and however often the run is killed."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clips import render_clip
from qtsplus.asking import session
from qtsplus.cli import app

FIELDS = {"id", "video", "question", "answer", "kept_tokens", "visual_tokens", "evidence", "warnings", "unheard"}
COLOURS = ("red", "blue", "green")


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Three clips and what looks like one, in a folder."""
    folder = tmp_path_factory.mktemp("videos")
    for seed in range(3):
        render_clip(folder / f"clip{seed}.mp4", seconds=2, fps=8, size=(112, 112), seed=seed)
    (folder / "cut.mp4").write_bytes((folder / "clip0.mp4").read_bytes()[:200])
    return folder


@pytest.fixture
def rows():
    """Videos by turns, so that rows of one video do not stand together."""
    return [
        {"video": f"clip{video}.mp4", "question": f"What colour is the {colour} circle?"}
        for colour in COLOURS
        for video in range(3)
    ]


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(file, out, model, *more):
    return ["batch", str(file), "--out", str(out), "--model", str(model), "--max-new-tokens", "3", *map(str, more)]


@pytest.fixture
def batch(shared_model, tiny_published):
    def run(file, out, *more):
        return CliRunner().invoke(app, command(file, out, tiny_published, *more))

    return run


def count_encoded(monkeypatch):
    """The names of the videos as they are encoded."""
    encode, encoded = session.encode, []

    def counting(model, processor, video, **more):
        encoded.append(Path(video).name)
        return encode(model, processor, video, **more)

    monkeypatch.setattr(session, "encode", counting)
    return encoded


def test_answers_are_those_of_ask_and_a_video_is_encoded_once(batch, videos, rows, tiny_published, monkeypatch):
    encoded = count_encoded(monkeypatch)
    rows[1] |= {"id": "mine", "retention": 0.5, "answer": "ignored"}
    out = videos / "once.jsonl"
    result = batch(write(videos / "rows.jsonl", rows), out, "--retention", "0.25")
    assert result.exit_code == 0, result.stderr
    assert Counter(encoded) == {f"clip{video}.mp4": 1 for video in range(3)}

    answers = read(out)
    assert [(row["video"], row["question"]) for row in answers] == [(row["video"], row["question"]) for row in rows]
    assert [row["id"] for row in answers] == [1, "mine", *range(3, 10)]
    model = session.load(tiny_published, "cpu")
    for row, wanted in zip(answers, rows, strict=True):
        asked = {"retention": wanted.get("retention", 0.25), "max_new_tokens": 3}
        alone = session.ask(*model, videos / row["video"], row["question"], **asked).as_dict()
        assert set(row) == FIELDS
        assert {name: row[name] for name in FIELDS - {"id", "video"}} | {"evidence": []} == {
            **{name: alone[name] for name in FIELDS - {"id", "video", "question"}},
            "question": row["question"],
            "evidence": [],
        }
        assert [round(one["weight"], 5) for one in row["evidence"]] == [
            round(one["weight"], 5) for one in alone["evidence"]
        ]


def test_bad_videos_and_bad_rows_are_rows_with_their_error(batch, videos, rows, tmp_path):
    bad = [
        {"video": "cut.mp4", "question": "What?"},
        {"video": "none.mp4", "question": "What?", "id": "gone"},
        {"video": "clip0.mp4", "question": " "},
        {"video": "clip0.mp4", "question": "What?", "retention": 2},
        {"video": "clip0.mp4", "question": "What?", "retention": True},
        {"video": "clip0.mp4", "question": "word " * 40000},
        {"question": "What?"},
        ["clip0.mp4"],
    ]
    file = write(tmp_path / "rows.jsonl", [*rows[:2], *bad, rows[2]])
    file.write_text(file.read_text() + '{"video": "clip0.mp4", "quest')
    result = batch(file, tmp_path / "out.jsonl", "--media-root", videos)
    assert result.exit_code == 0 and "9 of 12 rows have an error" in result.stderr
    answers = read(tmp_path / "out.jsonl")
    assert [row["id"] for row in answers] == [1, 2, 3, "gone", *range(5, 13)]
    assert ["answer" in row for row in answers] == [True] * 2 + [False] * 8 + [True, False]
    words = ("cut.mp4", "none.mp4", "question is empty", "retention is 2", "retention is true", "tokens", "is missing")
    for row, said in zip(answers[2:], (*words, "expected an object"), strict=False):
        assert said in row["error"] and "\n" not in row["error"]
    assert "no JSON" in answers[-1]["error"]


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_other_formats_give_what_jsonl_gives(batch, videos, rows, tmp_path, kind):
    rows[4] |= {"id": "007", "retention": 0.5, "max_visual_tokens": 3, "fps": 1}
    rows[5] |= {"id": "a, b", "question": 'What is "it",\nand where?'}
    rows, file = rows[3:], tmp_path / f"rows.{kind}"
    if kind == "csv":
        with open(file, "w", newline="") as target:
            names = ["video", "question", "id", "retention", "max_visual_tokens", "fps"]
            writer = csv.DictWriter(target, names)
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        texts = [(name, pyarrow.string()) for name in ("video", "question", "id")]
        numbers = [("retention", pyarrow.float64()), ("max_visual_tokens", pyarrow.int64()), ("fps", pyarrow.int64())]
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(texts + numbers)), file)
    else:
        file.write_text(json.dumps(rows))
    for name, source in (("here", file), ("jsonl", write(tmp_path / "rows.jsonl", rows))):
        assert batch(source, tmp_path / name, "--media-root", videos).exit_code == 0
    assert read(tmp_path / "here") == read(tmp_path / "jsonl")
    assert read(tmp_path / "here")[1]["kept_tokens"] == 3


def test_a_row_of_csv_with_a_comma_too_many_is_not_cut(batch, videos, tmp_path):
    (tmp_path / "rows.csv").write_text("video,question\nclip0.mp4,Who, and when?\nclip0.mp4,Who?\n")
    assert batch(tmp_path / "rows.csv", tmp_path / "out", "--media-root", videos).exit_code == 0
    assert ["more cells" in row.get("error", "") for row in read(tmp_path / "out")] == [True, False]


def test_csv_as_spreadsheets_write_it(batch, videos, tmp_path):
    """Capitals in the name, empty rows at the end, columns without a name, and a cell without bounds."""
    rows = f"video,question,,\nclip0.mp4,What?,,\nclip1.mp4,{'x' * 140_000},,\n,,,\n,,,\n"
    (tmp_path / "rows.CSV").write_text(rows)
    assert batch(tmp_path / "rows.CSV", tmp_path / "out", "--media-root", videos).exit_code == 0
    assert [row["video"] for row in read(tmp_path / "out")] == ["clip0.mp4", "clip1.mp4"]
    for header in ("video;question", "video,question,question", "film,question"):
        (tmp_path / "rows.csv").write_text(f"{header}\nclip0.mp4,What?,Who?\n")
        result = batch(tmp_path / "rows.csv", tmp_path / "other", "--media-root", videos)
        assert result.exit_code == 2 and "expected video,question and others once" in result.stderr


def test_a_row_may_be_about_a_stretch_and_what_says_nothing_is_named(batch, videos, tmp_path):
    text = "video,question,start,end,retentoin\nclip0.mp4,What?,,,\nclip0.mp4,What?,0.5,1.5,0.1\n"
    (tmp_path / "rows.csv").write_text(text)
    result = batch(tmp_path / "rows.csv", tmp_path / "out", "--media-root", videos)
    assert result.exit_code == 0 and "rows.csv: retentoin" in result.stderr
    whole, part = read(tmp_path / "out")
    assert whole["evidence"] != part["evidence"] != []
    assert all(one["video"] == "clip0.mp4" for row in (whole, part) for one in row["evidence"])
    assert all(0.5 <= one["start"] < one["end"] <= 1.7 for one in part["evidence"])
    rows = [{"video": "clip0.mp4", "question": "What?", **at} for at in ({"end": 1e308}, {"start": 1e308}, {})]
    assert batch(write(tmp_path / "rows.jsonl", rows), tmp_path / "far", "--media-root", videos).exit_code == 0
    far, behind, plain = read(tmp_path / "far")
    assert far["evidence"] == plain["evidence"] and "shows no frame" in behind["error"]


def test_what_is_written_beside_a_run_does_not_end_it(batch, videos, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "rows.jsonl", [*rows[:2], {"video": "cut.mp4", "question": "What?"}])
    for _ in range(2):
        result = batch(file, "out.jsonl", "--media-root", videos)
        assert result.exit_code == 0 and "1 of 3 rows have an error" in result.stderr, result.stderr
    assert batch(write(videos / "here.jsonl", rows[:1]), "here.jsonl").exit_code == 0
    monkeypatch.chdir(videos)
    assert batch("here.jsonl", tmp_path / "named.jsonl").exit_code == 0
    (named,) = read(tmp_path / "named.jsonl")
    assert named["evidence"] and {one["video"] for one in named["evidence"]} == {named["video"]}


KILLED = """
import os
from qtsplus.cli import app
from qtsplus.common.journals import Journal

def add(journal, *entry, add=Journal.add):
    add(journal, *entry)
    if len(journal.done) == 5:
        os.kill(os.getpid(), 9)

Journal.add = add
app()
"""


def entries(out: Path) -> list[str]:
    """The whole lines of the journal behind its settings."""
    journal = Path(f"{out}.run", "journal.jsonl")
    return [line for line in journal.read_text().splitlines(True)[1:] if line[-1] == "\n"] if journal.exists() else []


def test_a_killed_run_goes_on_where_it_stopped(batch, videos, rows, tiny_published, tmp_path, monkeypatch):
    many = [{**row, "question": f"{row['question']} {number}"} for number in range(6) for row in rows]
    file, out = write(tmp_path / "rows.jsonl", many), tmp_path / "out.jsonl"
    line = [sys.executable, "-c", KILLED, *command(file, out, tiny_published, "--media-root", videos)]
    result = subprocess.run(line, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    done = entries(out)
    assert len(done) == 5 < len(many) and not out.exists()
    journal = Path(f"{out}.run", "journal.jsonl")
    # A line of which a crash left half.
    journal.write_text(journal.read_text() + '{"key": 54, "value": {"ans')

    encoded = count_encoded(monkeypatch)
    assert batch(file, out, "--media-root", videos).exit_code == 0
    assert entries(out)[: len(done)] == done and len(entries(out)) == len(many)
    assert len({json.loads(line)["key"] for line in entries(out)}) == len(many)
    assert len(encoded) == len(set(encoded))
    answers = out.read_text()
    assert [row["question"] for row in read(out)] == [row["question"] for row in many]

    # Again, with nothing left to do.
    assert batch(file, out, "--media-root", videos).exit_code == 0
    assert out.read_text() == answers and len(entries(out)) == len(many)
    assert batch(file, tmp_path / "whole.jsonl", "--media-root", videos).exit_code == 0
    assert (tmp_path / "whole.jsonl").read_text() == answers


def test_other_settings_and_other_peoples_files_are_refused(batch, videos, rows, tmp_path):
    file, out = write(tmp_path / "rows.jsonl", rows[:1]), tmp_path / "out.jsonl"
    assert batch(file, out, "--media-root", videos).exit_code == 0
    answers = out.read_text()
    for more in (["--retention", "0.5"], ["--selection", "uniform"], ["--fps", "1"]):
        result = batch(file, out, "--media-root", videos, *more)
        assert result.exit_code == 2 and "was begun with" in result.stderr, result.stderr
    (tmp_path / "thesis.tex").write_text("mine")
    assert "is there already" in batch(file, tmp_path / "thesis.tex", "--media-root", videos).stderr
    assert (tmp_path / "thesis.tex").read_text() == "mine" and out.read_text() == answers


def test_other_weights_and_another_method_under_their_names_are_refused(videos, rows, tiny_published, tmp_path):
    file, model = write(videos / "weights.jsonl", rows[:1]), shutil.copytree(tiny_published, tmp_path / "model")
    (tmp_path / "mine.py").write_text("def first(candidates, n):\n    return __import__('torch').arange(n)\n")
    for changed in (model / "model.safetensors", tmp_path / "mine.py"):
        line = command(file, tmp_path / f"{changed.name}.jsonl", model, "--selection", tmp_path / "mine.py:first")
        assert CliRunner().invoke(app, line).exit_code == 0
        before = changed.stat()
        changed.write_bytes(changed.read_bytes())
        os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 2 and "was begun with files=" in result.stderr, changed


def test_failed_rows_are_asked_again(batch, videos, rows, tmp_path):
    file, out = write(tmp_path / "rows.jsonl", [rows[0], {"video": "late.mp4", "question": "What?"}]), tmp_path / "out"
    (tmp_path / "clip0.mp4").write_bytes((videos / "clip0.mp4").read_bytes())
    assert batch(file, out).exit_code == 0 and "error" in read(out)[1]
    for count in (2, 3):
        assert len(entries(out)) == count and batch(file, out).exit_code == 0
    (tmp_path / "late.mp4").write_bytes((videos / "clip1.mp4").read_bytes())
    assert batch(file, out).exit_code == 0 and "answer" in read(out)[1], "its video is another"


@pytest.mark.parametrize("text", ["NaN", "[1]", '{"a": 1}', "true", "1.5", '"\\ud800"'])
def test_an_id_that_is_none_is_the_error_of_its_row_alone(batch, videos, tmp_path, text, monkeypatch):
    encoded, file = count_encoded(monkeypatch), tmp_path / "rows.jsonl"
    file.write_text(f'{{"video": "clip0.mp4", "question": "Who?", "id": {text}}}\n')
    result = batch(file, tmp_path / "out", "--media-root", videos)
    assert result.exit_code == 2 and "id is " in result.stderr and not encoded
    file.write_text(file.read_text() + '{"video": "clip1.mp4", "question": "Who?"}\n')
    assert batch(file, tmp_path / "out", "--media-root", videos).exit_code == 0 and encoded == ["clip1.mp4"]
    bad, good = read(tmp_path / "out")
    assert "answer" in good and "; expected " in bad["error"]


@pytest.mark.parametrize(
    "value", [b"\xff", Decimal("1.5"), float("nan"), datetime(2026, 1, 1), [1], {"a": 1}], ids=repr
)
@pytest.mark.parametrize("column", ["id", "video", "question", "retention"])
def test_a_table_may_hold_anything(batch, videos, tmp_path, value, column):
    parquet = pytest.importorskip("pyarrow.parquet")
    good, file = {"video": "clip0.mp4", "question": "Who?", "id": "mine"}, tmp_path / "rows.parquet"
    rows = [{**good, column: value}, {name: value for name, value in good.items() if name != column}]
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), file)
    result = batch(file, tmp_path / "out", "--media-root", videos)
    if column in ("video", "question"):
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr
    else:
        assert result.exit_code == 0 and ["error" in row for row in read(tmp_path / "out")] == [True, False]


def test_a_file_that_was_mended_keeps_what_was_answered(batch, videos, rows, tmp_path, monkeypatch):
    file, out, encoded = tmp_path / "rows.jsonl", tmp_path / "out", count_encoded(monkeypatch)
    more = ("--media-root", videos)
    assert batch(write(file, [*rows, {"video": "clip0.mp4"}]), out, *more).exit_code == 0
    before = {(row["video"], row.get("question")): row for row in read(out)}
    encoded.clear()
    mended = [*({**row, "id": "same"} for row in rows[:4:-1]), {"video": "clip0.mp4", "question": "Where?"}, *rows[:3]]
    assert batch(write(file, [*mended, *mended]), out, *more).exit_code == 0
    after = read(out)
    assert encoded == ["clip0.mp4"] and len(entries(out)) == len(rows) + 1 and len(after) == 2 * len(mended)
    for row in after:
        assert {**before.get((row["video"], row["question"]), row), "id": row["id"]} == row
    assert [{**row, "id": 0} for row in after[: len(mended)]] == [{**row, "id": 0} for row in after[len(mended) :]]


def test_a_video_that_was_changed_under_its_name_is_asked_again(batch, videos, rows, tmp_path):
    file, out, film = write(tmp_path / "rows.jsonl", rows[:2]), tmp_path / "out", tmp_path / "clip0.mp4"
    for name in ("clip0.mp4", "clip1.mp4", "clip2.mp4"):
        shutil.copy(videos / name, tmp_path)
    assert batch(file, out).exit_code == 0 and len(entries(out)) == 2
    state = film.stat()
    other = tmp_path / "other.mp4"
    other.write_bytes(film.read_bytes())
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.replace(film)  # of the same size and time
    assert batch(file, out).exit_code == 0 and len(entries(out)) == 3
    assert batch(file, out).exit_code == 0 and len(entries(out)) == 3
    film.write_bytes(film.read_bytes())
    os.utime(film, ns=(state.st_atime_ns, state.st_mtime_ns))  # also in place, as `cp -p` leaves it
    assert batch(file, out).exit_code == 0 and len(entries(out)) == 4


@pytest.mark.parametrize(
    "journal, words",
    [
        ('{"input": "ab", "model": "m"}\n{"key": 1, "value": {"answer": "red"}}\n', "another version"),
        ("no journal\n", "not JSON"),
        (None, "was changed since it was written"),
    ],
)
def test_a_journal_that_cannot_be_read_is_one_line(batch, videos, rows, tmp_path, journal, words):
    file, out = write(tmp_path / "rows.jsonl", rows[:1]), tmp_path / "out"
    assert batch(file, out, "--media-root", videos).exit_code == 0
    path = Path(f"{out}.run", "journal.jsonl")
    path.write_text(journal or path.read_text().replace("answer", "anzwer"))
    content = path.read_bytes()
    result = batch(file, out, "--media-root", videos)
    assert result.exit_code == 2 and words in result.stderr and path.read_bytes() == content


def test_a_run_without_an_answer_has_failed(batch, tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"video": "none.mp4", "question": "What?"}])
    result = batch(file, tmp_path / "out")
    assert result.exit_code == 1 and "no question of" in result.stderr and "error" in read(tmp_path / "out")[0]
