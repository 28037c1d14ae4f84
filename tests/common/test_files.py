"""What commands write appears whole or not at all, and where it can be written is known before the work begins."""

import os
import resource
import socket
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtsplus.common import files as output
from qtsplus.common.files import check_folder, check_output, first_line, printable, whole_file, working_in


@pytest.mark.parametrize(("mode", "content"), [("w", "ä\n"), ("wb", b"\xff")])
def test_a_file_appears_whole(tmp_path, mode, content):
    target = tmp_path / "new" / "file"
    with whole_file(target, mode) as file:
        file.write(content)
        assert not target.exists()
    assert target.read_bytes() == (content if mode == "wb" else content.encode())
    assert os.listdir(target.parent) == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="asks whether a process is there")
def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path):
    """And what belongs to one that is at work stays."""
    script = """
import os, sys
from qtsplus.common.files import whole_file
with whole_file(sys.argv[1]):
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "file [1]")])
    (left,) = os.listdir(tmp_path)
    other = f".file [1].{output._HOST}.{os.getppid()}.part"
    (tmp_path / other).touch()
    with whole_file(tmp_path / "file [1]") as file:
        file.write("whole")
    assert sorted(os.listdir(tmp_path)) == sorted(["file [1]", other])


def test_a_lock_is_no_link(tmp_path):
    """Which a stranger may have put there, to make a file elsewhere."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError), working_in(tmp_path / "work"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_what_another_machine_writes_is_left_to_it(tmp_path):
    """Its processes cannot be asked whether they are there."""
    other = tmp_path / ".file.elsewhere.1.part"
    other.touch()
    with whole_file(tmp_path / "file") as file:
        assert all(socket.gethostname() in path.name for path in tmp_path.iterdir() if path != other)
        file.write("whole")
    assert sorted(os.listdir(tmp_path)) == [other.name, "file"]


def test_a_failure_leaves_what_was_there(tmp_path):
    target = tmp_path / "file"
    target.write_text("before")
    with pytest.raises(KeyboardInterrupt), whole_file(target) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["file"]


def test_outputs_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    assert check_output(tmp_path / "new" / "file") == tmp_path / "new" / "file"
    assert check_output(tmp_path / "file", overwrite=True) and check_folder(tmp_path / "new")
    for path, message in (
        (" ", "is empty"),
        (tmp_path, "is a folder"),
        (tmp_path / "file", "there already"),
        (tmp_path / "file" / "below", "is a file"),
    ):
        with pytest.raises(ValueError, match=message):
            check_output(path)
    for path, message in (("", "is empty"), (tmp_path / "file", "is a file")):
        with pytest.raises(ValueError, match=message):
            check_folder(path)


def test_a_place_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ValueError, match="cannot be written"):
        check_output(tmp_path / "file")


@given(
    st.text(st.characters(exclude_categories=())) | st.sampled_from(["a\x1b[31mb", "\u202egpj.mp4", "a\nb", "\udcff"])
)
def test_what_is_printed_is_one_line_that_a_terminal_does_not_obey(text):
    shown = printable(text)
    shown.encode()
    assert (
        not {unicodedata.category(one) for one in shown} & {"Cc", "Cs", "Zl", "Zp"} and len([*shown.splitlines()]) < 2
    )
    assert not {unicodedata.bidirectional(one) for one in shown} & {
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
    }
    assert printable(shown) == shown and (shown == text or not text.isprintable() or "\u200e" in text)


def test_texts():
    assert first_line(ValueError("one\ntwo")) == "one" and first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_disk_without_room_is_named(tmp_path, mode):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        refused = pytest.raises(OSError, match=f"File too large: '{tmp_path}/file'")
        with refused, whole_file(tmp_path / "file", mode) as file:
            file.write("a" * 2000 if mode == "w" else b"a" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
