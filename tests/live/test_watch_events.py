"""Which answers `qtsplus watch` prints."""

import json
from itertools import groupby

from typer.testing import CliRunner

from qtsplus.cli import app


def test_only_a_new_answer_is_printed(tiny_published, tiny_mp4):
    line = ["watch", str(tiny_mp4), "What?", "--model", str(tiny_published), "--every", "1", "--json"]

    def answers(options):
        result = CliRunner().invoke(app, line + options)
        return [json.loads(text) for text in result.stdout.splitlines()]

    every = answers([])
    times = [answer["seconds_of_video"] for answer in every]
    assert times == [1, 2, 3, 4]
    changes = [text for text, _ in groupby(answer["answer"] for answer in every)]
    new = [answer["answer"] for answer in answers(["--on-change"])]
    assert new == changes
