"""What commands write appears whole or not at all, and where it can be written is known before the work begins."""

import os
import resource
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtsplus.common.files import check_folder, check_output, first_line, printable, whole_file

HOSTILE = ["a\x1b[31mb", "\u202egpj.mp4", "a\nb", "\udcff"]
OBEYED = {"Cc", "Cs", "Zl", "Zp"}  # controls, halves of characters and the ends of lines
TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI"}  # the direction of writing


@pytest.mark.parametrize(("mode", "content"), [("w", "ä\n"), ("wb", b"\xff")])
def test_a_file_appears_whole(tmp_path, mode, content):
    target = tmp_path / "new" / "file"
    with whole_file(target, mode) as file:
        file.write(content)
        assert not target.exists()
    written = content if mode == "wb" else content.encode()
    assert target.read_bytes() == written
    assert os.listdir(target.parent) == ["file"]


def test_a_failure_leaves_what_was_there(tmp_path):
    target = tmp_path / "file"
    target.write_text("before")
    with pytest.raises(KeyboardInterrupt), whole_file(target) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_outputs_that_can_be(tmp_path):
    file = tmp_path / "file"
    file.touch()
    below = tmp_path / "new" / "file"
    assert check_output(below) == below
    assert check_output(file, overwrite=True) == file
    assert check_folder(below) == below


@pytest.mark.parametrize(
    ("check", "name", "message"),
    [
        (check_output, "", "is a folder"),
        (check_output, "link", "there already"),
        (check_output, "file/below", "is a file"),
        (check_output, "new/../file", "there already"),
        (check_folder, "new/../file", "is a file"),
        (check_folder, "file", "is a file"),
    ],
)
def test_outputs_that_cannot_be(tmp_path, check, name, message):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(ValueError, match=message):
        check(tmp_path / name)


def test_a_place_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ValueError, match="cannot be written"):
        check_output(tmp_path / "file")


@given(st.text(st.characters(exclude_categories=())) | st.sampled_from(HOSTILE))
def test_what_is_printed_is_one_line_that_a_terminal_does_not_obey(text):
    shown = printable(text)
    shown.encode()
    assert len(shown.splitlines()) < 2
    assert OBEYED.isdisjoint(map(unicodedata.category, shown))
    assert TURNING.isdisjoint(map(unicodedata.bidirectional, shown))
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_an_error_is_its_first_line_or_its_kind():
    assert first_line(ValueError("first\nsecond")) == "first"
    assert first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_disk_without_room_is_named(tmp_path, mode):
    content = "a" * 2000
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    refused = pytest.raises(OSError, match=f"File too large: '{tmp_path}/file'")
    try:
        with refused, whole_file(tmp_path / "file", mode) as file:
            file.write(content if mode == "w" else content.encode())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
