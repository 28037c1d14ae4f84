"""Which answers `qtsplus watch` tells, and what it runs for them."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.cli.watch import _told

ANSWERS = [
    SimpleNamespace(answer=text, seen=seen, seen_threshold=0.8)
    for text, seen in [("a", 0.1), ("a", 0.9), ("b", 0.8), ("b", 0.2), ("c", 0.85)]
]


@pytest.mark.parametrize(
    "on_change, when_seen, numbers",
    [
        (False, False, [0, 1, 2, 3, 4]),
        (True, False, [0, 2, 4]),
        (False, True, [1, 4]),  # as often as the video begins to show it
        (True, True, [1, 2, 4]),
    ],
)
def test_which_answers_are_told(on_change, when_seen, numbers):
    told = list(_told(ANSWERS, on_change, when_seen))
    assert told == [ANSWERS[number] for number in numbers]


def test_only_a_new_answer_is_told(tiny_published, tiny_mp4):
    line = ["watch", str(tiny_mp4), "What?", "--model", str(tiny_published), "--every", "1", "--timeout", "0.2"]
    told = [CliRunner().invoke(app, [*line, "--json", *more]).stdout.splitlines() for more in ([], ["--on-change"])]
    every, new = ([json.loads(one) for one in lines] for lines in told)
    assert [one["seconds_of_video"] for one in every] == [1, 2, 3, 4]
    said = [one["answer"] for one in every]
    changes = [text for number, text in enumerate(said) if not number or text != said[number - 1]]
    assert [one["answer"] for one in new] == changes
