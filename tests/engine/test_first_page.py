"""docs/start.md from its first step to its last, as written, with a tiny model in place of the 7B."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from typer.testing import CliRunner

from clips import render_clip
from engine_runs import ask_server, build, engine_environment, processor_of, same_basis
from qtsplus.cli import app
from server_process import running_server
from tiny_backbones import QWEN2_5_VL

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


def test_the_server_of_the_last_step_chooses_as_the_commands_before_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    processor = processor_of(QWEN2_5_VL)
    for part in (processor, QWEN2_5_VL.stock_twin(build(QWEN2_5_VL, processor))):
        part.save_pretrained("Qwen/Qwen2.5-VL-7B-Instruct")
    Path("videos").mkdir()
    for path in ("video.mp4", "videos/video.mp4"):
        render_clip(path, seconds=4, fps=4, size=(112, 112))
    *commands, serve = re.findall("^qtsplus ((?!app).*)$", PAGE.read_text(), re.MULTILINE)
    for command in commands:
        assert CliRunner().invoke(app, shlex.split(command)).exit_code == 0, command
    here = json.loads(Path("evidence/answer.json").read_text())
    command = ["-m", "qtsplus.cli", *shlex.split(serve), "--port", "{port}"]
    with running_server(tmp_path / "log", *command, environment=engine_environment()) as port:
        video = Path("videos/video.mp4").resolve()
        there = ask_server(f"http://127.0.0.1:{port}", "my-7b", video, "Who knocks at the door?", {})
    del here["videos"]  # whose names a server does not tell
    same_basis(there.qtsplus, here)
