"""Which answers `qtsplus watch` tells, and what it runs for them."""

import json
from itertools import groupby
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.cli.watch import _told

# By answer, one a second, until when the evidence is. It shows the thing but for the first answer.
SEEN = {"a": 1, "A": 2, "b": 3, "B": 3, "c": 5}
ANSWERS = []
for second, (text, end) in enumerate(SEEN.items(), 1):
    evidence = [SimpleNamespace(end=second - 1), SimpleNamespace(end=end)]
    ANSWERS.append(
        SimpleNamespace(answer=text.lower(), shown=second > 1, evidence=evidence, seconds_of_video=second),
    )


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
    assert [answer for answer, _ in told] == [ANSWERS[number] for number in numbers]
    for answer, evidence in told:
        assert (evidence == answer.evidence) != when_seen, "of what was seen before nothing is told"


def test_only_a_new_answer_is_told(tiny_published, tiny_mp4):
    line = ["watch", str(tiny_mp4), "What?", "--model", str(tiny_published), "--every", "1", "--json"]

    def answers(options):
        printed = CliRunner().invoke(app, line + options).stdout
        return [json.loads(text) for text in printed.splitlines()]

    every = answers([])
    assert [answer["seconds_of_video"] for answer in every] == [1, 2, 3, 4]
    changes = [text for text, _ in groupby(answer["answer"] for answer in every)]
    assert [answer["answer"] for answer in answers(["--on-change"])] == changes
