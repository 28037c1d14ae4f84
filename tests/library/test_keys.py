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

QUESTION = "What is in the red circle?"
QUESTIONS = (QUESTION, "What crosses the middle?", "Is there a blue ring?")
MADE_FROM = {"made_by": "a selector", "features": "some features"}


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for number in range(4):
        frames = render_world(make_world(160 + number, 6))
        write_mp4(folder / f"{number}.mp4", frames, 2)
    return folder


@pytest.fixture
def videos(clips, tmp_path) -> Path:
    """A folder of videos that a test may change."""
    return Path(shutil.copytree(clips, tmp_path / "videos"))


@pytest.fixture
def reopen(tmp_path, loaded):
    """Opens the library as it is on disk, by default with the model that made it."""

    def open_library(model=None, folder="library"):
        return Library(tmp_path / folder, model or loaded[0], loaded[1])

    return open_library


@pytest.fixture
def library(videos, loaded, tmp_path, reopen) -> Library:
    index(videos, tmp_path / "library", *loaded)
    return reopen()


@pytest.fixture
def found(reopen):
    """What a library finds for the question with a model: names, seconds and places."""

    def find(model=None, folder="library"):
        return places(reopen(model, folder).find(QUESTION, 3))

    return find


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
    found = [(moment.name, moment.start, moment.end, moment.box) for moment in moments]
    return found


LIMITS = [
    {},
    {"names": ["1.mp4", "3.mp4"]},
    {"window": (2.0, 4.0)},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("reduction", ["sum", "max", "mean"])
def test_keys_find_what_features_find(library, monkeypatch, reduction, limits):
    monkeypatch.setattr(library.model.model.qtsplus.config, "reduction", reduction)
    twin = without_keys(library)
    for question in QUESTIONS:
        by_keys = library.find(question, 3, **limits)
        by_features = twin.find(question, 3, **limits)
        assert places(by_keys) == places(by_features)
        for moment, expected in zip(by_keys, by_features, strict=True):
            assert moment.weight == pytest.approx(expected.weight, rel=0.02)


def noise(seed: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed))


def invented(number: int, steps: int) -> EncodedVideo:
    """A video of random features, 4 tokens a step."""
    frames = 2 * steps
    metadata = VideoMetadata(
        total_num_frames=frames,
        fps=2.0,
        frames_indices=list(range(frames)),
    )
    return EncodedVideo(
        video="frames",
        features=noise(number, 4 * steps),
        video_grid_thw=torch.tensor([[steps, 4, 4]]),
        seconds_per_step=1.0,
        about=AboutVideo(metadata),
        seconds=0.0,
    )


def stored_keys(video, model, path):
    (layer,) = model.model.qtsplus.scoring_layers
    save_keys(path, video, token_keys(layer, video.features), MADE_FROM)
    return load_keys(path, model, layer.k_proj.out_features, MADE_FROM)


def peaks_of(loaded, videos):
    """By name and first step, the peaks of the pieces of videos, or of their keys, without the first and last step."""
    whole = [Piece(name, 1, 39) for name in videos]
    tokens = [piece.tokens(videos[piece.name]) for piece in whole]
    scorer = Scorer(*loaded, QUESTION, tokens)
    peaks = {}
    for piece, tokens_of_piece in zip(whole, tokens, strict=True):
        for part in scorer.peaks(piece, tokens_of_piece):
            peaks[part.name, part.first] = part.peak
    return peaks


@pytest.mark.parametrize("reduction", ["sum", "max", "mean"])
def test_the_peaks_are_those_of_the_features(loaded, tmp_path, monkeypatch, reduction):
    model = loaded[0]
    monkeypatch.setattr(model.model.qtsplus.config, "reduction", reduction)
    monkeypatch.setattr(ranking, "PIECE", 60)
    videos = {}
    keyed = {}
    for number in range(1, 13):
        name = f"{number}.mp4"
        video = invented(number, 40)
        videos[name] = video
        keyed[name] = stored_keys(video, model, tmp_path / name)
    exact = peaks_of(loaded, videos)
    estimates = peaks_of(loaded, keyed)
    assert len(exact) == 3 * len(videos)
    assert estimates == pytest.approx(exact, abs=0.05)


def test_copies_share_their_keys(videos, library, loaded, reopen, found):
    shutil.copy(videos / "1.mp4", videos / "copy.mp4")
    index(videos, library.folder, *loaded)
    again = reopen()
    assert len(keys_of(library.folder)) == 4
    assert len(again.names) == 5
    without_keys(again)
    assert found() == found(folder="twin")


def test_keys_follow_the_videos(library, videos, loaded):

    def written():
        return {path: path.stat().st_mtime_ns for path in keys_of(library.folder)}

    before = written()
    write_mp4(videos / "new.mp4", render_world(make_world(170, 6)), 2)
    (videos / "0.mp4").unlink()
    index(videos, library.folder, *loaded, prune=True)
    after = written()
    unchanged = after.items() & before.items()
    assert len(after) == 4
    assert len(unchanged) == 3, "what was there is not made again"


def test_another_selector_reads_the_features(library, videos, loaded, reopen, found):
    """Until `index` has made keys of its own, in place of the first selector's."""
    right = found()
    other = deepcopy(library.model)
    with torch.no_grad():
        other.model.qtsplus.scoring_layers[0].k_proj.weight.mul_(-1)
    without_keys(library)
    right_of_other = found(other, "twin")
    assert found(other) == right_of_other
    before = keys_of(library.folder)[0].read_bytes()
    index(videos, library.folder, other, loaded[1])
    assert keys_of(library.folder)[0].read_bytes() != before
    assert found(other) == right_of_other
    assert found() == right


def flipped(data, place):
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


DAMAGE = {
    "a code": lambda data: flipped(data, -9),
    "the head": lambda data: flipped(data, 12),
    "cut off": lambda data: data[:1000],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_keys_end_in_one_line_and_are_made_again_once_they_are_gone(library, videos, loaded, found, damage):
    right = found()
    path = keys_of(library.folder)[1]
    damaged = damage(path.read_bytes())
    path.unlink()  # who has it open reads on
    path.write_bytes(damaged)
    refused = rf"keys '{path}' cannot be used: .*; remove it, and run `qtsplus index` again\.$"
    with pytest.raises(ValueError, match=refused):
        found()
    with pytest.raises(ValueError, match=refused):
        index(videos, library.folder, *loaded)
    path.unlink()
    index(videos, library.folder, *loaded)
    assert found() == right


FORGED = [
    ("codes", lambda codes: codes[1:].clone()),
    ("codes", lambda codes: codes.short()),
    ("low", lambda low: low[:-1].clone()),
    ("step", lambda step: step.double()),
]


@pytest.mark.parametrize(("name", "change"), FORGED)
def test_keys_of_a_stranger_are_checked(loaded, tmp_path, name, change):
    """A stranger who writes a library can write its digests too."""
    model = loaded[0]
    path = tmp_path / "keys"
    keyed = stored_keys(invented(1, 6), model, path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    del header["digest"]
    tensors[name] = change(tensors[name])
    tensors = dict(sorted(tensors.items()))
    header["digest"] = digest_of(tensors, header)
    forged = tmp_path / "forged"
    save_file(tensors, forged, header)
    width = len(keyed.low)
    with pytest.raises(ValueError, match="cannot be used: .*expected"):
        load_keys(forged, model, width, MADE_FROM)


def test_keys_that_were_made_from_other_features_are_not_there(loaded, tmp_path):
    path = tmp_path / "keys"
    width = len(stored_keys(invented(1, 6), loaded[0], path).low)
    assert load_keys(path, loaded[0], width, dict(MADE_FROM, features="others")) is None
