"""Where an answer can be seen: boxes in pixels of a frame or in shares of it, and the visual tokens that they fill."""

import json

import pytest

from qtsplus.evaluation.labelled import Sighting, labelled_questions, sighting_tokens

GRID = (2, 4, 8)


def test_pixels_and_shares_are_the_same_tokens():
    pixels = Sighting(0, 1, (80, 0, 160, 45), frame=(640, 360))
    shares = Sighting(0, 1, (0.125, 0, 0.25, 0.125))
    assert sighting_tokens([pixels], GRID).tolist() == sighting_tokens([shares], GRID).tolist() == [1]
    assert sighting_tokens([Sighting(0.5, 2, (0, 0, 1, 1))], (2, 1, 1)).tolist() == [0, 1]


def test_large_and_thin_things_are_shown_by_tokens_too():
    assert sighting_tokens([Sighting(0, 1, (0, 0, 1, 1))], GRID).tolist() == list(range(32))
    assert sighting_tokens([Sighting(0, 1, (0.1, 0.2, 0.4, 0.6))], GRID).tolist() == [9, 10, 17, 18]
    assert sighting_tokens([Sighting(0, 1, (0, 0.3, 1, 0.31))], GRID).tolist() == list(range(8, 16))
    assert sighting_tokens([Sighting(0, 1, (700, 0, 800, 90), frame=(640, 360))], GRID).tolist() == []


@pytest.mark.parametrize(
    ("sighting", "message"),
    [
        ({"box": [80, 0, 160, 90]}, "has no frame; expected shares of the frame from 0 to 1"),
        ({"box": [0.5, 0, 0.5, 1]}, "is empty; expected left, top, right and bottom"),
        ({"box": [0, 0, 1]}, r"0\.0\.box\.3 is missing"),
        ({}, r"0\.0\.box is missing"),
    ],
)
def test_another_box_is_refused_with_its_file(sighting, message, tmp_path):
    path = tmp_path / "records.jsonl"
    record = {"video": "a.mp4", "question": "What?", "answer": "This."}
    path.write_text(json.dumps({**record, "evidence": [[{"start": 0, "end": 1, **sighting}]]}) + "\n")
    with pytest.raises(ValueError, match=f"records.jsonl: the evidence of 'What.' is not a list of needles.*{message}"):
        labelled_questions(path)
