"""What the README shows runs, and what it points to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_there_are_snippets():
    assert SNIPPETS


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.splitlines()[-1][:40])
def test_snippets_run(snippet, tiny_published, tiny_mp4, capsys):
    exec(snippet.replace("org/QTSplus-3B", str(tiny_published)).replace("video.mp4", str(tiny_mp4)), {})
    assert capsys.readouterr().out, "a snippet shows what it got"


def test_files_it_names_exist():
    linked = re.findall(r"\]\((?!http)([^)#]+)", README)
    named = re.findall(r"`((?:tests|docs|src|hub_configs)/[^`\s:]+)", README)
    for path in {*linked, *named}:
        assert (ROOT / path).exists(), path


def test_tests_it_names_exist():
    for file, name in re.findall(r"`(tests/\S+\.py)::(\w+)`", README):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


def test_make_targets_it_names_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
