"""The bundled model in the user's cache: built once, whatever happens around it."""

import os
import subprocess
import sys

import pytest

from qtsplus.demo import cached_tiny

# Waits for a line with the name of a cold cache; answers with what it found there, again and again.
CHILD = """
import os, sys
from safetensors.torch import load_file
from qtsplus.demo import cached_tiny

print("ready", flush=True)
for line in sys.stdin:
    os.environ["XDG_CACHE_HOME"] = line.strip()
    try:
        folder = cached_tiny()
        read = {path.name: len(path.read_bytes()) for path in folder.iterdir()}
        print(len(load_file(folder / "model.safetensors")), sorted(read.items()), flush=True)
    except Exception as error:
        print("failed:", repr(error), flush=True)
"""


def test_processes_that_start_together_on_a_cold_cache_all_find_the_whole_model(tmp_path):
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 3
        for number in range(3):
            for child in children:
                child.stdin.write(f"{tmp_path / str(number)}\n")
                child.stdin.flush()
            first, *others = [child.stdout.readline() for child in children]
            assert "failed" not in first and "config.json" in first, first
            assert others == [first, first]
            left = sorted(path.suffix for path in (tmp_path / str(number) / "qtsplus").iterdir())
            assert left == ["", ".lock"]
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_cache_that_cannot_be_written_is_named_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be kept at .*file/qtsplus .*: set XDG_CACHE_HOME"):
        cached_tiny()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be kept at .*file/\.cache/qtsplus .*: set XDG_CACHE_HOME"):
        cached_tiny()


def test_asking_without_a_home_is_refused_in_one_line(tmp_path, tiny_mp4):
    (tmp_path / "file").touch()
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    result = subprocess.run(
        [sys.executable, "-m", "qtsplus.cli", "ask", str(tiny_mp4), "What moves?"],
        capture_output=True,
        text=True,
        env={**environment, "HOME": str(tmp_path / "file")},
    )
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1), result.stderr
    assert "which cannot be written" in result.stderr and "HF_HOME" in result.stderr
