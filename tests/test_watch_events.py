"""Which answers `qtsplus watch` tells, and what it runs for them."""

import json
import shutil
import subprocess
import sys
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


def test_a_command_runs_for_each_answer_that_is_told(tiny_published, tiny_mp4, tmp_path):
    log, script = tmp_path / "log", tmp_path / "keep it.py"
    script.write_text("import sys\nopen(sys.argv[1], 'a').write(sys.stdin.read())\nsys.exit(3)\n")
    command = [sys.executable, "-m", "qtsplus.cli", "watch", str(tiny_mp4), "What?", "--model", str(tiny_published)]
    command += ["--every", "1", "--timeout", "0.2", "--json", "--run", f"'{sys.executable}' '{script}' '{log}'"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert log.read_text() == ended.stdout and len(ended.stdout.splitlines()) == 4
    assert json.loads(ended.stdout.splitlines()[0])["seconds_of_video"] == 1
    assert ended.stderr.count("ended with exit code 3") == 4
    command[command.index("--json")] = "--on-change"
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    answers = [json.loads(line)["answer"] for line in log.read_text().splitlines()[4:]]
    assert answers and all(one != other for one, other in zip(answers, answers[1:], strict=False))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--when-seen", "nan"], "--when-seen is nan; expected a part from 0 to 1"),
        (["--when-seen", "1.5"], "--when-seen is 1.5; expected a part from 0 to 1"),
        (["--run", "no-such-command-here"], "there is none of that name"),
        (["--run", "'open"], "No closing quotation"),
        (["--run", "   "], "--run is empty"),
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
