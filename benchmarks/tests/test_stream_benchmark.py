"""The benchmark of streams, small."""

import json

import numpy as np

from benchmarks import stream
from benchmarks.stream import Rival, room, run_stream
from benchmarks.world.haystack import HIDDEN


def test_a_small_run(tmp_path, monkeypatch):
    """160 seconds, of which the first 80 have what is asked for at once and a minute later."""
    monkeypatch.setattr(stream, "FIRST", 80)
    rivals = [Rival(name, policy, lags=(0, 1)) for name, policy in (("oldest", "oldest_first"), ("ours", "question"))]
    monkeypatch.setattr(stream, "RIVALS", rivals)
    document = json.loads(run_stream(tmp_path, films=2, seconds=160, tokens=(72,)).read_text())
    shares = {(row["kind"], row["rival"], row["lag"]): row["remembered"] for row in document["rows"]}
    for kind in ("crowd", "room"):
        assert (shares[kind, "oldest", 0], shares[kind, "oldest", 1]) == (1, 0)
        assert (shares[kind, "ours", 0], shares[kind, "ours", 1]) == (1, 1)
        assert document["drift"][kind]["largest_difference"] < 1e-4
        assert document["drift"][kind]["same_tokens"] > 0.95
    assert all(row["questions"] == 8 for row in document["rows"])
    page = (tmp_path / "stream.md").read_text()
    assert "## The room, 72 tokens" in page and "| present | past: 1 min |" in page


def test_who_passes_stands_where_nothing_stands():
    scene, rng = room(), np.random.default_rng(0)
    for name in (HIDDEN[0], None):
        world, item = stream.passing(scene, rng, name)
        assert world.objects[:-1] == scene.objects and world.objects[-1] is item
        assert item.start not in {other.start for other in scene.objects}
        assert ((item.colour, item.shape) in HIDDEN) == (name is not None)
