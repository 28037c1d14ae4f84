"""What docs/long_videos.md shows runs."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "long_videos.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_there_are_snippets():
    assert len(SNIPPETS) == 4


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["session", "encode_videos", "video_chunks", "attention"])
def test_snippets_run(snippet, tiny_published, tiny_mp4, capsys):
    exec(snippet.replace("org/QTSplus-3B", str(tiny_published)).replace("video.mp4", str(tiny_mp4)), {})
    assert capsys.readouterr().out, "a snippet shows what it got"
