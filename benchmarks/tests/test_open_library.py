"""The questions to a library in the world without a grid."""

import json
from pathlib import Path

from benchmarks.open.choice import make_test_set
from benchmarks.open.library import names_of, run_library, seek_things

MODEL = Path("hub_configs/qtsplus-tiny")


def test_only_one_video_shows_what_is_asked_for(tmp_path):
    path = make_test_set(tmp_path, 6)
    seeds = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        seeds[row["video"].removeprefix("test/")] = row["seed"]
    sought = seek_things(path, 100, least=2)
    assert len(sought) > 5
    for one in sought:
        named = [name for name in names_of(seeds[one.video]) if name in one.question]
        assert named and len(one.others) >= 2
        assert not any(name in names_of(seeds[other]) for other in one.others for name in named)


def test_the_right_video_is_found_more_often_than_by_chance(tmp_path):
    target = run_library(MODEL, tmp_path, tmp_path / "results", videos=8, sizes=(2, 4))
    document = json.loads(target.read_text(encoding="utf-8"))
    assert [row["videos"] for row in document["rows"]] == [2, 4]
    assert all(row["found"][0] > 60 for row in document["rows"])
