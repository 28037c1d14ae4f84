"""`qtsplus batch`: every row of a file once, whatever is wrong with some and however often the run is killed."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clips import render_clip
from qtsplus.asking import session
from qtsplus.cli import app

FIELDS = {"id", "video", "question", "answer", "kept_tokens", "visual_tokens", "evidence", "warnings", "unheard"}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """A folder with three clips and a file that is cut off in its header."""
    folder = tmp_path_factory.mktemp("videos")
    for seed in range(3):
        render_clip(
            folder / f"clip{seed}.mp4",
            seconds=2,
            fps=8,
            size=(112, 112),
            seed=seed,
        )
    beginning = (folder / "clip0.mp4").read_bytes()[:200]
    (folder / "cut.mp4").write_bytes(beginning)
    return folder


@pytest.fixture
def rows():
    """Nine rows in which the three videos take turns."""
    table = []
    for colour in ("red", "blue", "green"):
        for video in range(3):
            row = {
                "video": f"clip{video}.mp4",
                "question": f"What colour is the {colour} circle?",
            }
            table.append(row)
    return table


def write(path: Path, rows) -> Path:
    with open(path, "w") as file:
        for row in rows:
            print(json.dumps(row), file=file)
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Batch:
    """Runs of the command in one folder, from `rows.jsonl` to `out.jsonl`."""

    def __init__(self, model, folder, root):
        self.model = model
        self.root = root
        self.file = folder / "rows.jsonl"
        self.out = folder / "out.jsonl"
        self.journal = folder / "out.jsonl.run" / "journal.jsonl"

    def line(self, options=()):
        words = ["batch", self.file, "--out", self.out]
        words += ["--model", self.model, "--max-new-tokens", 3]
        if self.root:
            words += ["--media-root", self.root]
        words += options
        return [str(word) for word in words]

    def run(self, *options):
        return CliRunner().invoke(app, self.line(options))

    def answers(self, *options) -> list[dict]:
        result = self.run(*options)
        assert result.exit_code == 0, result.stderr
        return read(self.out)

    def refusal(self, *options) -> str:
        result = self.run(*options)
        assert result.exit_code == 2, result.stderr
        return result.stderr

    def entries(self) -> list[str]:
        """The whole lines of the journal after its settings."""
        lines = self.journal.read_text().splitlines(True)[1:]
        return [line for line in lines if line.endswith("\n")]


@pytest.fixture
def batch(shared_model, tiny_published, tmp_path, videos):
    return Batch(tiny_published, tmp_path, videos)


@pytest.fixture
def encoded(monkeypatch):
    """The names of the videos as they are encoded."""
    names = []
    encode = session.encode

    def counting(model, processor, video, **options):
        names.append(Path(video).name)
        return encode(model, processor, video, **options)

    monkeypatch.setattr(session, "encode", counting)
    return names


def replace_with_its_times(path, content):
    """Write the content in place and leave the file's times as they were, as `cp -p` does."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def assert_is_answer_of_ask(answer, row, alone):
    assert set(answer) == FIELDS
    assert answer["video"] == row["video"]
    assert answer["question"] == row["question"]
    for name in ("answer", "kept_tokens", "visual_tokens", "warnings", "unheard"):
        assert answer[name] == alone[name]
    for place, expected in zip(answer["evidence"], alone["evidence"], strict=True):
        assert place["weight"] == pytest.approx(expected["weight"], abs=1e-5)


def test_answers_are_those_of_ask_and_a_video_is_encoded_once(batch, videos, rows, encoded):
    rows[1] |= {"id": "mine", "retention": 0.5, "answer": "ignored"}
    write(batch.file, rows)
    answers = batch.answers("--retention", "0.25")
    assert sorted(encoded) == ["clip0.mp4", "clip1.mp4", "clip2.mp4"]
    assert [answer["id"] for answer in answers] == [1, "mine", 3, 4, 5, 6, 7, 8, 9]
    model, processor = session.load(batch.model, "cpu")
    for answer, row in zip(answers, rows, strict=True):
        alone = session.ask(
            model,
            processor,
            videos / row["video"],
            row["question"],
            retention=row.get("retention", 0.25),
            max_new_tokens=3,
        )
        assert_is_answer_of_ask(answer, row, alone.as_dict())


BAD_ROWS = {
    '{"video": "cut.mp4", "question": "What?"}': "cut.mp4",
    '{"video": "none.mp4", "question": "What?", "id": "gone"}': "none.mp4",
    '{"video": "clip0.mp4", "question": " "}': "question is empty",
    '{"video": "clip0.mp4", "question": "What?", "retention": 2}': "retention is 2",
    '{"video": "clip0.mp4", "question": "What?", "retention": true}': "retention is true",
    '{"video": "clip0.mp4", "question": "%s"}' % ("word " * 40000): "tokens",
    '{"question": "What?"}': "is missing",
    '["clip0.mp4"]': "expected a mapping",
    '{"video": "clip0.mp4", "quest': "not JSON",
}
for bad_id in ("NaN", "[1]", '{"a": 1}', "true", "1.5", '"\\ud800"'):
    BAD_ROWS[f'{{"video": "clip0.mp4", "question": "Who?", "id": {bad_id}}}'] = "id is "


def test_bad_videos_and_bad_rows_are_rows_with_their_error(batch, rows):
    good = json.dumps(rows[0])
    batch.file.write_text("\n".join([good, *BAD_ROWS, good]))
    result = batch.run()
    assert result.exit_code == 0
    assert ": 15 of 17; the same command" in result.stderr
    first, *bad, last = read(batch.out)
    assert first["answer"] == last["answer"]
    assert [row["id"] for row in bad[:9]] == [2, "gone", 4, 5, 6, 7, 8, 9, 10]
    for row, words in zip(bad, BAD_ROWS.values(), strict=True):
        assert "answer" not in row
        assert words in row["error"]
        assert "\n" not in row["error"]


COLUMNS = ["video", "question", "id", "retention", "max_visual_tokens", "fps"]


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    kinds = ["string", "string", "string", "float64", "int64", "int64"]
    fields = [(name, getattr(pyarrow, kind)()) for name, kind in zip(COLUMNS, kinds, strict=True)]
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields)), path)


def write_json(path, rows):
    path.write_text(json.dumps(rows))


WRITERS = {"csv": write_csv, "parquet": write_parquet, "json": write_json}


@pytest.mark.parametrize("kind", WRITERS)
def test_other_formats_give_what_jsonl_gives(batch, rows, tmp_path, kind):
    rows = rows[:3]
    rows[1] |= {"id": "007", "retention": 0.5, "max_visual_tokens": 3, "fps": 1}
    rows[2] |= {"id": "a, b", "question": 'What is "it",\nand where?'}
    write(batch.file, rows)
    expected = batch.answers()
    assert expected[1]["kept_tokens"] == 3
    batch.file = tmp_path / f"rows.{kind}"
    batch.out = tmp_path / "other.jsonl"
    WRITERS[kind](batch.file, rows)
    assert batch.answers() == expected


def test_csv_as_spreadsheets_write_it(batch, tmp_path):
    """Capitals in the name, empty rows at the end, and columns without a name."""
    batch.file = tmp_path / "rows.CSV"
    batch.file.write_text("video,question,,\nclip0.mp4,What?,,\nclip1.mp4,Who?,,\n,,,\n,,,\n")
    first, second = batch.answers()
    assert first["video"] == "clip0.mp4"
    assert second["video"] == "clip1.mp4"


def test_a_row_of_csv_with_a_comma_too_many_is_not_cut(batch, tmp_path):
    batch.file = tmp_path / "rows.csv"
    batch.file.write_text("id,video,question\n7,clip0.mp4,Who, and when?\n,clip0.mp4,Who?\n")
    cut, whole = batch.answers()
    assert "row 1 has more cells" in cut["error"]
    assert cut["id"] == "7"
    assert "answer" in whole


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            b"video;question\nclip0.mp4,What?,Who?\n",
            "has the columns video;question; expected each name once and commas between",
        ),
        (
            b'video,question\nclip0.mp4,"What, and wh',
            "cannot be read as CSV in UTF-8: unexpected end of data",
        ),
        (
            "video,question\nclip0.mp4,What?\n".encode("utf-16"),
            "cannot be read as CSV in UTF-8: 'utf-8' codec can't decode",
        ),
        (
            b"id,video,question\na,clip0.mp4,What?\nb,clip0.mp4,Who?\na,clip1.mp4,What?\n",
            "rows.csv have the same id, 'a'; expected another one for each",
        ),
        (
            b"id,video,question\n2,clip0.mp4,What?\n,clip0.mp4,Who?\n",
            "Rows 1 and 2 of",
        ),
        (
            b"video,question,question\nclip0.mp4,What?,Who?\n",
            "has the columns video, question, question; expected each name once",
        ),
    ],
)
def test_csv_with_another_header_cut_off_or_with_an_id_twice_is_refused(batch, tmp_path, text, reason):
    batch.file = tmp_path / "rows.csv"
    batch.file.write_bytes(text)
    assert reason in batch.refusal()


def test_a_row_may_be_about_a_stretch_and_an_unknown_column_is_named(batch, tmp_path):
    batch.file = tmp_path / "rows.csv"
    batch.file.write_text("video,question,start,end,retentoin\nclip0.mp4,What?,,,\nclip0.mp4,What?,0.5,1.5,0.1\n")
    result = batch.run()
    assert result.exit_code == 0
    assert "rows.csv: retentoin" in result.stderr
    whole, stretch = read(batch.out)
    assert whole["evidence"] != stretch["evidence"]
    assert {place["video"] for place in whole["evidence"]} == {"clip0.mp4"}
    assert stretch["evidence"]
    for place in stretch["evidence"]:
        assert place["video"] == "clip0.mp4"
        assert 0.5 <= place["start"] < place["end"] <= 1.7


def test_a_stretch_may_end_after_its_video_but_not_begin_there(batch):
    row = {"video": "clip0.mp4", "question": "What?"}
    late_end = {**row, "end": 1e308}
    late_start = {**row, "start": 1e308}
    write(batch.file, [row, late_end, late_start])
    plain, far, behind = batch.answers()
    assert far["evidence"] == plain["evidence"]
    assert "shows no frame" in behind["error"]


def test_output_in_the_present_folder_does_not_end_a_second_run(batch, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = {"video": "cut.mp4", "question": "What?"}
    write(batch.file, rows[:2] + [bad])
    batch.out = Path("out.jsonl")
    for _ in range(2):
        result = batch.run()
        assert result.exit_code == 0, result.stderr
        assert "out.jsonl: 1 of 3; the same command" in result.stderr


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


def test_a_killed_run_goes_on_where_it_stopped(batch, rows, tmp_path, encoded):
    for row in list(rows):
        again = f"{row['question']} Look again."
        rows.append({**row, "question": again})
    write(batch.file, rows)
    command = [sys.executable, "-c", KILLED, *batch.line()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    done = batch.entries()
    assert len(done) == 5
    assert not batch.out.exists()
    with open(batch.journal, "a") as journal:
        journal.write('{"key": 18, "value": {"ans')  # half of a line, as a crash leaves it

    answers = batch.answers()
    for answer, row in zip(answers, rows, strict=True):
        assert answer["question"] == row["question"]
    assert len(encoded) == len(set(encoded))
    entries = batch.entries()
    assert entries[:5] == done
    keys = {json.loads(line)["key"] for line in entries}
    assert len(keys) == len(entries) == 18

    assert batch.answers() == answers
    assert batch.entries() == entries, "nothing was left to do"
    batch.out = tmp_path / "whole.jsonl"
    assert batch.answers() == answers


OTHER_SETTINGS = [
    ("--retention", "0.5"),
    ("--selection", "uniform"),
]


@pytest.mark.parametrize("option", OTHER_SETTINGS)
def test_a_run_with_other_settings_is_refused(batch, rows, option):
    write(batch.file, rows[:1])
    answers = batch.answers()
    assert "was begun with" in batch.refusal(*option)
    batch.file = batch.file.rename(batch.file.with_name("other.jsonl"))
    assert "was begun with questions=" in batch.refusal()
    assert read(batch.out) == answers


def test_a_file_of_somebody_else_is_not_written_over(batch, rows, tmp_path):
    write(batch.file, rows[:1])
    batch.out = tmp_path / "thesis.tex"
    batch.out.write_text("mine")
    assert "is there already" in batch.refusal()
    assert batch.out.read_text() == "mine"


@pytest.mark.parametrize("name", ["model/model.safetensors", "mine.py"])
def test_changed_weights_and_a_changed_method_are_refused(batch, rows, tmp_path, name):
    write(batch.file, rows[:1])
    batch.model = shutil.copytree(batch.model, tmp_path / "model")
    (tmp_path / "mine.py").write_text("def first(candidates, n):\n    return __import__('torch').arange(n)\n")
    method = f"{tmp_path}/mine.py:first"
    batch.answers("--selection", method)
    changed = tmp_path / name
    replace_with_its_times(changed, changed.read_bytes())
    assert "was begun with files=" in batch.refusal("--selection", method)


def test_failed_rows_are_asked_again(batch, videos, rows, tmp_path):
    shutil.copy(videos / "clip0.mp4", tmp_path)
    batch.root = None
    late = {"video": "late.mp4", "question": "What?"}
    write(batch.file, [rows[0], late])
    for _ in range(2):
        assert "error" in batch.answers()[1]
        assert len(batch.entries()) == 1, "the answer; what failed is not kept"
    shutil.copy(videos / "clip1.mp4", tmp_path / "late.mp4")
    assert "answer" in batch.answers()[1]


STRANGE = [
    b"\xff",
    Decimal("1.5"),
    float("nan"),
    datetime(2026, 1, 1),
    [1],
    {"a": 1},
]


def write_table(batch, tmp_path, column, value):
    """A table of two rows, of which the first has the column."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    good = {"video": "clip0.mp4", "question": "Who?"}
    strange = {**good, "id": "mine", column: value}
    batch.file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([strange, good]), batch.file)


@pytest.mark.parametrize("value", STRANGE, ids=repr)
@pytest.mark.parametrize("column", ["id", "retention"])
def test_a_table_with_a_strange_cell_has_one_bad_row(batch, tmp_path, value, column):
    write_table(batch, tmp_path, column, value)
    bad, good = batch.answers()
    assert "error" in bad
    assert "answer" in good


def without_id(answer):
    rest = dict(answer)
    del rest["id"]
    return rest


def test_rows_that_were_answered_are_not_asked_again_in_a_corrected_file(batch, rows, encoded):
    """The corrected file has some of the rows in another order, other ids, a new question, and each row twice."""
    write(batch.file, [*rows, {"video": "clip0.mp4"}])
    answers = [without_id(answer) for answer in batch.answers()]
    encoded.clear()
    first_row = rows[0]
    renamed = rows[8] | {"id": "same"}
    new = {"video": "clip0.mp4", "question": "Where?"}
    corrected = [renamed, new, first_row]
    write(batch.file, [*corrected, renamed | {"id": "again"}, new, first_row])
    after = batch.answers()
    ids = [answer["id"] for answer in after]
    assert ids == ["same", 2, 3, "again", 5, 6]
    assert encoded == ["clip0.mp4"]
    assert len(batch.entries()) == len(rows) + 1
    contents = [without_id(answer) for answer in after]
    assert contents[0] == answers[8]
    assert contents[2] == answers[0]
    assert contents[3:] == contents[:3]


def test_a_video_that_was_changed_under_its_name_is_asked_again(batch, videos, rows, tmp_path):
    batch.root = None
    for row in rows[:2]:
        shutil.copy(videos / row["video"], tmp_path)
    write(batch.file, rows[:2])
    batch.answers()
    assert len(batch.entries()) == 2

    video = tmp_path / "clip0.mp4"
    other = tmp_path / "other.mp4"
    shutil.copy2(video, other)  # the same size and time
    other.replace(video)
    for _ in range(2):
        batch.answers()
        assert len(batch.entries()) == 3

    replace_with_its_times(video, video.read_bytes())
    batch.answers()
    assert len(batch.entries()) == 4


def test_a_run_without_an_answer_has_failed(batch):
    write(batch.file, [{"video": "none.mp4", "question": "What?"}])
    result = batch.run()
    assert result.exit_code == 1
    assert "no question of" in result.stderr
    assert "error" in read(batch.out)[0]
