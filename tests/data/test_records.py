"""The records of a set: what they hold, what they refuse, and how a model reads them."""

import pytest

from qtsplus.data.records import (
    Caption,
    Choice,
    FreeAnswer,
    VideoRecord,
    parse_record,
    to_video_record,
)

CHOICE = {
    "vision_id": "v_1",
    "question": "What is the man holding?",
    "options": {"A": "a cup", "B": "a rope", "C": "a hat", "D": "a phone"},
    "answer": "B",
}
CLIP = {"video": None, "question": "What?", "options": ["cup", "rope"], "answer": "A"}


def test_a_row_is_the_record_that_its_keys_name():
    assert isinstance(parse_record(CHOICE), Choice)
    assert isinstance(parse_record({"vision_id": "v", "caption": "A man climbs."}), Caption)
    assert isinstance(parse_record({"vision_id": "v", "question": "Who?", "answer": "A man."}), FreeAnswer)
    assert isinstance(parse_record({"video": None, "question": "Who?", "answer": "A man."}), VideoRecord)


def test_the_reference_calls_a_free_answer_a_prediction():
    record = parse_record({"vision_id": "v", "question": "Who?", "prediction": "A man."})
    assert record == FreeAnswer(vision_id="v", question="Who?", answer="A man.")


def test_a_choice_is_asked_with_its_options_and_selects_by_its_question():
    record = to_video_record(Choice(**CHOICE, type="object", fps=2.0), "media/v_1")
    assert record.video == "media/v_1" and record.query == CHOICE["question"] and record.answer == "B"
    assert (record.source, record.kind, record.fps) == ("mcq", "object", 2.0)
    assert record.question == (
        "What is the man holding?\nA. a cup\nB. a rope\nC. a hat\nD. a phone\nAnswer with the letter."
    )
    free = to_video_record(FreeAnswer(vision_id="v", question="Who?", answer="A man."))
    assert (free.video, free.question, free.answer, free.source) == ("v", "Who?", "A man.", "vqa")
    with pytest.raises(ValueError, match="it is a caption"):
        to_video_record(Caption(vision_id="v", caption="A man."))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"A": "1", "B": "2", "C": "3"}}, "options has A, B, C; expected A, B, C and D"),
        ({"options": {**CHOICE["options"], "E": "5"}}, "options.E is 'E'; expected 'A', 'B', 'C' or 'D'"),
        ({"options": {**CHOICE["options"], "D": " A  Rope"}}, "expected 2 to 26 different texts"),
        ({"options": ["1", "2", "3", "4"]}, "options is .*; expected a mapping"),
        ({"answer": "E"}, "answer is 'E'; expected 'A', 'B', 'C' or 'D'"),
        ({"question": " "}, "question is empty; expected some text"),
        ({"question": "\ud800"}, "question is .*; expected a valid string"),
        ({"vision_id": "../etc"}, "vision_id is '../etc'; expected a path inside the videos' folder"),
        ({"vision_id": "/etc"}, "vision_id is '/etc'; expected a path inside"),
        ({"type": 5}, "type is 5; expected a text"),
        ({"fps": float("nan")}, "fps is nan; expected a finite number"),
        ({"fps": 0}, "fps is 0; expected more than 0"),
        ({"id": ["7"]}, r"id is \['7'\]; expected a text"),
    ],
)
def test_what_a_choice_refuses_is_named_with_what_is_expected(change, message):
    with pytest.raises(ValueError, match=message):
        parse_record({**CHOICE, **change})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "expected a JSON object, got a list"),
        ({"question": "What?"}, "video is missing; answer is missing"),
        (CLIP | {"answer": "hat"}, "answer is 'hat'; expected the letter or the text of one of the options"),
        (CLIP | {"answer": "C"}, "answer is 'C'; expected the letter or the text"),
        (CLIP | {"options": ["cup", " Cup. "]}, "options is .*; expected 2 to 26 different texts"),
        (CLIP | {"options": ["cup"]}, "options is .*; expected 2 to 26 different texts"),
        (CLIP | {"options": [*map(str, range(27))]}, "options is .*; expected 2 to 26 different texts"),
        (CLIP | {"options": ["cup", ""]}, "options.1 is empty; expected some text"),
        ({"vision_id": "v", "question": "What?"}, "answer is missing"),
    ],
)
def test_what_is_no_record_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        parse_record(row)
