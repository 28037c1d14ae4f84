"""`qtsplus index`: what is encoded, what is known again, what leaves, and what is refused."""

import os
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from typer.testing import CliRunner

from clips import LIBRARY, make_world, render_world, write_mp4
from qtsplus.asking import session
from qtsplus.asking.summaries import summarise
from qtsplus.cli import app
from qtsplus.library import indexing
from qtsplus.library.indexing import index
from qtsplus.library.library import Index, Library

QUESTION = "What is in the red circle?"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "library"


@pytest.fixture
def build(mine, folder, loaded):
    """Brings the library up to date with the folder of videos."""
    return partial(index, mine, folder, *loaded)


@pytest.fixture
def open_library(folder, loaded):
    return partial(Library, folder, *loaded)


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


def encoded(folder):
    """The encoded videos of a library on disk, with when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def test_what_is_on_disk_is_not_encoded_again(build, folder):
    lines = []
    build(say=lines.append)
    before = encoded(folder)
    assert "3 of 3 videos: 648 tokens, 373.2 kB" in lines[0]
    build(say=lines.append)
    assert encoded(folder) == before
    assert len(lines) == 1


def test_the_content_of_a_file_decides(mine, build, folder, open_library):
    build()
    before = encoded(folder)
    (mine / "a.mp4").rename(mine / "moved.mp4")
    shutil.copy(mine / "moved.mp4", mine / "copy.mp4")
    build()
    assert encoded(folder) == before
    assert open_library().names == ["b.mp4", "copy.mp4", "more/c.mp4", "moved.mp4"]

    (mine / "empty.mp4").touch()  # is noted, and is not a video of the library
    write_mp4(mine / "b.mp4", render_world(make_world(109, 6)), 2)
    build()
    after = encoded(folder)
    assert len(after) == 3
    assert len(after.items() & before.items()) == 2  # the changed video was encoded, and its earlier features are gone

    (mine / "copy.mp4").unlink()  # is missed, although its content is still there
    (mine / "more/c.mp4").write_bytes(b"cut off")
    with pytest.raises(ValueError, match="2 of 4 videos.*: copy.mp4, more/c.mp4. Nothing was changed.* with --prune"):
        build()
    assert encoded(folder) == after
    lines = []
    build(prune=True, say=lines.append)
    assert lines == ["The library loses 2 of 4 videos: copy.mp4, more/c.mp4"]
    assert len(encoded(folder)) == 2
    assert open_library().names == ["b.mp4", "moved.mp4"]

    shutil.rmtree(mine)
    mine.mkdir()  # as where a disk is not mounted
    after = encoded(folder)
    with pytest.raises(ValueError, match="2 of 2 videos.*: b.mp4, moved.mp4. Nothing was changed.* remove the library"):
        build(prune=True)
    assert encoded(folder) == after


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"no video", "Invalid data"), (b"<svg width='10' height='10'></svg>", "there is no decoder for its codec")],
)
def test_a_bad_file_is_named_and_ends_nothing(mine, content, reason, build, open_library):
    (mine / "a.mp4").write_bytes(content)
    made = build()
    assert "Cannot decode" in made.entries["a.mp4"]["error"]
    assert reason in made.entries["a.mp4"]["error"]
    assert open_library().names == ["b.mp4", "more/c.mp4"]
    write_mp4(mine / "a.mp4", render_world(LIBRARY["a.mp4"]), 2)
    made = build()
    assert made.entries["a.mp4"]["error"] is None
    assert len(made.files) == 3


def test_a_new_file_that_cannot_be_read_is_named_and_a_known_one_is_not_lost(mine, monkeypatch, build, folder):
    measure = indexing.measure
    locked = ["a.mp4"]

    def read(path):
        if path.name in locked:
            raise PermissionError(13, "Permission denied", str(path))
        return measure(path)

    monkeypatch.setattr(indexing, "measure", read)
    made = build()
    assert made.entries["a.mp4"]["error"] == "Permission denied"
    assert len(made.files) == 2
    before = encoded(folder)
    locked[:] = ["b.mp4"]
    (mine / "b.mp4").touch()
    with pytest.raises(ValueError, match="or cannot be read: b.mp4. Nothing was changed"):
        build()
    assert encoded(folder) == before
    locked.clear()
    assert len(build().files) == 3


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(monkeypatch, build, folder):
    scan = os.scandir
    build()
    before = encoded(folder)

    def refuse(path):
        if Path(path).name == "more":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        build()
    assert encoded(folder) == before
    assert len(Index(folder).files) == 3


def test_links_are_followed_once(mine, tmp_path, build):
    (mine / "more").rename(tmp_path / "elsewhere")
    (mine / "more").symlink_to(tmp_path / "elsewhere")
    (mine / "itself").symlink_to(mine)
    assert list(build().files) == list(LIBRARY)


def test_videos_of_any_container_are_found_and_hidden_ones_are_not(mine, loaded):
    names = ("disc.VOB", "phone.3gp", "camera.MTS", "loop.gif")
    for name in names:
        shutil.copy(mine / "a.mp4", mine / name)
    (mine / ".trash").mkdir()
    for name in (".trash/gone.mp4", "._phone.mp4"):
        shutil.copy(mine / "phone.3gp", mine / name)
    (mine / "notes.txt").write_text("not a video")
    made = index(mine, mine / "library", *loaded)
    assert made.entries.keys() == {*LIBRARY, *names}


def test_a_video_stays_until_its_replacement_is_encoded(mine, monkeypatch, build, folder):
    before = build().entries
    files = encoded(folder)
    write_mp4(mine / "b.mp4", render_world(make_world(111)), 2)
    with monkeypatch.context() as patch:
        patch.setattr(indexing, "encode", lambda *call, **options: torch.load(folder / "half a video"))
        said = []
        assert build(say=said.append).entries == before
    assert said[1].startswith("b.mp4 keeps its earlier features: No such file")
    assert encoded(folder) == files
    assert build().entries["b.mp4"] != before["b.mp4"]
    assert len(encoded(folder).items() & files.items()) == 2


def test_a_folder_of_other_files_becomes_no_library(mine, loaded):
    with pytest.raises(FileExistsError, match=r"no library and holds files \(a.mp4, b.mp4, more\)"):
        index(mine, mine, *loaded)
    assert not (mine / ".lock").exists()


def test_videos_that_cannot_be_decoded_may_go(mine, build):
    (mine / "bad.mp4").write_bytes(b"no video")
    build()
    (mine / "bad.mp4").unlink()
    assert list(build().entries) == list(LIBRARY)


def test_videos_that_wait_are_not_lost_in_silence(mine, tmp_path, monkeypatch, build):
    """Interrupted before any was encoded, and then most were not there for a while."""
    monkeypatch.setattr(indexing, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build()
    monkeypatch.undo()
    for path in sorted(mine.rglob("*.mp4"))[1:]:
        path.rename(tmp_path / path.name)
    with pytest.raises(ValueError, match="Nothing was changed"):
        build()


def test_copies_take_room_once(mine, build, folder):
    said = []
    for number in range(3):
        shutil.copy(mine / "a.mp4", mine / f"copy-{number}.mp4")
    build(say=said.append)
    assert said[0].startswith("Encoding 6 of 6 videos: 648 tokens")
    assert len(encoded(folder)) == 3


def test_a_library_that_was_only_begun(build, folder, open_library):
    """The process ended after nothing, or after the first line."""
    build()
    journal = folder / "library.jsonl"
    before = encoded(folder)
    for begun in ("", journal.read_text().splitlines(keepends=True)[0]):
        journal.write_text(begun)
        with pytest.raises(ValueError, match="begin it first|holds no video"):
            open_library()
        build()
        assert open_library().names == list(LIBRARY)
        assert encoded(folder).keys() == before.keys()


def test_a_reader_changes_nothing(library):
    """A line that another process is writing is left to it."""
    journal = library.folder / "library.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"key": "ne')
    assert len(Index(library.folder).files) == 3
    assert journal.read_bytes() == whole + b'{"key": "ne'
    journal.write_bytes(whole)


def test_a_video_that_is_swapped_while_it_is_encoded_has_no_features_yet(tmp_path, monkeypatch, build):
    """Else the features of another video would stand for the first one's content."""
    other = tmp_path / "other.mp4"
    write_mp4(other, render_world(make_world(111)), 2)

    def swapping(*call, **options):
        path = call[2]
        if path.name == "b.mp4" and other.exists():
            other.replace(path)
        return session.encode(*call, **options)

    monkeypatch.setattr("qtsplus.library.indexing.encode", swapping)
    first = build().entries["b.mp4"]
    assert first["features"] is None
    assert first["error"].startswith("It was changed while it was read")
    again = build().entries["b.mp4"]
    assert again["features"] is not None
    assert again["content"] != first["content"]


def test_two_at_once(build, folder):
    (folder).mkdir()
    with (
        FileLock(folder / ".lock"),
        pytest.raises(ValueError, match="Another process works in"),
    ):
        build()


def test_others_may_read_what_the_umask_lets_them(library):
    journal = library.folder / "library.jsonl"
    rights = journal.stat().st_mode
    for path in library.index.files.values():
        assert path.stat().st_mode == rights


def test_what_is_missing_is_said(build, open_library):
    build().files["b.mp4"].unlink()
    library = open_library()
    assert library.missing == ["b.mp4"]
    answer = library.ask("What?", max_new_tokens=2)
    summary = summarise(library, "What?", max_new_tokens=2)
    assert answer.warnings == summary.warnings == library.warnings
    assert len(library.warnings) == 1


def test_other_settings_are_refused(library, videos, loaded):
    with pytest.raises(ValueError, match=r"was begun with fps=.*, not 1"):
        index(videos, library.folder, *loaded, fps=1)


def test_another_vision_tower_is_refused(library, videos, loaded):
    model = deepcopy(loaded[0])
    processor = loaded[1]
    with torch.no_grad():
        next(model.model.visual.parameters()).add_(1)
    with pytest.raises(ValueError, match="another vision tower or processor"):
        Library(library.folder, model, processor)
    with pytest.raises(ValueError, match="another vision tower or processor"):
        index(videos, library.folder, model, processor)


def test_a_folder_of_other_videos_empties_no_library(library, videos, loaded, tmp_path):
    write_mp4(tmp_path / "other.mp4", render_world(make_world(110, 1)), 2)
    before = encoded(library.folder)
    for _ in range(2):
        with pytest.raises(ValueError, match="3 of 3 videos of .* are not in"):
            index(tmp_path, library.folder, *loaded)
        (tmp_path / "other.mp4").rename(tmp_path / "a.mp4")  # other cameras give the same names
        (tmp_path / "other.mp4").write_bytes(b"no video")
    left = Index(library.folder)
    assert encoded(library.folder) == before
    assert list(left.entries) == list(LIBRARY)
    assert left.made["videos"] == str(videos.resolve())


def test_a_folder_without_videos_is_refused(loaded, tmp_path, folder):
    with pytest.raises(ValueError, match="There is no video in"):
        index(tmp_path, folder, *loaded)
    with pytest.raises(ValueError, match="There is no folder"):
        index(tmp_path / "missing", folder, *loaded)
    with pytest.raises(ValueError, match="There is no library in"):
        Library(tmp_path, *loaded)
    assert not (folder).exists()


def test_an_interrupted_run_goes_on(loaded, tiny_published, videos, monkeypatch, folder):
    encoded_before = []

    def interrupted(*call, **options):
        if encoded_before:
            raise KeyboardInterrupt
        encoded_before.append(call)
        return session.encode(*call, **options)

    monkeypatch.setattr("qtsplus.library.indexing.encode", interrupted)
    line = ["index", str(videos), "--out", str(folder)]
    line += ["--model", str(tiny_published)]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 130
    assert "qtsplus: interrupted; the same command goes on" in result.stderr
    before = encoded(folder)
    assert len(before) == 1
    monkeypatch.undo()
    index(videos, folder, *loaded, name=str(tiny_published))
    after = encoded(folder)
    assert len(after) == 3
    assert before.items() <= after.items()


def test_a_second_encoding_that_the_journal_lost_in_part_is_made_again(mine, monkeypatch, build, folder, open_library):
    """The machine stopped before the keys of a video and its copy were stored, and the last line was not on disk."""
    calls = []
    said = []

    def encode(*call, **options):
        calls.append(call)
        return replace(session.encode(*call, **options), seconds=len(calls) / 8)  # files of one size

    monkeypatch.setattr(indexing, "encode", encode)
    shutil.copy(mine / "more/c.mp4", mine / "copy.mp4")
    build().files["copy.mp4"].unlink()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(indexing._Indexing, "store_keys", interrupt)
        build()
    journal = folder / "library.jsonl"
    *left, _ = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(left))
    for _ in range(2):
        build(say=said.append)
    assert [line.split(":")[0] for line in said] == ["Encoding 1 of 4 videos"]
    assert len(calls) == 5, "a copy is not encoded"
    assert len(open_library().find(QUESTION, 100)) > 3
