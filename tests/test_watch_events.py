"""Which answers `qtsplus watch` tells, and what it runs for them."""

import json
import shutil
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.cli.watch import _told

ANSWERS = [SimpleNamespace(answer=text, seen=seen) for text, seen in [("a", 0.1), ("a", 0.9), ("b", 0.8), ("b", 0.2)]]
ANSWERS += [SimpleNamespace(answer="c", seen=0.85)]


@pytest.mark.parametrize(
    "on_change, when_seen, numbers",
    [
        (False, None, [0, 1, 2, 3, 4]),
        (True, None, [0, 2, 4]),
        (False, 0.8, [1, 4]),  # as often as it becomes sure
        (True, 0.8, [1, 2, 4]),
        (False, 0.0, [0]),
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


@pytest.mark.parametrize(
    "options, message",
    [
        (["--when-seen", "nan"], "--when-seen is nan; expected a part from 0 to 1"),
        (["--when-seen", "1.5"], "--when-seen is 1.5; expected a part from 0 to 1"),
    ],
)
def test_bad_options(options, message, tiny_mp4):
    result = CliRunner().invoke(app, ["watch", str(tiny_mp4), "What?", *options])
    assert result.exit_code == 2 and message in result.output


def test_a_model_that_cannot_say_how_sure_it_is(tiny_published, tiny_mp4, tmp_path):
    folder = shutil.copytree(tiny_published, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["qtsplus_config"]["null_token"] = False
    (folder / "config.json").write_text(json.dumps(config))
    options = ["--model", str(folder), "--when-seen", "0.8", "--timeout", "0.2"]
    result = CliRunner().invoke(app, ["watch", str(tiny_mp4), "What?", *options])
    assert result.exit_code == 2 and "null token" in result.output
