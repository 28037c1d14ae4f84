"""What a long run leaves on disk: finished parts while it runs, one JSON file at its end."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from .files import printable, whole_file
from .validation import explain

K = TypeVar("K")
V = TypeVar("V")
Key = str | int

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


def file_state(path: str | os.PathLike, follow_symlinks: bool = True) -> State:
    """
    The state of a file now. A program can set the size and the time of modification of another file as it likes
    (`cp -p`), but not the time of change. That one also moves when the file is renamed, or gets other permissions or
    another hard link.
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
    What may stand in a journal.

    Args:
        settings, line: types for pydantic: of the settings a dictionary, such as a `TypedDict`; of an entry a [`Line`].
        format: counts up where they change; a journal of another one is refused.
        remedy: what to do about an entry that is damaged.
    """

    settings: Any = dict[str, Any]
    line: Any = Line[Key, Any]
    format: int = 1
    remedy: str = "remove it, and run the same command again"


class Journal:
    """
    What a run has finished, so that an interrupted one goes on where it stopped: a JSON line of settings, then one for
    each entry. All of them are checked when they are read.

    A line is on disk when [`add`] returns, and outlives the process. A last line that was cut off counts as missing.
    `done` has the entries by key, which are read when they are asked for; a later one replaces an earlier one.

    Args:
        settings: what the entries depend on; those of the file when absent.
        schema: of settings and entries.
        mend: leave out entries that are damaged, where they would be refused; `damaged` counts them.

    Raises:
        ValueError: another file, or one that is damaged or of another format; a run that began with other settings.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any] | None = None, schema: Schema = Schema(), mend: bool = False
    ):
        self.path, self.schema, self.mend, self.damaged = path, schema, mend, 0
        self.done = _Entries(self)
        wanted = None if settings is None else json.loads(json.dumps(settings))
        earlier = self._read(wanted is not None) if os.path.lexists(path) else None
        if wanted is None and earlier is None:
            raise ValueError(f"{path} holds a run that never began: begin it first.")
        self.settings: Any = wanted or earlier
        if wanted is None or wanted == earlier:
            return
        if earlier is not None:
            raise ValueError(f"The run in {path.parent} {_difference(earlier, wanted)}.")
        with whole_file(path) as file:
            file.write(seal({"format": schema.format, "settings": wanted}) + "\n")

    def _read(self, goes_on: bool) -> dict[str, Any] | None:
        """The settings, with the places of the entries noted; `None` where the file ends before them."""
        settings, end, damaged = None, 0, set[int]()
        if not is_plain_file(self.path):
            raise ValueError(f"{self.path} is no file: choose another folder.")
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), start=1):
                try:
                    if len(line) == _LONGEST:
                        raise ValueError(f"it is longer than {_LONGEST} bytes.")
                    if not line.endswith(b"\n"):
                        break
                    if settings is None:
                        settings = self._begin(line)
                    else:
                        self.done.places[self.parse(line).key] = end
                except ValueError as error:
                    if settings is None or not self.mend:
                        what = "choose another folder" if settings is None else self.schema.remedy
                        raise ValueError(f"Line {number} of {self.path} cannot be used: {error} So {what}.") from error
                    damaged.add(number)
                end += len(line)
        if damaged:
            with self.path.open("rb") as file, whole_file(self.path, "wb") as rest:
                lines = enumerate(iter(lambda: file.readline(_LONGEST), b""), start=1)
                rest.writelines(line for number, line in lines if number not in damaged)
            self.damaged = len(damaged)
            self.done.places.clear()
            return self._read(goes_on)
        if end < self.path.stat().st_size:  # else another process may be adding to it
            if settings is None:
                raise ValueError(f"{self.path} is no journal of a run: choose another folder.")
            if goes_on:
                os.truncate(self.path, end)
        return settings

    def _begin(self, line: bytes) -> dict[str, Any]:
        """The settings of a first line."""
        content = unseal(line)
        if content.keys() == {"key", "value"}:
            raise ValueError("the line before it, which says what the run depends on, is lost.")
        head = check_stored(_Head, content if "format" in content else {"format": 0, "settings": content})
        if head.format != self.schema.format:
            version = "a later" if head.format > self.schema.format else "an earlier"
            raise ValueError(f"{version} version of qtsplus wrote it (format {head.format}, not {self.schema.format}).")
        return check_stored(self.schema.settings, head.settings)

    def parse(self, line: bytes) -> Any:
        """The entry of a line; a `ValueError` for one that is damaged."""
        return check_stored(self.schema.line, unseal(line))

    def add(self, key: Key, value: Any) -> None:
        """Keeps an entry, on disk before this returns; where it cannot be written, what was kept before stays."""
        line = seal({"key": key, "value": value}).encode() + b"\n"
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

    format: Annotated[int, Field(ge=0)]
    settings: dict[str, Any]


class _Entries(Mapping[Any, Any]):
    """The values of a journal, read when they are asked for."""

    def __init__(self, journal: Journal):
        self.journal = journal
        self.places: dict[Any, int] = {}

    def __getitem__(self, key: Any) -> Any:
        place = self.places[key]
        with self.journal.path.open("rb") as file:
            file.seek(place)
            return self.journal.parse(file.readline()).value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _difference(earlier: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    names = [name for name in {**earlier, **wanted} if earlier.get(name) != wanted.get(name)]
    differing = [f"{name}={earlier.get(name)}, not {wanted.get(name)}" for name in names]
    return f"was begun with {' and with '.join(differing)}: go on with the same settings, or choose another folder"


def seal(document: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON of an object, which begins with a digest of the rest: [`unseal`] finds any damage by it."""
    return _sealed(json.dumps(document, indent=indent).encode()[1:]).decode()


def _sealed(rest: bytes) -> bytes:
    return b'{"check": "' + hashlib.sha256(rest).hexdigest()[:16].encode() + b'", ' + rest


def unseal(text: bytes) -> dict[str, Any]:
    """The JSON object of a text; a `ValueError` where it is none, or was sealed and is not what it was."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({type(error).__name__}).") from error
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object.")
    if content.pop("check", None) is not None and text.rstrip() != _sealed(text.rstrip().partition(b", ")[2]):
        raise ValueError("it was changed since it was written.")
    return content


def check_stored(kind: Any, content: Any) -> Any:
    """What was read back, as a type for pydantic; a `ValueError` that names the fields that are none of it."""
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        raise ValueError(printable(explain(error, content))) from None


def is_plain_file(path: Path) -> bool:
    """Whether it is a file itself: a link may lead anywhere, and a pipe or a device has no end."""
    return stat.S_ISREG(path.lstat().st_mode)


def read_stored(path: Path, kind: Any) -> Any:
    """A JSON file, sealed or not, as a type for pydantic; a `ValueError` of one line where it is none."""
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


_adapter = cache(TypeAdapter)


def write_json(path: Path, document: dict[str, Any] | list[Any]) -> None:
    """Writes a file that is never seen half written."""
    with whole_file(path) as file:
        file.write(json.dumps(document, indent=1) + "\n")
