"""A haystack never shows what its needles show; and the command writes both."""

import json

import av
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.world.crowd import make_crowd
from benchmarks.world.haystack import HIDDEN, _needle, _without_hidden


def test_no_background_has_what_a_needle_shows():
    for seed in range(20):
        world = make_crowd(seed, 8)
        hidden = [item for item in world.objects if (item.colour, item.shape) in HIDDEN]
        names = [(item.colour, item.shape) for item in _without_hidden(world).objects]
        assert hidden and not set(names) & set(HIDDEN) and len(set(names)) == len(names)
    for index in range(8):
        world, asked = _needle(index, 4)
        names = [(item.colour, item.shape) for item in world.objects]
        assert [name for name in names if name in HIDDEN] == [(asked.colour, asked.shape)]
        assert asked.direction is None and asked in world.objects


def test_the_command_writes_needles_and_a_background(tmp_path):
    options = ["haystack", "--out", str(tmp_path), "--length", "10", "--count", "2", "--seconds", "2"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "needles-2s" / "needles.jsonl").read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[0])["evidence"][0][0]["frame"] == [168, 168]
    with av.open(str(tmp_path / "background-10s.mp4")) as background:
        assert background.streams.video[0].frames == 20
