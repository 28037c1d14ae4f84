"""Sets on disk: what is written is read back, from every format; readers stream; bad rows are told by their number."""

import json
import re
import sys
import tracemalloc
from decimal import Decimal
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtsplus.data.formats import Unreadable, iter_records, iter_rows, read_records
from qtsplus.data.records import LETTERS, QUESTION_TYPES, Caption, Choice, Difficulty, FreeAnswer, VideoRecord
from set_files import write_records

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip)
NAME = st.text("abcXYZ019_-", min_size=1, max_size=8)
NAMES = st.lists(NAME, min_size=1, max_size=3).map("/".join)
SHARED = {
    "vision_id": NAMES,
    "id": st.none() | TEXT,
    "fps": st.none() | st.floats(min_value=0.01, max_value=1000, allow_nan=False),
}
LABELS = {
    "type": st.none() | st.sampled_from(QUESTION_TYPES),
    "difficulty": st.none() | st.sampled_from(get_args(Difficulty)),
}
OPTIONS = st.lists(TEXT, min_size=4, max_size=4, unique_by=lambda text: " ".join(text.casefold().split()))
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
TURNS = st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple)
QUESTIONS = st.builds(
    VideoRecord,
    video=st.none() | NAMES,
    question=TEXT,
    answer=TEXT,
    query=st.none() | TEXT,
    kind=st.just("") | TEXT,
    source=st.sampled_from(["mcq", "vqa", "caption"]),
    options=st.none() | st.lists(TEXT, min_size=1, max_size=4).map(tuple),
    earlier=TURNS,
    fps=SHARED["fps"],
    id=SHARED["id"],
)
KINDS = {"captions": CAPTIONS, "answers": ANSWERS, "choices": CHOICES, "questions": QUESTIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


@pytest.mark.parametrize("ending", ["jsonl", "json"])
@settings(max_examples=50)
@given(records=st.lists(st.one_of(*KINDS.values()), max_size=5))
def test_lines_and_arrays_give_back_what_was_written(ending, records, folder):
    path = folder / f"set.{ending}"
    write_records(path, records)
    assert list(iter_records(path)) == records


def write_table(path, records):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [record.row() for record in records]
    names = dict.fromkeys(name for row in rows for name in row)
    parquet.write_table(pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), path)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_give_back_what_was_written(kind, folder):
    @settings(max_examples=30)
    @given(records=st.lists(KINDS[kind], min_size=1, max_size=5))
    def round_trip(records):
        path = folder / f"{kind}.parquet"
        write_table(path, records)
        assert list(iter_records(path)) == records

    round_trip()


def test_rows_of_the_reference_and_of_llava_are_read_as_they_are_published(tmp_path):
    options = {"A": "a cup", "B": "a rope", "C": "a hat", "D": "a phone"}
    choice = {"vision_id": "v_1", "question": "What is held?", "options": options, "answer": "B"}
    about = {"difficulty": "medium", "rationale": "A rope.", "evidence": "holding a rope"}
    free = {"vision_id": "v_2", "question": "Why?", "prediction": "To climb."}
    (tmp_path / "set.jsonl").write_text(f"{json.dumps({**choice, **about})}\n{json.dumps(free)}\n")
    assert list(iter_records(tmp_path / "set.jsonl")) == [
        Choice(**choice, **about),
        FreeAnswer(vision_id="v_2", question="Why?", answer="To climb."),
    ]
    human, gpt = {"from": "human", "value": "<image>\nWhat moves?"}, {"from": "gpt", "value": "A car."}
    more = [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "On a road."}]
    row = {"id": "Zi4", "conversations": [human, gpt, *more], "data_source": "0_30_s", "video": "videos/Zi4.mp4"}
    for text in (json.dumps(row), json.dumps([row], indent=2), f"\ufeff [{json.dumps(row)} ]\n"):
        (tmp_path / "llava.json").write_text(text)
        (record,) = iter_records(tmp_path / "llava.json")
        assert record == VideoRecord(
            "videos/Zi4.mp4", "Where?", "On a road.", earlier=(("What moves?", "A car."),), id="Zi4"
        )
    (tmp_path / "0_30_s" / "videos").mkdir(parents=True)
    (tmp_path / "0_30_s" / "videos" / "Zi4.mp4").touch()
    (record,) = read_records(tmp_path / "llava.json")
    assert record.video == str(tmp_path / "0_30_s" / "videos" / "Zi4.mp4")
    (record,) = read_records(tmp_path / "llava.json", tmp_path / "0_30_s")
    assert record.video == str(tmp_path / "0_30_s" / "videos" / "Zi4.mp4")


def test_media_are_found_by_their_vision_id(tmp_path):
    (tmp_path / "media" / "v_1").mkdir(parents=True)
    (tmp_path / "media" / "clips").mkdir()
    (tmp_path / "media" / "clips" / "v_2.mp4").touch()
    names = ["v_1", "clips/v_2", "clips/v_2.mp4", "missing"]
    write_records(tmp_path / "vqa.jsonl", [FreeAnswer(vision_id=name, question="Q?", answer="A.") for name in names])
    found = [record.video for record in read_records(tmp_path / "vqa.jsonl", tmp_path / "media")]
    places = ["v_1", "clips/v_2.mp4", "clips/v_2.mp4", "missing"]
    assert found == [str(tmp_path / "media" / name) for name in places]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "expected turns of human and gpt"),
        ([{"from": "human", "value": "Q"}], "expected turns of human and gpt"),
        ([{"from": "gpt", "value": "A"}, {"from": "human", "value": "Q"}], "expected a value from human"),
        ([{"from": "human", "value": "Q"}, {"from": "gpt", "value": None}], "expected a value from gpt"),
        ([{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A"}], "question is empty"),
        ("Q", "expected turns"),
    ],
)
def test_broken_conversations_are_named(turns, message, tmp_path):
    (tmp_path / "llava.json").write_text(json.dumps([{"id": 5, "video": "a.mp4", "conversations": turns}]))
    (row,) = iter_rows(tmp_path / "llava.json")
    assert row.record is None and message in row.problem and row.id == "5"


@pytest.mark.parametrize("text", ['[{"a": 1}', '[{"a": 1} {"a": 2}]', "[nonsense]", '[{"a": 1}] {}', '[{"a": 1}, '])
def test_a_broken_array_ends_the_reading(text, tmp_path):
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(ValueError, match=r"set\.json is no JSON array"):
        list(iter_rows(tmp_path / "set.json"))
    (tmp_path / "set.jsonl").write_text(text)
    assert all(row.record is None for row in iter_rows(tmp_path / "set.jsonl")), "lines hold no arrays"


def test_good_rows_stand_beside_bad_ones(tmp_path):
    good = json.dumps({"vision_id": "v", "question": "Q?", "answer": "A."}).encode()
    lines = [good, b"", b"{broken", b"\xff\xfe", b"[1]", good, b"[" * 100_000]
    (tmp_path / "set.jsonl").write_bytes(b"\n".join(lines))
    rows = list(iter_rows(tmp_path / "set.jsonl"))
    assert [row.number for row in rows] == [1, 3, 4, 5, 6, 7]
    assert [row.record is None for row in rows] == [False, True, True, True, False, True]
    with pytest.raises(ValueError, match=r"Row 3 of .*set\.jsonl is not a record: it is no JSON"):
        read_records(tmp_path / "set.jsonl")


def test_a_broken_table_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "set.parquet").write_bytes(b"PAR1 is not all of it")
    with pytest.raises(ValueError, match=r"set\.parquet cannot be read as Parquet"):
        list(iter_rows(tmp_path / "set.parquet"))


def test_a_repeated_column_is_named(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [arrow.array(["a.mp4"]), arrow.array(["One?"]), arrow.array(["Two?"]), arrow.array(["Yes."])]
    names = ["video", "question", "question", "answer"]
    parquet.write_table(arrow.Table.from_arrays(columns, names), tmp_path / "set.parquet")
    with pytest.raises(ValueError, match=r"set\.parquet has the column 'question' more than once"):
        list(iter_rows(tmp_path / "set.parquet"))


REPEATED_KEY = '{"vision_id": "v", "question": "One?", "question": "Two?", "answer": "Yes."}'


def test_a_repeated_key_is_named(tmp_path):
    (tmp_path / "set.jsonl").write_text(REPEATED_KEY)
    (row,) = iter_rows(tmp_path / "set.jsonl")
    assert row.record is None and "it has the key 'question' more than once" in row.problem
    (tmp_path / "set.json").write_text(f"[{REPEATED_KEY}]")
    with pytest.raises(ValueError, match=r"set\.json is no JSON .*the key 'question' more than once"):
        list(iter_rows(tmp_path / "set.json"))


def test_without_pyarrow_a_table_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "set.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[parquet\]' in a clone"):
        list(iter_rows(tmp_path / "set.parquet"))


def odd_columns():
    """By name a column that Python cannot hold, whole or in its second row."""
    arrow = pytest.importorskip("pyarrow")
    years = arrow.array([0, 2**62], arrow.timestamp("us"))
    ends = arrow.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]))
    texts = arrow.Array.from_buffers(arrow.string(), 2, [None, ends, arrow.py_buffer(b"a\xff")])
    return {
        "an unknown time zone": arrow.array([0, 0], arrow.timestamp("us", tz="Nowhere/Else")),
        "a time after the year 9999": years,
        "a date after it": arrow.array([0, 2**31 - 1], arrow.date32()),
        "a long duration": arrow.array([0, 2**62], arrow.duration("s")),
        "a list of times": arrow.array([[0], [2**62]], arrow.list_(arrow.timestamp("us"))),
        "no UTF-8": texts,
    }


@pytest.mark.parametrize("name", ["an unknown time zone", "a time after the year 9999", "a date after it"])
def test_a_column_that_cannot_be_read_costs_only_the_rows_that_need_it(tmp_path, name):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    record = {"video": ["a.mp4"] * 2, "question": ["Who?"] * 2, "answer": ["I."] * 2}
    column = odd_columns()[name]
    parquet.write_table(arrow.table({**record, "when": column}), tmp_path / "set.parquet")
    assert [row.problem for row in iter_rows(tmp_path / "set.parquet")] == [None, None]
    parquet.write_table(arrow.table({**record, "answer": column}), tmp_path / "set.parquet")
    second = list(iter_rows(tmp_path / "set.parquet"))[1]
    assert second.record is None
    assert re.search("answer is an unreadable (timestamp|date32); expected a text", second.problem)


def test_no_cell_of_a_table_is_a_traceback(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = odd_columns()
    parquet.write_table(arrow.table({"video": ["a.mp4"] * 2, **columns}), tmp_path / "set.parquet")
    second = list(iter_rows(tmp_path / "set.parquet"))[1]
    assert second.content["video"] == "a.mp4"
    assert {name: type(second.content[name]) for name in columns} == dict.fromkeys(columns, Unreadable)


def test_decimals_are_numbers(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"id": [Decimal("7.00"), Decimal("8.50")], "nested": [{"x": Decimal("2")}, {"x": None}]}
    parquet.write_table(arrow.Table.from_pydict(table), tmp_path / "set.parquet")
    first, second = (row.content for row in iter_rows(tmp_path / "set.parquet"))
    assert (first, second) == ({"id": 7, "nested": {"x": 2}}, {"id": 8.5, "nested": {}})
    assert type(first["id"]) is int


@pytest.mark.parametrize("name", ["set.jsonl", "set.parquet"])
def test_readers_hold_no_more_of_a_longer_file(name, tmp_path):
    write = write_table if name.endswith("parquet") else write_records
    peaks = []
    for count in (1_000, 6_000):
        write(
            tmp_path / name,
            (Caption(vision_id=f"v{index}", caption="A man climbs a wall. " * 5) for index in range(count)),
        )
        held = []
        for _ in range(4):  # the first imports, and what another test left running may allocate in between
            tracemalloc.start()
            assert sum(1 for _ in iter_rows(tmp_path / name)) == count
            held.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        peaks.append(min(held))
    assert peaks[1] < 1.5 * peaks[0] + 2**20, f"a file six times as long held {peaks} bytes at most"


def test_an_item_longer_than_a_block_is_read(tmp_path):
    captions = [Caption(vision_id="v", caption="x" * size) for size in (10, 300_000, 70_000)]
    write_records(tmp_path / "set.json", captions)
    assert list(iter_records(tmp_path / "set.json")) == captions


def test_a_mark_of_its_encoding_in_front_is_none_of_a_file(tmp_path):
    row = '{"video": "a.mp4", "question": "What?", "answer": "red"}\n'
    (tmp_path / "set.jsonl").write_text(2 * row, encoding="utf-8-sig")
    assert [one.problem for one in iter_rows(tmp_path / "set.jsonl")] == [None, None]
