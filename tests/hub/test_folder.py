"""A folder appears whole or not at all, also when its process is killed or is not alone."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qtsplus.common.folders import whole_folder

# Writes the half of a folder, says so, and waits.
WRITER = """
import sys, time
from qtsplus.common.folders import whole_folder

with whole_folder(sys.argv[1]) as staging:
    (staging / "half").touch()
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path):
    """A process that is in the middle of writing `hub`."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "hub")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "writing\n", child.communicate()
    yield child
    child.kill()
    child.communicate()


def write(folder):
    with whole_folder(folder) as staging:
        (staging / "config.json").write_text("{}")


def test_what_another_process_writes_is_left_alone(writer, tmp_path):
    """Also when it was killed: only its user knows that."""
    before = sorted(tmp_path.rglob("*"))
    refusal = r"Another process is writing .*hub, or was stopped while it did: wait for it, or remove .*\.hub\.partial"
    with pytest.raises(FileExistsError, match=refusal):
        write(tmp_path / "hub")
    writer.kill()
    writer.wait()
    with pytest.raises(FileExistsError, match=refusal):
        write(tmp_path / "hub")
    assert sorted(tmp_path.rglob("*")) == before
    write(tmp_path / "other" / "deep")
    assert (tmp_path / "other" / "deep" / "config.json").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file; expected a folder"):
        write(tmp_path / "file" / "hub")


def lines(folder):
    """A folder of two files, one of them in a folder of its own."""
    with whole_folder(folder) as staging:
        (staging / "deep").mkdir()
        (staging / "README.md").write_text("a card")
        (staging / "deep" / "notes").write_text("a note")


@pytest.mark.parametrize("name", ["README.md", "deep/notes", "deep/mine", "mine", "__init__.py"])
def test_what_no_earlier_run_wrote_stays(tmp_path, name):
    """Also where it is called as a file that was written, or stands in its place."""
    lines(tmp_path / "hub")
    lines(tmp_path / "hub")
    (tmp_path / "hub" / name).write_text("my words")
    with pytest.raises(FileExistsError, match=rf"did not write, or that were changed since \({name}\)"):
        lines(tmp_path / "hub")
    assert (tmp_path / "hub" / name).read_text() == "my words"


def test_an_earlier_folder_stays_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    lines(folder)
    move = Path.rename

    def refuse(path, target):
        if path.suffix == ".partial":
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        return move(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError, match="hub"):
        write(folder)
    assert (folder / "README.md").read_text() == "a card"
    assert os.listdir(tmp_path) == ["hub"]
    monkeypatch.undo()
    write(folder)
    assert os.listdir(tmp_path) == ["hub"]
    assert not (folder / "README.md").exists()


def copy_a_file(staging):
    shutil.copyfile(staging.with_name("large"), staging / "copy")


def save_tensors(staging):
    save_file({"weight": torch.zeros(1000)}, staging / "model.safetensors")


def save_by_torch(staging):
    torch.save({"weight": torch.zeros(1000)}, staging / "optimizer.pt")


@pytest.mark.parametrize("fill", [copy_a_file, save_tensors, save_by_torch])
def test_a_disk_without_room_for_a_folder_is_named(tmp_path, fill):
    (tmp_path / "large").write_bytes(b"a" * 4000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    refused = pytest.raises(
        OSError, match=f"{tmp_path}/hub.* cannot be written: .*is the disk full|File too large: '{tmp_path}/hub'"
    )
    try:
        with refused, whole_folder(tmp_path / "hub") as staging:
            fill(staging)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "hub").exists()
