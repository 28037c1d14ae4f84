"""What is stored is trusted as little as what is sent: it names no path, no model, no address, and damage is found."""

import json
import os
import resource
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from clips import make_world, render_world, write_mp4
from qtsplus.cli import app
from qtsplus.common.journals import file_state, seal
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from qtsplus.video import storage
from qtsplus.video.encoded import NO_FILE

QUESTION = "What is in the red circle?"


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for number, name in enumerate(("a.mp4", "b.mp4")):
        write_mp4(folder / name, render_world(make_world(160 + number)), 2)
    return folder


@pytest.fixture(scope="module")
def made(videos, loaded, tiny_published, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    index(videos, folder, *loaded, name=str(tiny_published))
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A library from elsewhere."""
    return Path(shutil.copytree(made, tmp_path / "library"))


def rewrite(folder, change):
    """What a stranger can write: any line, with the digest that belongs to it."""
    journal = folder / "library.jsonl"
    lines = []
    for text in journal.read_text().splitlines():
        line = json.loads(text)
        del line["check"]
        change(line)
        lines.append(seal(line) + "\n")
    journal.write_text("".join(lines))


def entry(name, value):
    """Changes a field of every video."""

    def change(line):
        if isinstance(line.get("key"), str):
            line["value"][name] = value

    return change


def of_a(**values):
    """Changes what is said of a.mp4."""

    def change(line):
        if line.get("key") == "a.mp4":
            line["value"].update(values)

    return change


def made_of(**values):
    """Changes what the library was made of."""

    def change(line):
        if line.get("key") == 0:
            line["value"].update(values)

    return change


def last_line_of(result):
    """The message of a command that was refused after it had said something else."""
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    return result.stderr.splitlines()[-1]


def run(*arguments):
    line = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, line)


# --- Whose model is loaded ---


@pytest.mark.parametrize("command", ["ask", "find"])
@pytest.mark.parametrize("name", ["stranger/model", "/tmp", "../model", "http://127.0.0.1/model"])
def test_a_model_is_not_loaded_because_a_library_names_it(folder, monkeypatch, command, name):
    rewrite(folder, made_of(model=name))
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("an address was asked for"))
    line = last_line_of(run(command, folder, QUESTION))
    assert f"another dtype: name the model that made it ({name!r}) with --model" in line


# --- What is written and removed ---


@pytest.mark.parametrize("content", ["../victim", "/victim", "a" * 63, "A" * 64, "", 7, "a" * 64 + "\n"])
def test_no_content_of_a_library_is_a_path(folder, mine, loaded, content):
    victim = folder.parent / "victim.safetensors"
    victim.write_bytes(b"mine")
    rewrite(folder, entry("content", content))
    reason = r"Line \d of .* cannot be used: .*content is .* So remove the line, and run `qtsplus index` again"
    with pytest.raises(ValueError, match=reason) as error:
        Library(folder, *loaded)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=reason):
        index(mine, folder, *loaded)
    assert victim.read_bytes() == b"mine"


def written(folder):
    """The features of a library on disk, with when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("number", range(1, 4))
def test_index_makes_what_a_removed_line_held(folder, mine, loaded, number):
    """Whichever it is behind the first; what the others hold is not encoded again."""
    whole = Library(folder, *loaded)
    before = written(folder)
    journal = folder / "library.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    del lines[number]
    journal.write_text("".join(lines))
    index(mine, folder, *loaded)
    assert Library(folder, *loaded).find(QUESTION) == whole.find(QUESTION)
    after = written(folder)
    unchanged = before.items() & after.items()
    assert len(unchanged) >= 1


@pytest.mark.parametrize("name", ["../a.mp4", "/a.mp4", "x/../../a.mp4", "a.mp4\0.mp4", ".."])
def test_no_name_of_a_video_leads_out_of_its_folder(folder, loaded, name):
    def rename(line):
        if line.get("key") == "a.mp4":
            line["key"] = name

    rewrite(folder, rename)
    with pytest.raises(ValueError, match="expected a path inside the videos' folder"):
        Library(folder, *loaded)


def test_index_removes_no_file_that_it_did_not_write(folder, mine, loaded):
    names = {"model.safetensors", "0" * 32 + ".safetensors", ".note.1.part"}
    for name in names:
        (folder / name).write_bytes(b"mine")
    (mine / "b.mp4").unlink()
    index(mine, folder, *loaded, prune=True)
    left = {path.name for path in folder.iterdir()}
    assert names < left
    assert len(left - names) == 4, "the journal, its lock, and the features and keys of a.mp4"


def test_a_file_that_was_changed_is_not_shown(folder, mine, loaded):
    path = mine / "a.mp4"
    state = file_state(path)
    rewrite(folder, made_of(videos=str(mine)))
    rewrite(folder, of_a(**state))
    library = Library(folder, *loaded)
    assert library.with_file("a.mp4").video == str(path)
    write_mp4(path, render_world(make_world(170)), 2)
    assert library.with_file("a.mp4").video == NO_FILE
    path.unlink()
    assert library.with_file("a.mp4").video == NO_FILE


@pytest.mark.parametrize("name", [".lock", "library.jsonl", "features", ".library.jsonl.7.part"])
def test_no_link_is_followed_out_of_a_library(folder, mine, loaded, name):
    place = folder / name
    if name == "features":
        place = next(folder.glob("*.safetensors"))
    before = b"mine"
    if place.exists():
        before = place.read_bytes()
    victim = folder.parent / "victim"
    victim.write_bytes(before)
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    with suppress(ValueError, OSError):
        index(mine, folder, *loaded)
    with suppress(ValueError, OSError):
        Library(folder, *loaded)
    assert victim.read_bytes() == before


def test_a_killed_index_leaves_nothing_that_nobody_wrote(mine, loaded, tmp_path, monkeypatch):
    """Killed after it has noted features, and before they are there."""

    def interrupt(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        index(mine, tmp_path / "library", *loaded)
    monkeypatch.undo()
    assert len(index(mine, tmp_path / "library", *loaded).files) == 2


@pytest.mark.parametrize("in_place", [False, True])
def test_a_video_replaced_with_the_same_size_and_time_is_another(mine, loaded, tmp_path, in_place):
    """As `cp -p` does."""
    folder = tmp_path / "library"
    video = mine / "a.mp4"
    before = index(mine, folder, *loaded).entries["a.mp4"]
    state = video.stat()
    data = bytearray(video.read_bytes())
    data[-1] ^= 1
    if not in_place:
        video.unlink()
    video.write_bytes(data)
    os.utime(video, ns=(state.st_atime_ns, state.st_mtime_ns))
    after = index(mine, folder, *loaded).entries["a.mp4"]
    assert after["content"] != before["content"]


def test_a_full_disk_is_one_line(mine, tiny_published, tmp_path):
    """While features are written; what is there stays, and the next run goes on."""
    folder = tmp_path / "library"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        last = last_line_of(run("index", mine, "--out", folder, "--model", tiny_published))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{folder}/" in last
    assert "File too large" in last
    names = [path.name for path in folder.iterdir()]
    assert sorted(names) == [".lock", "library.jsonl"]


# --- Damage and formats ---


def store_others(folder, change=None, **about):
    """Other features in a library, or another header, with the digest that belongs to them."""
    path = next(folder.glob("*.safetensors"))
    with safe_open(path, "pt") as file:
        header = file.metadata()
    features = load_file(path)["features"].clone()
    if change is not None:
        features = change(features).contiguous()
    content = json.loads(header["about"])
    for name, value in about.items():
        place = content["metadata"] if name in content["metadata"] else content
        place[name] = value
    texts = {"made_by": header["made_by"], "about": json.dumps(content)}
    save_file({"features": features}, path, texts)
    note(folder, path)
    return path


def note(folder, path):
    """Writes the size and digest of changed features into the journal."""
    stored = storage.measure(path)

    def change(line):
        is_video = isinstance(line.get("key"), str)
        if is_video and line["value"]["content"].startswith(path.stem):
            line["value"]["features"] = stored

    rewrite(folder, change)


def check_made_again(folder, mine, loaded, path):
    """What was stored at a path is refused in one line, and made again by `index` once it is removed."""
    reason = f"The stored video {str(path)!r} cannot be used: .+; remove it, and encode the vi"
    with pytest.raises(ValueError, match=reason) as error:
        Library(folder, *loaded).find(QUESTION)
    message = str(error.value)
    assert "\n" not in message
    assert "Error" not in message
    path.unlink()
    index(mine, folder, *loaded)
    assert Library(folder, *loaded).find(QUESTION, 1)


NAN = float("nan")
INF = float("inf")
OTHER_FEATURES = {
    "width": lambda features: features[:, :-1],
    "rank": lambda features: features[None],
    "one number": lambda features: features[0, 0],
    "tokens": lambda features: features[:-36],
    "none": lambda features: features[:0],
    "type": lambda features: features.to(torch.int32),
    "float64": lambda features: features.double(),
}
OTHER_HEADERS = [
    {"video_grid_thw": [[6, 12]]},
    {"video_grid_thw": [[2, 12, 14]]},
    {"video_grid_thw": [[0, 12, 12]]},
    {"video_grid_thw": [[2**62, 2**62, 4]]},
    {"video_grid_thw": [["6", "12", "12"]]},
    {"second_per_grid_ts": [0]},
    {"second_per_grid_ts": [NAN]},
    {"second_per_grid_ts": []},
    {"fps": "2"},
    {"fps": 0},
    {"fps": None},
    {"start": INF},
    {"frames_indices": []},
    {"frames_indices": ["0"]},
    {"frames_indices": [0]},
    {"warnings": "none"},
    {"unknown": 1},
]


@pytest.mark.parametrize("kind", OTHER_FEATURES)
def test_other_features_are_one_line_and_made_anew(folder, mine, loaded, kind):
    """From a stranger, whose digests are right."""
    check_made_again(folder, mine, loaded, store_others(folder, OTHER_FEATURES[kind]))


@pytest.mark.parametrize("about", OTHER_HEADERS, ids=str)
def test_what_another_header_says_is_one_line_and_made_anew(folder, mine, loaded, about):
    check_made_again(folder, mine, loaded, store_others(folder, **about))


@pytest.mark.parametrize("about", ["{", "[]", "[" * 100_000, None], ids=["no JSON", "a list", "nested", "none"])
def test_a_header_of_another_kind_is_one_line_and_made_anew(folder, mine, loaded, about):
    path = next(folder.glob("*.safetensors"))
    with safe_open(path, "pt") as file:
        texts = file.metadata()
    del texts["about"]
    if about is not None:
        texts["about"] = about
    save_file(load_file(path), path, texts)
    note(folder, path)
    check_made_again(folder, mine, loaded, path)


def test_features_of_another_video_are_found(folder, mine, loaded):
    features, others = sorted(folder.glob("*.safetensors"))
    shutil.copyfile(features, others)
    with pytest.raises(ValueError, match="it was changed since it was written|is damaged"):
        Library(folder, *loaded).find(QUESTION)
