"""Some of a library is asked: films by the user's labels, and what they show between two seconds."""

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


def test_labels_choose_videos(films, loaded, tiny_published, tmp_path):
    folder = tmp_path / "library"
    more = films / "4.mp4"
    more.rename(tmp_path / "4.mp4")
    line = ["index", str(films), "--out", str(folder), "--model", str(tiny_published)]

    def run(*arguments):
        return CliRunner().invoke(app, [*map(str, arguments)])

    assert run(*line, "--label", "camera=front", "--label", "floor=1").exit_code == 0
    (tmp_path / "4.mp4").rename(more)
    assert run(*line, "--label", "camera=back").exit_code == 0  # of the new one
    assert run(*line, "--label", "floor=2", "--name", "[01].mp4").exit_code == 0
    nothing = run(*line, "--label", "floor=3", "--name", "no*")
    assert nothing.exit_code == 2 and "is like 'no*', but for example '0.mp4'" in nothing.output
    (films / "0.mp4").rename(films / "moved.mp4")
    assert run(*line).exit_code == 0
    library = Library(folder, *loaded)
    assert library.select(labels={"camera": "back"}) == ["4.mp4"]
    assert library.select(labels={"camera": "front", "floor": "2"}) == ["1.mp4", "moved.mp4"]
    assert library.select("[23].mp4", {"floor": "1"}) == ["2.mp4", "3.mp4"]
    find = ["find", folder, QUESTIONS[0], "--json", "--moments", 9, "--model", tiny_published]
    found = json.loads(run(*find, "--label", "camera=back", "--start", 1, "--end", 4).stdout)["moments"]
    for moment in found:
        assert moment["video"] == "4.mp4"
        assert 1 <= moment["start"] < moment["end"] <= 4
    for wrong, reason in {
        ("--label", "camera"): "--label is 'camera'; expected a name and a value",
        ("--label", "a=1", "--label", "a=2"): "--label has a name twice",
        ("--label", "camera=side"): "is like --label camera=side, but for example '1.mp4'",
        ("--start", "900"): "No video shows anything from second 900",
    }.items():
        result = run(*find, *wrong)
        assert result.exit_code == 2 and reason in result.stderr.splitlines()[-1], result.stderr
    result = run(*line, "--name", "*")
    assert result.exit_code == 2 and "--name is about --label" in result.stderr
