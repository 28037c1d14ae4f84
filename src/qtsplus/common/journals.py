"""What a long run leaves on disk: finished parts while it runs, one JSON file at its end."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from .files import printable, whole_file
from .validation import explain

K = TypeVar("K")
V = TypeVar("V")
Key = str | int
Document = dict[str, Any]  # a JSON object

_LONGEST = 2**24  # bytes of a line, or of a file that is read whole: nothing here writes as much

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


class Journal:
    """
    What a run has finished, so that an interrupted one goes on where it stopped: a JSON line of settings, then a line
    for each entry. All of them are checked when they are read.

    A line is on disk when [`add`] returns, and outlives the process. A last line that was cut off counts as missing.
    `done` has the entries by key, which are read when they are asked for; a later one replaces an earlier one.

    Args:
        settings: what the entries depend on; those of the file when absent.
        schema: of settings and entries.
        mend: leave out entries that are damaged, where they would be refused; `damaged` counts them.

    Raises:
        ValueError: another file, or one that is damaged or of another format; a run that began with other settings.
    """

    settings: Document

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, object] | None = None,
        schema: Schema = Schema(),
        mend: bool = False,
    ):
        self.path = path
        self.schema = schema
        self.damaged = 0
        self.done = _Entries(self)
        earlier = None
        if os.path.lexists(path):
            earlier = self._read(mend, cuts=settings is not None)
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
        elif earlier != self.settings:
            raise ValueError(f"The run in {path.parent} {_difference(earlier, self.settings)}.")

    def _read(self, mend: bool, cuts: bool) -> Document | None:
        """
        The settings, with the places of the entries noted; `None` for an empty file.

        Args:
            cuts: whether a last line that was cut off is removed; another process may still be adding to it.
        """
        if not is_plain_file(self.path):
            raise ValueError(f"{self.path} is no file: choose another folder.")
        settings = None
        good_lines = []
        end = 0  # of the good lines
        with self.path.open("rb") as file:
            read_line = partial(file.readline, _LONGEST)
            for number, line in enumerate(iter(read_line, b""), start=1):
                if not line.endswith(b"\n") and len(line) < _LONGEST:
                    break
                try:
                    if settings is None:
                        settings = self._begin(line)
                    else:
                        self.done.places[self.parse(line).key] = end
                except ValueError as error:
                    if mend and settings is not None:
                        self.damaged += 1
                        continue
                    remedy = "choose another folder" if settings is None else self.schema.remedy
                    raise ValueError(f"Line {number} of {self.path} cannot be used: {error} So {remedy}.") from error
                end += len(line)
                if mend:
                    good_lines.append(line)
        if self.damaged:
            with whole_file(self.path, "wb") as rest:
                rest.writelines(good_lines)
        elif end < self.path.stat().st_size:
            if settings is None:
                raise ValueError(f"{self.path} is no journal of a run: choose another folder.")
            if cuts:
                os.truncate(self.path, end)
        return settings

    def _begin(self, line: bytes) -> Document:
        """The settings of a first line."""
        content = unseal(line)
        if "format" not in content:
            raise ValueError("the line with the settings is lost, or another version of qtsplus wrote it.")
        head = check_stored(_Head, content)
        if head.format != self.schema.format:
            raise ValueError(f"another version of qtsplus wrote it, in format {head.format}, not {self.schema.format}.")
        return check_stored(self.schema.settings, head.settings)

    def parse(self, line: bytes) -> Line:
        """The entry of a line; a `ValueError` for one that is damaged."""
        return check_stored(self.schema.line, unseal(line))

    def add(self, key: Key, value: object) -> None:
        """Keeps an entry, on disk before this returns; where it cannot be written, what was kept before stays."""
        entry = {"key": key, "value": value}
        line = seal(entry).encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            written = file.write(line)
            place = file.tell() - written
            if written < len(line):
                os.truncate(self.path, place)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.done.places[key] = place


class _Head(BaseModel):
    """The first line of a journal."""

    model_config = STORED

    format: int
    settings: Document


class _Entries(Mapping[Key, Any]):
    """The values of a journal, read when they are asked for."""

    def __init__(self, journal: Journal):
        self.journal = journal
        self.places: dict[Key, int] = {}

    def __getitem__(self, key: Key):
        place = self.places[key]
        with self.journal.path.open("rb") as file:
            file.seek(place)
            line = file.readline()
        return self.journal.parse(line).value

    def __iter__(self) -> Iterator[Key]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _difference(earlier: Document, wanted: Document) -> str:
    differing = []
    for name in earlier | wanted:
        before = earlier.get(name)
        now = wanted.get(name)
        if before != now:
            differing.append(f"{name}={before}, not {now}")
    return f"was begun with {' and with '.join(differing)}: go on with the same settings, or choose another folder"


def seal(document: Mapping[str, object]) -> str:
    """JSON of an object, which begins with a digest of the rest: [`unseal`] finds any damage by it."""
    rest = json.dumps(document)[1:]
    return _sealed(rest.encode()).decode()


def _sealed(rest: bytes) -> bytes:
    digest = hashlib.sha256(rest).hexdigest()[:16]
    return b'{"check": "' + digest.encode() + b'", ' + rest


def unseal(text: bytes) -> Document:
    """The JSON object of a text; a `ValueError` for another text, and for a sealed one that was changed."""
    if len(text) >= _LONGEST:
        raise ValueError(f"it is longer than {_LONGEST} bytes.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({type(error).__name__}).") from error
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object.")
    is_sealed = content.pop("check", None) is not None
    text = text.rstrip()
    rest = text.partition(b", ")[2]
    if is_sealed and text != _sealed(rest):
        raise ValueError("it was changed since it was written.")
    return content


def check_stored(kind, content: object):
    """What was read back, as a type for pydantic; a `ValueError` that names the fields that do not fit the type."""
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        raise ValueError(printable(explain(error, content))) from None


_adapter = cache(TypeAdapter)


def is_plain_file(path: Path) -> bool:
    """Whether it is a file itself: a link may lead anywhere, and a pipe or a device has no end."""
    return stat.S_ISREG(path.lstat().st_mode)


def read_stored(path: Path, kind):
    """A JSON file, sealed or not, as a type for pydantic; a `ValueError` of one line for any other file."""
    try:
        if not is_plain_file(path) or path.stat().st_size > _LONGEST:
            raise ValueError(f"it is no file of at most {_LONGEST} bytes.")
        return check_stored(kind, unseal(path.read_bytes()))
    except FileNotFoundError as error:
        raise ValueError(f"There is no {path}.") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error


def write_json(path: Path, document: object) -> None:
    """Writes a file that is never seen half written."""
    with whole_file(path) as file:
        file.write(json.dumps(document, indent=1) + "\n")
