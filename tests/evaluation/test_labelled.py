"""Where an answer can be seen: boxes in shares of the frame, and the visual tokens that they fill."""

import json
import re

import pytest

from qtsplus.data.check import check_set
from qtsplus.evaluation.labelled import Sighting, labelled_questions, sighting_tokens

GRID = (2, 4, 8)


@pytest.mark.parametrize(
    ("sighting", "tokens"),
    [
        (Sighting(0, 1, (0.125, 0, 0.25, 0.125)), [1]),
        (Sighting(0, 1), list(range(32))),
        (Sighting(0, 1, (0.1, 0.2, 0.4, 0.6)), [9, 10, 17, 18]),
        (Sighting(0, 1, (0, 0.3, 1, 0.31)), list(range(8, 16))),
    ],
    ids=["shares", "only the time is known", "large", "thin"],
)
def test_a_box_is_shown_by_the_tokens_that_share_enough_with_it(sighting, tokens):
    assert sighting_tokens([sighting], GRID, range(3)).tolist() == tokens


def test_a_part_of_a_step_counts():
    sighting = Sighting(0.5, 2, (0, 0, 1, 1))
    assert sighting_tokens([sighting], (2, 1, 1), range(3)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("sighting", "message"),
    [
        ({"box": [80, 0, 1, 1]}, r"0\.0\.box\.0 is 80; expected at most 1"),
        ({"box": [0.5, 0, 0.5, 1]}, "is empty; expected left, top, right and bottom"),
        ({"box": [0, 0, 1]}, r"0\.0\.box\.3 is missing"),
        ({"end": None}, r"0\.0\.end is null"),
        ({"start": -1}, r"0\.0\.start is -1; expected at least 0"),
        ({"end": float("nan")}, r"0\.0\.end is nan; expected a finite number"),
        ({"start": 2}, "It ends at 1 s, before its start at 2 s"),
    ],
)
def test_another_box_is_refused_with_its_file(sighting, message, tmp_path):
    path = tmp_path / "records.jsonl"
    evidence = [[{"start": 0, "end": 1, **sighting}]]
    record = {"video": "a.mp4", "question": "What?", "answer": "This.", "evidence": evidence}
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"records.jsonl: the evidence of 'What.' is not a list of needles.*{message}"):
        labelled_questions(path)
    assert re.search(message, check_set(path).bad[0].reason)
