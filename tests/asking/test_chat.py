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


@pytest.fixture
def chat(tiny_published, shared_model):
    def run(lines, *arguments, videos=(CLIP,)):
        named = [*map(str, videos), "--model", str(tiny_published), *map(str, arguments)]
        return CliRunner().invoke(app, ["chat", *named], input=lines if isinstance(lines, bytes) else "\n".join(lines))

    return run


def test_questions_and_commands_through_a_pipe(chat, tmp_path):
    result = chat([INSIDE, COLOURS, "/quit", "never asked"], "--json")
    assert result.exit_code == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert [one["answer"] for one in (first, second)] == [MARK, TAKEN]
    assert first["evidence"][0]["video"] == "demo.mp4"
    both = chat([INSIDE, f"/evidence {tmp_path / 'drawn'}"], "--json", videos=(CLIP, CLIP))
    both = json.loads(both.stdout)
    assert both["answer"] == MARK and both["visual_tokens"] == 2 * first["visual_tokens"]
    assert both["video"] == "demo.mp4, demo.mp4 (2)"
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir() if path.name[0] != ".") == [
        *("answer.json", "frames-1.png", "frames-2.png")
    ]


def test_a_conversation_that_is_too_long_says_what_is_left_out(tiny_published, tmp_path):
    folder = shutil.copytree(tiny_published, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    line = ["chat", str(CLIP), "--model", str(folder), "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, line, input="\n".join([INSIDE] * 6))
    assert result.exit_code == 0 and result.stdout.count(MARK) == 6
    assert "The model has 100 positions. Left out of the conversation, the oldest questions: 1." in result.stderr
    result = CliRunner().invoke(app, [*line[:-1], "90"], input=INSIDE)
    assert result.exit_code == 1 and "positions, and the model has 100" in result.stderr and not result.stdout


BAD_LINES = {
    "/evidence": "ask something first",
    "/nope": "there is no command /nope",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_fails_is_one_line_and_the_next_is_answered(chat, line):
    result = chat([line, INSIDE])
    assert result.exit_code == 1 and result.stdout.startswith(f"{MARK}\n"), result.stderr
    (error,) = (one for one in result.stderr.splitlines() if one.startswith("qtsplus: "))
    assert BAD_LINES[line] in error


def test_what_is_no_text_is_one_line(chat):
    result = chat(b"\xff\xfe\n" + INSIDE.encode())
    assert result.exit_code == 1 and result.stdout.startswith(f"{MARK}\n") and "expected Unicode" in result.stderr


def test_a_folder_that_is_the_users_own_is_left_alone(chat, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    result = chat([INSIDE, f"/evidence {tmp_path}", COLOURS])
    assert result.exit_code == 1 and "mine.txt" in result.stderr and TAKEN in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_video_that_is_not_there_ends_before_anything_is_loaded(chat):
    result = chat([INSIDE], videos=(CLIP, "/nowhere.mp4"))
    assert (result.exit_code, result.stdout) == (2, "") and "there is no video at '/nowhere.mp4'" in result.stderr


def test_ctrl_c_ends_with_130_and_no_traceback(chat, monkeypatch):
    """While an answer is made; signals themselves are sent in the tests of `qtsplus watch` and `qtsplus index`."""
    monkeypatch.setattr(VideoSession, "chat", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    result = chat([INSIDE])
    assert (result.exit_code, result.stdout) == (130, "") and "Traceback" not in result.stderr


@pytest.mark.slow
def test_in_a_terminal_there_is_a_prompt_and_ctrl_d_ends(tiny_published):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "qtsplus.cli", "chat", str(CLIP), "--model", str(tiny_published)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    shown, until = "", time.monotonic() + 120

    def wait_for(words):
        nonlocal shown
        while words not in shown:
            assert time.monotonic() < until, shown
            shown += os.read(ours, 4096).decode()

    wait_for("> ")
    os.write(ours, b"/nope\n")
    wait_for("there is no command /nope")
    os.write(ours, INSIDE.encode() + b"\n")
    wait_for("generate")
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0, "a line that failed is seen in a terminal"
    os.close(ours)


def test_ask_draws_its_evidence_and_refuses_a_folder_beforehand(tiny_published, shared_model, tmp_path):
    def ask(*arguments):
        named = ["ask", str(CLIP), INSIDE, "--model", str(tiny_published), *map(str, arguments)]
        return CliRunner().invoke(app, named)

    for _ in range(2):  # what it wrote itself, it replaces
        result = ask("--evidence", tmp_path / "drawn", "--json")
        assert result.exit_code == 0, result.stderr
        drawn = json.loads((tmp_path / "drawn" / "answer.json").read_text())
        assert drawn["evidence"] == json.loads(result.stdout)["evidence"]
        assert len(drawn["videos"][0]["kept"]) == drawn["kept_tokens"]
    (tmp_path / "drawn" / "mine.txt").write_text("mine")
    result = ask("--evidence", tmp_path / "drawn")
    assert (result.exit_code, result.stdout) == (2, "") and "mine.txt" in result.stderr
