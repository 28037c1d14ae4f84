"""What commands leave behind: files that are never seen half written, and texts about them."""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

from filelock import FileLock, Timeout
from rich.filesize import decimal as size
from safetensors import SafetensorError

NAMED = 8  # the most names that a message lists
_UNWRITTEN = re.compile("while serializing|inline_container")  # in errors of safetensors, and of `torch.save`
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, or the largest file that is allowed


@contextmanager
def whole_file(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """
    A file to write, as UTF-8 text or with the mode `"wb"` as bytes, that is at `path` once the context ends. If that
    fails, a file that was there before is left alone.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        encoding = None if "b" in mode else "utf-8"
        with naming_full_disk(target), part.open(mode, encoding=encoding) as file:
            yield file
            os.chmod(part, os.fstat(file.fileno()).st_mode)  # safetensors puts a file there that no one else may read
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Raises an `OSError` that names what is written, for a disk without room. Others name the source, or nothing."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if not _UNWRITTEN.search(str(error)):
            raise
        raise OSError(f"{path} cannot be written: {first_line(error)} (is the disk full?)") from error
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """A folder for one process at a time, whose work goes on where it stopped; a `ValueError` for a second process."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"Another process works in {folder}: wait for it, or choose another folder.") from error
    with lock:
        yield


def check_output(path: str | os.PathLike, overwrite: bool = False) -> Path:
    """
    The path of a file that is about to be made, before anything is computed for it; a `ValueError` for a folder, a file
    that is there already and may not be overwritten, or a place that cannot be written.
    """
    target = check_folder(Path(path).parent) / Path(path).name
    if target.is_dir():
        raise ValueError(f"{target} is a folder; expected the name of a file to write.")
    if os.path.lexists(target) and not overwrite:
        raise ValueError(f"{target} is there already: name another file, or move it away.")
    return target


def check_folder(path: str | os.PathLike) -> Path:
    """
    The real path of a folder for results, which need not be there yet; a `ValueError` for one that cannot be written.
    """
    folder = Path(path).resolve()  # else `..` behind a folder that is not there yet would hide what is there
    existing = _existing(folder)
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file; expected a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{existing} cannot be written: choose another place, or change its permissions.")
    return folder


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raises `ValueError` for a disk without so many free bytes."""
    free = shutil.disk_usage(_existing(folder.absolute())).free
    if needed > free:
        raise ValueError(f"{folder} has {size(free)} free, but {what} take about {size(needed)}: free some space.")


def clock(seconds: float) -> str:
    """As a player shows it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(count: int, noun: str) -> str:
    """Such as "1 video" and "1,200 videos"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Names on one line, as [`printable`]: the first [`NAMED`] of them, and how many more there are."""
    line = ", ".join(map(printable, names[:NAMED]))
    if len(names) > NAMED:
        line += f" and {len(names) - NAMED:,} more"
    return line


def first_line(error: object) -> str:
    """The first line of an error's text, without "[Errno 21]", or else what kind of error it is."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return re.sub(r"^\[Errno -?\d+\] ", "", lines[0])


# Controls, the ends of lines, what turns the direction of writing, and halves of characters.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text of others, such as a file's name, on one line: what a terminal would obey, or cannot show, written out."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def rewritten(text: str, rules: Mapping[str, str]) -> str:
    """The text after all rules: patterns with their replacements, which are applied in order."""
    for pattern, replacement in rules.items():
        text = re.sub(pattern, replacement, text)
    return text
