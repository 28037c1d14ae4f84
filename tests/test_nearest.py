"""An index of a library by keys: it finds what a scan finds, and what is stale or damaged is scanned."""

import os
from copy import deepcopy
from math import inf
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.video_utils import VideoMetadata
from typer.testing import CliRunner

from clips import make_world, render_world, write_mp4
from qtsplus import nearest, ranking
from qtsplus.cli import app
from qtsplus.indexing import index
from qtsplus.library import EVER, Index, Library
from qtsplus.nearest import Nearest, _hash, _selector, _write
from qtsplus.ranking import Piece, Scorer
from qtsplus.videos import EncodedVideo

QUESTIONS = ("What is in the red circle?", "What crosses the middle?", "Is there a blue ring?")
pytestmark = pytest.mark.usefixtures("cache")
with_faiss = pytest.mark.skipif(nearest.faiss is None, reason="without faiss no index is made")


@pytest.fixture
def small(monkeypatch):
    """Files of few tokens, so that a few seconds make several."""
    for name, value in {"MOST": 500, "LEAST": 100, "CELL": 40}.items():
        monkeypatch.setattr(nearest, name, value)


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for number in range(5):
        write_mp4(folder / f"{number}.mp4", render_world(make_world(160 + number, 6)), 2)
    return folder


@pytest.fixture
def films(clips, tmp_path) -> Path:
    """A folder of them that a test may change."""
    (tmp_path / "films").mkdir()
    for path in clips.iterdir():
        (tmp_path / "films" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "films"


def scanned(library: Library) -> Library:
    """The exact twin."""
    twin = Library(library.folder, library.model, library.processor)
    twin.nearest.files, twin.nearest.films = [], set()
    return twin


def places(moments):
    return [(one.name, one.start, one.end, one.box) for one in moments]


def keys(folder):
    return sorted(folder.glob("*.keys"))


@with_faiss
def test_the_index_finds_what_a_scan_finds(small, films, loaded, tmp_path):
    said = []
    library = Library(index(films, tmp_path / "library", *loaded, say=said.append).folder, *loaded)
    assert len(library.nearest.files) == 3 and library.nearest.films == {*library.digests.values()}
    assert said[-1] == "Indexed 5 videos: a question looks at a fiftieth of their tokens."
    for question in QUESTIONS:
        for asked in ({}, {"names": ["1.mp4", "3.mp4"]}, {"window": (2.0, 4.0)}):
            found, right = library.find(question, 3, **asked), scanned(library).find(question, 3, **asked)
            assert places(found) == places(right), (question, asked)
            assert [one.weight for one in found] == pytest.approx([one.weight for one in right], rel=0.05)
    answer = library.ask(QUESTIONS[0], window=(2, 4), max_new_tokens=2)
    assert answer.answer == scanned(library).ask(QUESTIONS[0], window=(2, 4), max_new_tokens=2).answer


def invented(counts, side, seed):
    """Films of these numbers of steps, of random features."""
    generator = torch.Generator().manual_seed(seed)
    films = {}
    for number, count in enumerate(counts):
        about = VideoMetadata(total_num_frames=2 * count, fps=2.0, frames_indices=[*range(2 * count)])
        features = torch.randn(count * side * side, 128, generator=generator)
        grid = torch.tensor([[count, 2 * side, 2 * side]])
        films[f"{number:064x}"] = EncodedVideo("frames", features, grid, [1.0], about, 0.0, start=float(number))
    return films


@with_faiss
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    side=st.integers(1, 4),
    seed=st.integers(0, 99),
    window=st.sampled_from([EVER, (2.0, 9.5), (0.0, inf)]),
    top=st.integers(1, 8),
    unasked=st.integers(0, 6),
)
def test_where_all_cells_are_looked_at_pieces_are_those_of_a_scan(
    loaded, tmp_path, monkeypatch, counts, side, seed, window, top, unasked
):
    for module in (ranking, nearest):
        monkeypatch.setattr(module, "PIECE", 60)
    for name, value in {"LOOK": 1.0, "CELL": 16}.items():
        monkeypatch.setattr(nearest, name, value)
    films = invented(counts, side, seed)
    for path in keys(tmp_path):
        path.unlink()
    half = len(films) // 2
    for some in filter(None, ([*films][:half], [*films][half:])):
        with torch.no_grad():
            _write(tmp_path, _selector(loaded[0]), some, [films[film] for film in some], loaded[0])
    asked = {film: [film] for number, film in enumerate(films) if number != unasked}
    spans = {film: films[film].within(*window) for film in asked}
    spans = {film: span for film, span in spans.items() if span[0] < span[1]}
    scorer = Scorer(*loaded, QUESTIONS[0], lambda: ())
    with torch.no_grad():
        found = Nearest(tmp_path, loaded[0]).rank(scorer, asked, window, top, films.__getitem__)
        right = scorer.rank((Piece(film, *span, 0.0), films[film]) for film, span in spans.items())
    best = sorted(found.pieces, key=lambda piece: -piece.peak)[:top]
    assert [(one.name, one.first, one.last) for one in best] == [
        (one.name, one.first, one.last) for one in right.pieces[:top]
    ]
    assert [one.peak for one in best] == pytest.approx([one.peak for one in right.pieces[:top]], rel=1e-4)
    if spans:
        assert Nearest(tmp_path, loaded[0]).films >= spans.keys()
        assert float(torch.tensor(found.total).logaddexp(scorer.null)) == pytest.approx(right.total, abs=0.02)


@with_faiss
def test_a_question_looks_at_few_cells(small, films, loaded, tmp_path, monkeypatch):
    library = Library(index(films, tmp_path / "library", *loaded).folder, *loaded)
    for name, value in {"LOOK": 0.1, "FEWEST": 1}.items():
        monkeypatch.setattr(nearest, name, value)
    found = library.find(QUESTIONS[0], 1)
    cells = sum(len(file.sizes) for file in library.nearest.files)
    assert sum(len(file.seen) for file in library.nearest.files) == cells // 10 < cells
    assert places(found) == places(scanned(library).find(QUESTIONS[0], 1))
    few = Library(library.folder, *loaded)
    monkeypatch.setattr("qtsplus.library.FEW", 0.5)
    few.find(QUESTIONS[0], 1, names=["1.mp4"])
    assert not any(file.seen for file in few.nearest.files)  # one video is read whole


@with_faiss
def test_copies_count_as_often_as_in_a_scan(small, films, loaded, tmp_path):
    for number in range(3):
        (films / f"copy-{number}.mp4").write_bytes((films / "1.mp4").read_bytes())
    library = Library(index(films, tmp_path / "library", *loaded).folder, *loaded)
    for question in QUESTIONS:
        found, right = library.find(question, 3), scanned(library).find(question, 3)
        assert [one.weight for one in found] == pytest.approx([one.weight for one in right], rel=0.05)


@with_faiss
def test_few_tokens_make_no_index(films, loaded, tmp_path):
    assert not keys(index(films, tmp_path / "library", *loaded).folder)


def test_without_faiss_all_is_read_and_that_is_said_once(small, films, loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(nearest, "faiss", None)
    said = []
    folder = index(films, tmp_path / "library", *loaded, say=said.append).folder
    line = "Questions read all of it. With `pip install faiss-cpu`, the same command lets them look at a fiftieth."
    assert said.count(line) == 1 and said[-1] == line
    assert not keys(folder) and Library(folder, *loaded).find(QUESTIONS[0], 1)


@with_faiss
def test_files_follow_the_films(small, films, loaded, tmp_path):
    """New films join files that are no larger, one that left takes its file along, and what came since is found too."""

    def tokens():
        return sorted(len(file.keys) for file in Nearest(folder, loaded[0]).files)

    (films / "4.mp4").rename(tmp_path / "4.mp4")
    folder = index(films, tmp_path / "library", *loaded).folder
    first = keys(folder)
    assert tokens() == [432, 432]
    (tmp_path / "4.mp4").rename(films / "4.mp4")
    nearest.LEAST, least = 1000, nearest.LEAST  # the fixture sets it back
    library = Library(index(films, folder, *loaded).folder, *loaded)
    assert keys(folder) == first and library.digests["4.mp4"] not in library.nearest.films
    assert "4.mp4" in {one.name for one in library.find(QUESTIONS[0], 5, names=["4.mp4", "3.mp4"])}
    nearest.LEAST = least
    index(films, folder, *loaded)
    assert {*first} < {*keys(folder)} and tokens() == [216, 432, 432]
    (films / "0.mp4").unlink()
    index(films, folder, *loaded)
    assert tokens() == [432, 432]
    library = Library(folder, *loaded)
    assert library.nearest.films == {*library.digests.values()}
    assert places(library.find(QUESTIONS[0], 3)) == places(scanned(library).find(QUESTIONS[0], 3))


def flipped(place):
    def flip(path):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return flip


def renamed(path):
    path.rename(path.with_name(f"{'0' * 32}.keys"))


DAMAGE = {
    "a cell": flipped(-9),
    "a middle": flipped(9000),
    "the head": flipped(12),
    "empty": lambda path: path.write_bytes(b""),
}


@with_faiss
@pytest.mark.parametrize("damage", [*DAMAGE.values(), renamed], ids=[*DAMAGE, "another's name"])
def test_what_is_damaged_is_scanned_and_said_once(small, films, loaded, tmp_path, damage, caplog):
    folder = index(films, tmp_path / "library", *loaded).folder
    damage(keys(folder)[1])
    library = Library(folder, *loaded)
    with caplog.at_level("WARNING"):
        found = [library.find(question, 3) for question in QUESTIONS]
    assert len(library.nearest.files) == 2
    (line,) = [record.getMessage() for record in caplog.records if ".keys" in record.getMessage()]
    assert line.count("\n") == 0 and " is not searched: " in line and "read whole until `qtsplus index`" in line
    assert [*map(places, found)] == [places(scanned(library).find(question, 3)) for question in QUESTIONS]
    index(films, folder, *loaded)
    assert len(Library(folder, *loaded).nearest.files) == 3 == len(keys(folder))


@with_faiss
def test_what_is_cut_off_while_it_is_open_is_scanned(small, films, loaded, tmp_path, caplog):
    library = Library(index(films, tmp_path / "library", *loaded).folder, *loaded)
    right = places(library.find(QUESTIONS[0], 3))
    os.truncate(keys(library.folder)[1], 100)
    with caplog.at_level("WARNING"):
        assert places(library.find(QUESTIONS[0], 3)) == right == places(library.find(QUESTIONS[0], 3))
    assert len(library.nearest.files) == 2 and caplog.text.count("was changed since it was opened") == 1
    os.truncate(library.files["1.mp4"], 100)
    with pytest.raises(ValueError, match="cannot be used"):
        library.find(QUESTIONS[0], 3, names=["1.mp4"])


@with_faiss
def test_arrays_of_a_stranger_are_checked(small, films, loaded, tmp_path, caplog):
    """One who writes the library can write hashes too: what would be read behind the end is refused."""
    folder = index(films, tmp_path / "library", *loaded).folder
    (first, *others), library = keys(folder), Library(folder, *loaded)
    whole, right = load_file(first), places(scanned(library).find(QUESTIONS[0], 3))
    with safe_open(first, "pt") as file:
        head = file.metadata()
    far = whole["keys"].clone()
    far[:, -1] = 255  # of steps that no film has
    hashes = torch.tensor([[*_hash(own)] for own in far.split(whole["sizes"].tolist())], dtype=torch.uint8)
    bad = [{"keys": far, "hashes": hashes}]
    bad += [{"sizes": whole["sizes"][:1].view([])}, {"counts": whole["counts"].to(torch.float8_e4m3fn)}]
    bad += [{"counts": whole["counts"] + 2**62}]
    bad += [{name: whole[name] * torch.nan} for name in ("centroids", "ranges", "seconds")]
    bad += [{"ranges": whole["ranges"] * 1e30}, {"centroids": whole["centroids"][:, :8].clone()}]
    bad += [{"sizes": whole["sizes"] * 2}, {"counts": whole["counts"] + 1}]
    bad += [{"centroids": whole["centroids"].double()}, {"seconds": whole["seconds"][:1].clone()}, {"more": far}]
    first.unlink()

    def forged(changed):
        tensors = {**whole, **changed}
        rows = tensors.pop("keys")
        text = str({name: head[name] for name in ("selector", "films")})
        path = folder / f"{_hash(*(tensors[one] for one in sorted(tensors)), text=text).hex()[:32]}.keys"
        save_file({**tensors, "keys": rows}, path, head)
        return path

    for changed in bad:
        path = forged(changed)
        caplog.clear()
        library = Library(folder, *loaded)
        assert places(library.find(QUESTIONS[0], 3)) == right
        assert len(library.nearest.files) == len(others), changed.keys()
        assert f"{path.name} is not searched" in caplog.text, changed.keys()
        path.unlink()
    forged({"seconds": torch.tensor([[-1e9], [1e9]]).expand_as(whole["seconds"]).double()})
    found = Library(folder, *loaded).find(QUESTIONS[0], 3, window=(0.0, 1.0))
    assert found and all(one.start < 1 and one.weight <= 1 for one in found)


@with_faiss
def test_another_selector_scans(small, films, loaded, tmp_path):
    folder = index(films, tmp_path / "library", *loaded).folder
    model, processor = deepcopy(loaded[0]), loaded[1]
    with torch.no_grad():
        model.model.qtsplus.scoring_layers[0].k_proj.weight.mul_(-1)
    assert Library(folder, model, processor).nearest.films == set()
    index(films, folder, model, processor)
    assert len(Library(folder, model, processor).nearest.files) == 3
    model.model.qtsplus.config.reduction = "max"
    library = Library(folder, model, processor)
    assert library.nearest.films == set() and library.find(QUESTIONS[0], 1)


@with_faiss
def test_find_says_that_it_searches(small, films, loaded, tiny_published, tmp_path):
    folder = index(films, tmp_path / "library", *loaded, name=str(tiny_published)).folder
    result = CliRunner().invoke(app, ["find", str(folder), QUESTIONS[0], "--moments", "1"])
    assert result.exit_code == 0 and "Searched by an index: 5 videos of 5." in result.output, result.output
    assert Index(folder).entries.keys() == {f"{number}.mp4" for number in range(5)}
