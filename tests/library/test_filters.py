"""Some of a library is asked: films like a pattern, and what they show between two seconds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clips import make_world, render_world, write_mp4
from qtsplus.asking import ranking
from qtsplus.cli import app
from qtsplus.library.indexing import index
from qtsplus.library.library import Library

QUESTIONS = ("What is in the red circle?", "What crosses the middle?", "Is there a blue ring?")
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def films(tmp_path) -> Path:
    (tmp_path / "films").mkdir()
    for number in range(5):
        write_mp4(tmp_path / "films" / f"{number}.mp4", render_world(make_world(160 + number, 6)), 2)
    return tmp_path / "films"


def spans(pieces):
    return {(piece.first, piece.last) for piece in pieces}


@pytest.fixture
def library(films, loaded, tmp_path):
    return Library(index(films, tmp_path / "library", *loaded).folder, *loaded)


def test_a_window_says_which_steps_are_looked_at(library, monkeypatch):
    _, inside = library.rank(QUESTIONS[0], window=(2, 4))
    assert len(inside) == 5
    assert spans(inside) == {(2, 4)}
    for moment in library.find(QUESTIONS[0], 9, window=(2, 4)):
        assert 2 <= moment.start < moment.end <= 4
    monkeypatch.setattr(ranking, "PIECE", 72)  # two steps
    _, in_pieces = library.rank(QUESTIONS[0], window=(1, 6))
    assert spans(in_pieces) == {(1, 3), (3, 5), (5, 6)}
    with pytest.raises(ValueError, match="shows anything from second 60 to 70"):
        library.find(QUESTIONS[0], window=(60, 70))


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_a_window_of_time_is_a_library_of_its_own(library, monkeypatch, reduction):
    """What is shown before and after changes nothing."""
    monkeypatch.setattr(library.model.model.qtsplus.config, "reduction", reduction)
    for path in library.folder.glob("*.keys"):
        path.unlink()
    _, inside = library.rank(QUESTIONS[0], window=(2, 4))
    changed = {}
    for name in library.names:
        video = library.stored(name)
        features = video.features.clone()
        features[:72] = 1e3
        features[144:] = 1e3
        changed[name] = replace(video, features=features)
    monkeypatch.setattr(library, "stored", changed.__getitem__)
    _, again = library.rank(QUESTIONS[0], window=(2, 4))
    assert again == inside


def test_a_pattern_and_a_window_limit_the_search(library, tiny_published):
    assert library.select("[23].mp4") == ["2.mp4", "3.mp4"]
    find = ["find", str(library.folder), QUESTIONS[0], "--json", "--moments", "9", "--model", str(tiny_published)]

    def run(*more):
        return CliRunner().invoke(app, find + list(more))

    moments = json.loads(run("--name", "4*", "--start", "1", "--end", "4").stdout)["moments"]
    assert moments
    for moment in moments:
        assert moment["video"] == "4.mp4"
        assert 1 <= moment["start"] < moment["end"] <= 4
    refused = run("--start", "900")
    assert refused.exit_code == 2
    assert "No video shows anything from second 900" in refused.stderr.splitlines()[-1]
