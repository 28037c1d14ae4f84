"""The keys of a library's videos in 8 bits: they find what a scan of the features finds, in the same order."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.video_utils import VideoMetadata

from clips import make_world, render_world, write_mp4
from qtsplus.asking import ranking
from qtsplus.asking.ranking import Piece, Scorer, token_keys
from qtsplus.common.tensors import digest_of
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from qtsplus.model.video_qtsplus import AboutVideo
from qtsplus.video.encoded import EncodedVideo
from qtsplus.video.storage import load_keys, save_keys

QUESTIONS = ("What is in the red circle?", "What crosses the middle?", "Is there a blue ring?")
MADE_FROM = {"made_by": "a selector", "features": "some features"}
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for number in range(4):
        write_mp4(folder / f"{number}.mp4", render_world(make_world(160 + number, 6)), 2)
    return folder


@pytest.fixture
def films(clips, tmp_path) -> Path:
    """A folder of videos that a test may change."""
    (tmp_path / "films").mkdir()
    for path in clips.iterdir():
        (tmp_path / "films" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "films"


@pytest.fixture
def library(films, loaded, tmp_path) -> Library:
    return Library(index(films, tmp_path / "library", *loaded).folder, *loaded)


def without_keys(library: Library) -> Library:
    """The exact twin, which reads the features of every video."""
    folder = library.folder.with_name("twin")
    shutil.copytree(library.folder, folder, dirs_exist_ok=True)
    for path in keys_of(folder):
        path.unlink()
    return Library(folder, library.model, library.processor)


def keys_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.keys"))


def places(moments):
    return [(moment.name, moment.start, moment.end, moment.box) for moment in moments]


@pytest.mark.parametrize("limits", [{}, {"names": ["1.mp4", "3.mp4"]}, {"window": (2.0, 4.0)}], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "max", "mean"])
def test_keys_find_what_features_find(library, monkeypatch, reduction, limits):
    monkeypatch.setattr(library.model.model.qtsplus.config, "reduction", reduction)
    twin = without_keys(library)
    for question in QUESTIONS:
        found = library.find(question, 3, **limits)
        expected = twin.find(question, 3, **limits)
        assert places(found) == places(expected)
        weights = [moment.weight for moment in expected]
        assert [moment.weight for moment in found] == pytest.approx(weights, rel=0.02)
        answer = library.ask(question, max_new_tokens=2, **limits)
        assert answer.answer == twin.ask(question, max_new_tokens=2, **limits).answer


def noise(seed: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed))


def invented(number: int, steps: int) -> EncodedVideo:
    """A video of random features, 4 tokens a step."""
    frames = 2 * steps
    metadata = VideoMetadata(total_num_frames=frames, fps=2.0, frames_indices=list(range(frames)))
    grid = torch.tensor([[steps, 4, 4]])
    return EncodedVideo("frames", noise(number, 4 * steps), grid, 1.0, AboutVideo(metadata), 0.0)


def stored_keys(video, model, path):
    layer = model.model.qtsplus.scoring_layers[-1]
    save_keys(path, video, token_keys(layer, video.features), MADE_FROM)
    return load_keys(path, model, layer.k_proj.out_features, MADE_FROM)


def ranked(loaded, videos):
    """The pieces of videos, or of their keys, without the first and the last step."""
    whole = [Piece(name, 1, 39) for name in videos]
    tokens = [piece.tokens(videos[piece.name]) for piece in whole]
    scorer = Scorer(*loaded, QUESTIONS[0], tokens)
    pieces = []
    for piece, tokens_of_piece in zip(whole, tokens, strict=True):
        pieces += scorer.peaks(piece, tokens_of_piece)
    return sorted(pieces, key=lambda piece: -piece.peak)


@pytest.mark.parametrize("reduction", ["sum", "max", "mean"])
def test_the_order_is_that_of_the_features(loaded, tmp_path, monkeypatch, reduction):
    model = loaded[0]
    monkeypatch.setattr(model.model.qtsplus.config, "reduction", reduction)
    monkeypatch.setattr(ranking, "PIECE", 60)
    videos = {}
    keyed = {}
    for number in range(1, 13):
        name = f"{number}.mp4"
        videos[name] = invented(number, 40)
        keyed[name] = stored_keys(videos[name], model, tmp_path / name)
    by_features = ranked(loaded, videos)
    by_keys = ranked(loaded, keyed)
    exact = {(piece.name, piece.first): piece.peak for piece in by_features}
    estimates = {(piece.name, piece.first): piece.peak for piece in by_keys}
    assert estimates == pytest.approx(exact, abs=0.05)
    for near, right in zip(by_keys[:5], by_features[:5], strict=True):
        assert exact[near.name, near.first] == pytest.approx(right.peak, abs=0.05)


def test_copies_share_their_keys(films, loaded, tmp_path):
    (films / "copy.mp4").write_bytes((films / "1.mp4").read_bytes())
    library = Library(index(films, tmp_path / "library", *loaded).folder, *loaded)
    assert len(keys_of(library.folder)) == 4
    assert len(library.names) == 5
    assert places(library.find(QUESTIONS[0], 5)) == places(without_keys(library).find(QUESTIONS[0], 5))


def test_keys_follow_the_videos(library, films, loaded):
    before = {path: path.stat().st_mtime_ns for path in keys_of(library.folder)}
    write_mp4(films / "new.mp4", render_world(make_world(170, 6)), 2)
    (films / "0.mp4").unlink()
    index(films, library.folder, *loaded, prune=True)
    after = {path: path.stat().st_mtime_ns for path in keys_of(library.folder)}
    assert len(after) == 4
    assert len(after.items() & before.items()) == 3, "what was there is not made again"


def test_index_makes_keys_that_are_missing(library, films, loaded):
    for path in keys_of(library.folder):
        path.unlink()
    index(films, library.folder, *loaded)
    assert len(keys_of(library.folder)) == 4


def test_another_selector_reads_the_features(library, films, loaded):
    """Until `index` has made keys of its own, in place of the first selector's."""

    def found(model):
        return places(Library(library.folder, model, loaded[1]).find(QUESTIONS[0], 3))

    right = found(library.model)
    other = deepcopy(library.model)
    with torch.no_grad():
        other.model.qtsplus.scoring_layers[0].k_proj.weight.mul_(-1)
    right_of_other = places(without_keys(Library(library.folder, other, loaded[1])).find(QUESTIONS[0], 3))
    assert found(other) == right_of_other
    before = [path.read_bytes() for path in keys_of(library.folder)]
    index(films, library.folder, other, loaded[1])
    assert [path.read_bytes() for path in keys_of(library.folder)] != before
    assert found(other) == right_of_other
    assert found(library.model) == right


DAMAGE = {
    "a code": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "the head": lambda data: data[:12] + bytes([data[12] ^ 1]) + data[13:],
    "cut off": lambda data: data[:1000],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_keys_end_in_one_line_and_are_made_again(library, films, loaded, damage):
    right = places(library.find(QUESTIONS[0], 3))
    path = keys_of(library.folder)[1]
    damaged = damage(path.read_bytes())
    path.unlink()  # who has it open reads on
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"keys '{path}' cannot be used: .*run `qtsplus index` again\.$"):
        Library(library.folder, *loaded).find(QUESTIONS[0], 3)
    said = []
    index(films, library.folder, *loaded, say=said.append)
    (line,) = said
    assert line.endswith("are damaged, and are made again.")
    assert places(Library(library.folder, *loaded).find(QUESTIONS[0], 3)) == right


def test_keys_of_a_stranger_are_checked(loaded, tmp_path):
    """A stranger who writes a library can write its digests too."""
    model = loaded[0]
    video = invented(1, 6)
    keyed = stored_keys(video, model, tmp_path / "keys")
    width = len(keyed.low)
    tensors = load_file(tmp_path / "keys")
    with safe_open(tmp_path / "keys", "pt") as file:
        header = file.metadata()
    del header["digest"]
    forged = [
        ("codes", tensors["codes"][1:].clone()),
        ("codes", tensors["codes"].short()),
        ("low", tensors["low"][:-1].clone()),
        ("step", tensors["step"].double()),
        ("step", tensors["step"] * torch.nan),
        ("low", tensors["low"] + 1e30),
    ]
    for name, changed in forged:
        both = dict(sorted(tensors.items())) | {name: changed}
        digest = digest_of(both, header)
        save_file(both, tmp_path / "forged", header | {"digest": digest})
        with pytest.raises(ValueError, match="cannot be used: .*expected"):
            load_keys(tmp_path / "forged", model, width, MADE_FROM)
    assert load_keys(tmp_path / "keys", model, width, MADE_FROM | {"features": "others"}) is None
