"""The benchmark of a library: its objects stand in one video only, and its page says what was found."""

import json
from collections import Counter

import pytest

from benchmarks.library import run_library
from benchmarks.library.world import make_library
from qtsplus.loading import load


@pytest.fixture(scope="module")
def made():
    return make_library(200)


def test_every_object_that_is_asked_for_stands_in_one_video_only(made):
    worlds, hidden = made
    shown = Counter((item.colour, item.shape, item.mark) for world in worlds for item in world.objects)
    assert len(hidden) == 300
    for one in hidden:
        item = one.item
        assert shown[item.colour, item.shape, item.mark] == 1
        assert item in worlds[one.video].objects and one.answer == item.direction
        assert all(word in one.question for word in (item.name, item.mark))


def test_its_name_without_the_mark_stands_in_most_videos(made):
    worlds, hidden = made
    for one in hidden:
        name = (one.item.colour, one.item.shape)
        assert sum(name in {(item.colour, item.shape) for item in world.objects} for world in worlds) > 150


def test_the_page_holds_every_way(crowd_published, tmp_path):
    target = run_library(*load(crowd_published, "cpu"), tmp_path / "out", tmp_path, videos=4, progress=False)
    document = json.loads(target.read_text())
    assert document["ranks"]["4"]["most relevant token"]["first"] > 0.5
    assert {"uniform/64", "diversity/256", "as shipped: the best file/64"} <= document["rows"].keys()
    assert "| control: another question's file | 4 |" in target.with_suffix(".md").read_text()
