"""`qtsplus chat` as a user runs it, through a pipe and in a terminal; and `qtsplus ask --evidence`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from qtsplus.asking.session import VideoSession
from qtsplus.cli import app
from qtsplus.cli.demonstration import CLIP, QUESTIONS

(INSIDE, MARK), (COLOURS, TAKEN) = QUESTIONS


def run(command, model, *arguments, text=None):
    words = [command, *arguments, "--model", model]
    line = [str(word) for word in words]
    return CliRunner().invoke(app, line, input=text)


@pytest.fixture
def chat(tiny_published, shared_model):
    """Runs `chat` about videos, with these lines from a pipe."""

    def run_chat(lines, *options, videos=(CLIP,)):
        return run("chat", tiny_published, *videos, *options, text="\n".join(lines))

    return run_chat


def assert_answered_after_an_error(result, reason):
    """One line on standard error is about the line that failed, and the next line was answered."""
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{MARK}\n")
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("qtsplus: ")]
    assert reason in error


def test_questions_through_a_pipe(chat):
    result = chat([INSIDE, COLOURS, "/quit", "never asked"], "--json")
    assert result.exit_code == 0, result.stderr
    first, second = [json.loads(line) for line in result.stdout.splitlines()]
    assert first["answer"] == MARK
    assert second["answer"] == TAKEN
    assert first["evidence"][0]["video"] == "demo.mp4"


def test_an_answer_about_two_videos_names_both(chat):
    answer = json.loads(chat([INSIDE], "--json", videos=(CLIP, CLIP)).stdout)
    assert answer["answer"] == MARK
    assert answer["video"] == "demo.mp4, demo.mp4 (2)"


def test_a_conversation_that_is_too_long_says_what_is_left_out(tiny_published, tmp_path):
    folder = shutil.copytree(tiny_published, tmp_path / "short")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["max_position_embeddings"] = 100
    path.write_text(json.dumps(config))
    result = run("chat", folder, CLIP, "--max-new-tokens", 8, text="\n".join([INSIDE] * 6))
    assert result.exit_code == 0
    assert result.stdout.count(MARK) == 6
    assert "The model has 100 positions, so the oldest questions of the conversation were left out: 1." in result.stderr
    result = run("chat", folder, CLIP, "--max-new-tokens", 90, text=INSIDE)
    assert result.exit_code == 1
    assert "positions, and the model has 100" in result.stderr
    assert not result.stdout


def test_bytes_that_are_no_text_are_one_line(tiny_published, shared_model):
    result = run("chat", tiny_published, CLIP, text=b"\xff\xfe\n" + INSIDE.encode())
    assert_answered_after_an_error(result, "expected Unicode")


def test_a_video_that_is_not_there_ends_before_anything_is_loaded(chat):
    result = chat([INSIDE], videos=(CLIP, "/nowhere.mp4"))
    assert result.exit_code == 2
    assert not result.stdout
    assert "there is no video at '/nowhere.mp4'" in result.stderr


def interrupt(*arguments, **options):
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_with_130_and_no_traceback(chat, monkeypatch):
    """While an answer is made; signals themselves are sent in the tests of `qtsplus watch` and `qtsplus index`."""
    monkeypatch.setattr(VideoSession, "chat", interrupt)
    result = chat([INSIDE])
    assert result.exit_code == 130
    assert not result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_in_a_terminal_there_is_a_prompt_and_ctrl_d_ends(tiny_published):
    ours, theirs = pytest.importorskip("pty").openpty()
    command = [sys.executable, "-m", "qtsplus.cli", "chat", str(CLIP), "--model", str(tiny_published)]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
    )
    os.close(theirs)
    deadline = time.monotonic() + 120
    shown = []

    def wait_for(words):
        while words not in "".join(shown):
            assert time.monotonic() < deadline, shown
            shown.append(os.read(ours, 4096).decode())

    wait_for("> ")
    os.write(ours, b"/nope\n")
    wait_for("there is no command /nope")
    os.write(ours, INSIDE.encode() + b"\n")
    wait_for("generate")
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0, "a line that failed is seen in a terminal"
    os.close(ours)


def test_ask_draws_its_evidence_and_refuses_a_folder_beforehand(tiny_published, shared_model, tmp_path):
    drawn = tmp_path / "drawn"
    ask = ["ask", tiny_published, CLIP, INSIDE, "--evidence", drawn]
    for _ in range(2):  # what it wrote itself, it replaces
        result = run(*ask, "--json")
        assert result.exit_code == 0, result.stderr
        content = json.loads((drawn / "answer.json").read_text())
        assert content["evidence"] == json.loads(result.stdout)["evidence"]
        assert len(content["videos"][0]["kept"]) == content["kept_tokens"]
    (drawn / "mine.txt").write_text("mine")
    result = run(*ask)
    assert result.exit_code == 2
    assert not result.stdout
    assert "mine.txt" in result.stderr
