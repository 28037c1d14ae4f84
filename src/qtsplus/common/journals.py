"""What a long run leaves on disk: finished parts while it runs, one JSON file at its end."""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, with_config
from transformers.utils import logging
from typing_extensions import TypedDict

from .files import first_line, whole_file
from .validation import validated

logger = logging.get_logger(__name__)

K = TypeVar("K")
V = TypeVar("V")
Key = str | int
Document = dict[str, Any]  # a JSON object

# What is read back may be a stranger's: no value of another type, no unknown field, neither NaN nor infinity.
STORED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


@with_config(STORED)
class State(TypedDict):
    """What tells, without reading it, whether a file is the one that was read before."""

    size: int
    modified: int
    inode: int
    changed: int


def file_state(path: str | os.PathLike | int, follow_symlinks: bool = True) -> State:
    """
    The state of a file now, by its path or, where it is open, by its descriptor. A program can set the size and the
    time of modification of another file as it likes (`cp -p`), but not the time of change. That one also moves when the
    file is renamed, or gets other permissions or another hard link.
    """
    status = os.stat(path, follow_symlinks=follow_symlinks)
    return {
        "size": status.st_size,
        "modified": status.st_mtime_ns,
        "inode": status.st_ino,
        "changed": status.st_ctime_ns,
    }


class Line(BaseModel, Generic[K, V]):
    """An entry of a journal: `Line[int, Result]` has numbers as keys."""

    model_config = STORED

    key: K
    value: V


@dataclass(frozen=True)
class Schema:
    """
    What may be in a journal.

    Args:
        settings, line: types for pydantic: of the settings a dictionary, such as a `TypedDict`; of an entry a [`Line`].
        format: counts up where they change; a journal of another format is refused.
        remedy: what to do about an entry that is damaged.
    """

    settings: object = Document
    line: object = Line[Key, object]
    format: int = 1
    remedy: str = "remove it, and run the same command again"


@with_config(STORED)
class _Head(TypedDict):
    """The first line of a journal."""

    format: int
    settings: Document


class Journal:
    """
    What a run has finished, so that an interrupted one goes on where it stopped: a JSON line of settings, then a line
    for each entry. All of them are checked when they are read.

    A line is on disk when [`add`] returns, and outlives the process. A last line that was cut off counts as missing.
    `done` has the entries by key; a later one replaces an earlier one.

    Args:
        settings: what the entries depend on; those of the file when absent.
        schema: of settings and entries.

    Raises:
        ValueError: another file, or one that is damaged or of another format; a run that began with other settings.
    """

    settings: Document

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, object] | None = None,
        schema: Schema = Schema(),
    ):
        self.path = path
        self.schema = schema
        self.done: dict[Key, Any] = {}
        earlier = None
        check_own_file(path)
        if path.exists():
            earlier = self._read(cuts=settings is not None)
        if settings is None:
            if earlier is None:
                raise ValueError(f"{path} holds a run that never began: begin it first.")
            self.settings = earlier
            return
        self.settings = json.loads(json.dumps(settings))
        if earlier is None:
            head = {"format": schema.format, "settings": self.settings}
            with whole_file(path) as file:
                file.write(seal(head) + "\n")
            return
        for name in earlier | self.settings:
            begun = earlier.get(name)
            given = self.settings.get(name)
            if begun != given:
                raise ValueError(
                    f"The run in {path.parent} was begun with {name}={begun}, not {given}: go on with the same "
                    "settings, or choose another folder."
                )

    def _read(self, cuts: bool) -> Document | None:
        """
        Reads settings and entries; gives the settings, or `None` for an empty file.

        Args:
            cuts: whether a last line that was cut off is removed; another process may still be adding to it.
        """
        settings = None
        with self.path.open("rb") as file:
            lines = file.readlines()
        # The first line is never cut off: a file that begins so is another program's.
        if len(lines) > 1 and not lines[-1].endswith(b"\n"):
            cut_off = lines.pop()
            logger.warning_once(
                f"The last line of {self.path} was cut off and counts as missing; the command that writes the file "
                "makes it again."
            )
            if cuts:
                os.truncate(self.path, self.path.stat().st_size - len(cut_off))
        for number, line in enumerate(lines, start=1):
            try:
                if settings is None:
                    settings = self._begin(line)
                else:
                    entry = self._parse(line)
                    self.done[entry.key] = entry.value
            except ValueError as error:
                remedy = "choose another folder" if settings is None else self.schema.remedy
                raise ValueError(f"Line {number} of {self.path} cannot be used: {error} So {remedy}.") from error
        return settings

    def _begin(self, line: bytes) -> Document:
        """The settings of a first line."""
        head = unseal(line)
        written = head.get("format")
        if written != self.schema.format:
            raise ValueError(f"another version of qtsplus wrote it, in format {written}, not {self.schema.format}.")
        return validated(self.schema.settings, validated(_Head, head)["settings"])

    def _parse(self, line: bytes) -> Line:
        """The entry of a line; a `ValueError` for one that is damaged."""
        return validated(self.schema.line, unseal(line))

    def add(self, key: Key, value: object) -> None:
        """Keeps an entry, on disk before this returns; where it cannot be written, what was kept before stays."""
        line = seal({"key": key, "value": value}).encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            written = file.write(line)
            if written < len(line):
                os.truncate(self.path, file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.done[key] = self._parse(line).value


def seal(document: Mapping[str, object]) -> str:
    """JSON of an object, which begins with a digest of the rest: [`unseal`] finds any damage by it."""
    rest = json.dumps(document)[1:]
    digest = hashlib.sha256(rest.encode()).hexdigest()
    return f'{{"check": "{digest[:16]}", {rest}'


def unseal(text: bytes) -> Document:
    """The JSON object of a text; a `ValueError` for another text, and for a sealed one that was changed."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({type(error).__name__}).") from error
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object.")
    is_sealed = "check" in content
    content.pop("check", None)
    if is_sealed and seal(content).encode() != text.rstrip():
        raise ValueError("it was changed since it was written.")
    return content


def check_own_file(path: Path) -> None:
    """Raises `ValueError` for what is no file itself: a link may lead anywhere, and a pipe or a device has no end."""
    is_other = path.exists() and not path.is_file()
    if path.is_symlink() or is_other:
        raise ValueError(f"{path} is a link, a folder, a pipe or a device; expected a file: remove it.")


def read_stored(path: Path, kind):
    """A JSON file, sealed or not, as a type for pydantic; a `ValueError` of one line for any other file."""
    check_own_file(path)
    try:
        return validated(kind, unseal(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be used: {first_line(error)}") from error


def write_json(path: Path, document: object) -> None:
    """Writes a file that is never seen half written."""
    with whole_file(path) as file:
        file.write(json.dumps(document, indent=1) + "\n")
