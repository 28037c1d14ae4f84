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


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_a_window_of_time_is_a_library_of_its_own(films, loaded, tmp_path, monkeypatch, reduction):
    """What is shown before and after changes nothing, and a piece keeps its place."""
    library = Library(index(films, tmp_path / "library", *loaded).folder, *loaded)
    monkeypatch.setattr(library.model.model.qtsplus.config, "reduction", reduction)
    _, whole = library._rank(QUESTIONS[0], top=5)
    _, inside = library._rank(QUESTIONS[0], window=(2, 4), top=5)
    assert spans(inside.pieces) == {(2, 4)}
    assert len(inside.pieces) == len(whole.pieces) == 5
    changed = {}
    for name in library.names:  # the tokens outside of the window are not looked at
        video = library.stored(name)
        features = video.features.clone()
        features[:72] = 1e3
        features[144:] = 1e3
        changed[name] = replace(video, features=features)
    monkeypatch.setattr(library, "stored", changed.__getitem__)
    _, again = library._rank(QUESTIONS[0], window=(2, 4), top=5)
    assert again == inside
    for moment in library.find(QUESTIONS[0], 9, window=(2, 4)):
        assert 2 <= moment.start < moment.end <= 4
    monkeypatch.setattr(ranking, "PIECE", 72)  # two steps
    _, in_pieces = library._rank(QUESTIONS[0], window=(1, 5), top=15)
    assert spans(in_pieces.pieces) == {(1, 2), (2, 4), (4, 5)}
    with pytest.raises(ValueError, match="shows anything from second 60 to 70"):
        library.find(QUESTIONS[0], window=(60, 70))


def test_a_pattern_and_a_window_limit_the_search(films, loaded, tiny_published, tmp_path):
    library = Library(index(films, tmp_path / "library", *loaded).folder, *loaded)
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
