"""The benchmark of a library: its objects stand in one video only, and its page says what was found."""

import json
from collections import Counter

import pytest

from benchmarks.library import run_evidence, run_library
from benchmarks.library.evidence import judge
from benchmarks.library.world import make_library
from qtsplus.asking.evidence import Interval
from qtsplus.evaluation.labelled import Sighting
from qtsplus.hub.loading import load


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


def test_evidence_is_judged_by_time_and_place():
    frame, box = (100, 100), (20, 40, 40, 60)
    seen = (Sighting(2.0, 3.0, box, frame=frame), Sighting(3.0, 6.0, box, frame=frame))
    exact = judge(Interval(2.0, 6.0, 1.0, box=(0.2, 0.4, 0.4, 0.6)), seen)
    assert exact == {"seconds": 1.0, "seconds overlap": 1.0, "place": 1.0, "place overlap": pytest.approx(1.0)}
    wide = judge(Interval(0.0, 8.0, 1.0, box=(0.2, 0.4, 0.6, 0.6)), seen)
    assert wide == {"seconds": 1.0, "seconds overlap": 0.5, "place": 1.0, "place overlap": pytest.approx(0.5)}
    short = judge(Interval(2.0, 5.0, 1.0, box=(0.5, 0.4, 0.7, 0.6)), seen)
    assert short == {"seconds": 0.0, "seconds overlap": 0.75, "place": 0.0, "place overlap": 0.0}
    before = judge(Interval(0.0, 1.0, 1.0, box=(0.2, 0.4, 0.4, 0.6)), seen)
    assert before["place"] == before["seconds"] == before["seconds overlap"] == 0.0


def test_evidence_points_at_what_was_asked_for_and_at_nothing_else(crowd_published, tmp_path):
    target = run_evidence(*load(crowd_published, "cpu"), tmp_path / "out", tmp_path, videos=4, progress=False)
    document = json.loads(target.read_text())
    own, other = document["rows"]["own"], document["rows"]["of another question"]
    assert own["place"]["mean"] > 0.8 > 0.3 > other["place"]["mean"]
    assert own["seconds overlap"]["mean"] > 0.8 > 0.6 > other["seconds overlap"]["mean"]
    assert document["cameras"]["named"]["questions"] == document["settings"]["of_two_cameras"] == 8
    assert "| its box holds the object's middle |" in target.with_suffix(".md").read_text()
