"""Sets on disk: what is written is read back, from every format; readers stream; bad rows are told by their number."""

import json
import re
import sys
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtsplus.data.formats import iter_rows, read_records
from qtsplus.data.records import (
    LETTERS,
    Caption,
    Choice,
    FreeAnswer,
    VideoRecord,
)
from set_files import write_records

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip)
NAME = st.text("abcXYZ019_-", min_size=1, max_size=8)
NAMES = st.lists(NAME, min_size=1, max_size=3).map("/".join)
SHARED = {
    "vision_id": NAMES,
    "id": st.none() | TEXT,
    "fps": st.none() | st.floats(min_value=0.01, max_value=1000, allow_nan=False),
}
LABELS = {"type": st.none() | TEXT, "difficulty": st.none() | TEXT}
OPTIONS = st.lists(TEXT, min_size=4, max_size=4, unique_by=lambda text: re.sub(r"\W", "", text.casefold()))
CAPTIONS = st.builds(Caption, **SHARED, caption=TEXT)
ANSWERS = st.builds(FreeAnswer, **SHARED, **LABELS, question=TEXT, answer=TEXT)
CHOICES = st.builds(
    Choice,
    **SHARED,
    **LABELS,
    question=TEXT,
    options=OPTIONS.map(lambda texts: dict(zip(LETTERS, texts, strict=True))),
    answer=st.sampled_from(LETTERS),
    rationale=st.none() | TEXT,
    evidence=st.none() | TEXT,
)
QUESTIONS = st.builds(
    VideoRecord,
    video=st.none() | NAMES,
    question=TEXT,
    answer=st.sampled_from(LETTERS),
    query=st.none() | TEXT,
    kind=st.just("") | TEXT,
    source=st.sampled_from(["mcq", "vqa", "caption"]),
    options=st.none() | OPTIONS.map(tuple),
    earlier=st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple),
    fps=SHARED["fps"],
    id=SHARED["id"],
)
KINDS = {"captions": CAPTIONS, "answers": ANSWERS, "choices": CHOICES, "questions": QUESTIONS}


def records_of(path):
    return [row.record for row in iter_rows(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


@pytest.mark.parametrize("ending", ["jsonl", "json"])
@settings(max_examples=50)
@given(records=st.lists(st.one_of(*KINDS.values()), max_size=5))
def test_lines_and_arrays_give_back_what_was_written(ending, records, folder):
    path = folder / f"set.{ending}"
    write_records(path, records)
    assert records_of(path) == records


@pytest.fixture(scope="module")
def arrow():
    return pytest.importorskip("pyarrow")


def write_table(path, table) -> None:
    from pyarrow.parquet import write_table as write

    write(table, path)


def write_table_of_records(arrow, path, records) -> None:
    rows = [record.row() for record in records]
    names = {}  # of all rows, in order
    for row in rows:
        names.update(row)
    filled = [{name: row.get(name) for name in names} for row in rows]
    write_table(path, arrow.Table.from_pylist(filled))


@pytest.mark.parametrize("kind", KINDS)
def test_tables_give_back_what_was_written(arrow, kind, folder):
    path = folder / f"{kind}.parquet"

    @settings(max_examples=30)
    @given(records=st.lists(KINDS[kind], min_size=1, max_size=5))
    def round_trip(records):
        write_table_of_records(arrow, path, records)
        assert records_of(path) == records

    round_trip()


def test_rows_of_arrays_and_tables_are_counted_from_one(arrow, tmp_path):
    records = [Caption(vision_id="v_1", caption="A cup."), Caption(vision_id="v_2", caption="A rope.")]
    array = tmp_path / "set.json"
    table = tmp_path / "SET.PARQUET"
    write_records(array, records)
    write_table_of_records(arrow, table, records)
    for path in (array, table):
        rows = [(row.number, row.record) for row in iter_rows(path)]
        assert rows == list(enumerate(records, start=1))


def test_rows_of_the_reference_are_read_as_they_are_published(tmp_path):
    choice = {
        "vision_id": "v_1",
        "question": "What is held?",
        "options": {"A": "a cup", "B": "a rope", "C": "a hat", "D": "a phone"},
        "answer": "B",
        "difficulty": "medium",
        "rationale": "A rope.",
        "evidence": "holding a rope",
    }
    free = {"vision_id": "v_2", "question": "Why?", "prediction": "To climb.", "caption": None}
    path = tmp_path / "set.jsonl"
    lines = f"{json.dumps(choice)}\n{json.dumps(free)}\n"
    path.write_text(lines.replace('"a phone"', '"a phone", "E": null'))
    expected = [Choice(**choice), FreeAnswer(vision_id="v_2", question="Why?", answer="To climb.")]
    assert records_of(path) == expected


LLAVA = {
    "id": "Zi4",
    "conversations": [
        {"from": "human", "value": "<image>\nWhat moves?"},
        {"from": "gpt", "value": "A car."},
        {"from": "human", "value": "Where?"},
        {"from": "gpt", "value": "On a road."},
    ],
    "data_source": "0_30_s",
    "video": "videos/Zi4.mp4",
}


@pytest.mark.parametrize(
    "text",
    [f"\ufeff{json.dumps(LLAVA)}\n", json.dumps([LLAVA], indent=2), f"\ufeff [{json.dumps(LLAVA)} ]\n"],
    ids=["line", "array", "mark"],
)
def test_conversations_of_llava_are_read_as_they_are_published(text, tmp_path):
    path = tmp_path / "llava.json"
    path.write_text(text)
    (record,) = records_of(path)
    earlier = (("What moves?", "A car."),)
    assert record == VideoRecord("videos/Zi4.mp4", "Where?", "On a road.", earlier=earlier, id="Zi4")
    video = tmp_path / "0_30_s" / "videos" / "Zi4.mp4"
    video.parent.mkdir(parents=True)
    video.touch()
    for media_root in (None, tmp_path / "0_30_s"):
        (record,) = read_records(path, media_root)
        assert record.video == str(video)


@pytest.mark.parametrize(
    ("name", "place"),
    [("v_1", "v_1"), ("clips/v_2", "clips/v_2.mp4"), ("clips/v_2.mp4", "clips/v_2.mp4"), ("missing", "missing")],
)
def test_media_are_found_by_their_vision_id(tmp_path, name, place):
    media = tmp_path / "media"
    (media / "v_1").mkdir(parents=True)
    (media / "clips").mkdir()
    (media / "clips" / "v_2.mp4").touch()
    write_records(tmp_path / "vqa.jsonl", [FreeAnswer(vision_id=name, question="Q?", answer="A.")])
    (record,) = read_records(tmp_path / "vqa.jsonl", media)
    assert record.video == str(media / place)


HUMAN = {"from": "human", "value": "Q"}
GPT = {"from": "gpt", "value": "A"}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "expected human and gpt in turn"),
        ([GPT, HUMAN], "expected human and gpt in turn"),
        ([HUMAN, {"from": "tool", "value": "12:00"}, GPT], "write a tool's response into"),
        ([HUMAN, {**GPT, "value": None}], "conversations.1.value is null; expected a text"),
        ([{**HUMAN, "value": "<image>"}, GPT], "question is empty"),
        ("Q", "is 'Q'; expected a valid list"),
    ],
)
def test_broken_conversations_are_named(turns, message, tmp_path):
    path = tmp_path / "llava.json"
    path.write_text(json.dumps([{"id": 5, "video": "a.mp4", "conversations": turns}]))
    (row,) = iter_rows(path)
    assert row.record is None
    assert message in row.problem
    assert row.id == "5"


def test_a_conversation_about_an_image_is_not_one_about_nothing(tmp_path):
    path = tmp_path / "llava.json"
    path.write_text(json.dumps([{"image": "a.jpg", "conversations": [HUMAN, GPT]}]))
    with pytest.raises(ValueError, match="Row 1 of .* is not a record: it is about an image; expected a conversation"):
        read_records(path)


@pytest.mark.parametrize("text", ['[{"a": 1}', '[{"a": 1} {"a": 2}]', "[nonsense]", '[{"a": 1}] {}', '[{"a": 1}, '])
def test_a_broken_array_ends_the_reading(text, tmp_path):
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(ValueError, match=r"set\.json is not a JSON array"):
        list(iter_rows(tmp_path / "set.json"))
    (tmp_path / "set.jsonl").write_text(text)
    for row in iter_rows(tmp_path / "set.jsonl"):
        assert row.record is None, "lines hold no arrays"


def test_good_rows_are_read_beside_bad_ones(tmp_path):
    path = tmp_path / "set.jsonl"
    good = b'{"vision_id": "v", "question": "Q?", "answer": "A."}'
    lines = [good, b"", b'{"a": 1, "a": 2}', b"\xff\xfe", b"[1]", good, b"[" * 100_000]
    path.write_bytes(b"\n".join(lines))
    rows = list(iter_rows(path))
    assert [row.number for row in rows] == [1, 3, 4, 5, 6, 7]
    assert [row.number for row in rows if row.record is not None] == [1, 6]
    with pytest.raises(ValueError, match=r"Row 3 of .*set\.jsonl is not a record: it is not JSON .* of the keys a one"):
        read_records(path)


def test_an_item_longer_than_a_block_is_read(tmp_path):
    captions = [Caption(vision_id="v", caption="x" * size) for size in (10, 300_000, 70_000)]
    write_records(tmp_path / "set.json", captions)
    assert records_of(tmp_path / "set.json") == captions


# --- Tables ---


def test_a_broken_table_is_named(arrow, tmp_path):
    (tmp_path / "set.parquet").write_bytes(b"PAR1 is not all of it")
    with pytest.raises(ValueError, match=r"set\.parquet cannot be read as Parquet"):
        list(iter_rows(tmp_path / "set.parquet"))


def test_without_pyarrow_a_table_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "set.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[parquet\]' in a clone"):
        list(iter_rows(tmp_path / "set.parquet"))


def test_a_time_that_python_does_not_have_is_refused(arrow, tmp_path):
    write_table(tmp_path / "set.parquet", arrow.table({"when": arrow.array([0, 2**62], arrow.timestamp("us"))}))
    with pytest.raises(ValueError, match=r"set\.parquet cannot be read as Parquet"):
        list(iter_rows(tmp_path / "set.parquet"))


def test_decimals_are_numbers(arrow, tmp_path):
    path = tmp_path / "set.parquet"
    columns = {"id": [Decimal("7.00"), Decimal("8.50")], "nested": [{"x": Decimal("2")}, {"x": None}]}
    write_table(path, arrow.Table.from_pydict(columns))
    first, second = iter_rows(path)
    assert first.content == {"id": 7, "nested": {"x": 2}}
    assert type(first.content["id"]) is int
    assert second.content == {"id": 8.5, "nested": {}}


@pytest.mark.parametrize("number", [7, Decimal("7.00")], ids=["whole", "decimal"])
def test_an_id_that_is_a_number_is_read_as_its_text(arrow, tmp_path, number):
    path = tmp_path / "set.parquet"
    question = {"video": "a.mp4", "question": "Who?", "answer": "I.", "id": number}
    caption = {"vision_id": "a", "caption": "A man.", "id": number}
    for row in (question, caption):
        write_table(path, arrow.Table.from_pylist([row]))
        (record,) = records_of(path)
        assert record.id == "7"
