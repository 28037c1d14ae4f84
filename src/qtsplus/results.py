"""What a long run leaves on disk: finished parts while it runs, one JSON file at its end."""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .output import whole_file

Key = str | int


class Journal:
    """
    What a run has finished, so that an interrupted one goes on where it stopped: a JSON line of settings, then one for
    each entry.

    A line is on disk when [`add`] returns, and outlives the process. A last line that was cut off counts as missing.
    `done` has the entries by key, which are read when they are asked for; a later one replaces an earlier one.

    Args:
        settings: what the entries depend on; those of the file when absent.
        begin_anew: throw away a run with other settings, where it would be refused.

    Raises:
        ValueError: another file, or a run that began with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None, begin_anew: bool = True):
        self.path = path
        self.done = _Entries(path)
        wanted = None if settings is None else json.loads(json.dumps(settings))
        earlier = self._read(wanted is not None) if path.exists() else None
        if wanted is None and earlier is None:
            raise ValueError(f"{path} holds a run that never began: begin it first.")
        self.settings: dict[str, Any] = wanted or earlier or {}
        if earlier is not None and (wanted is None or earlier == wanted):
            return
        if earlier is not None and not begin_anew:
            raise ValueError(f"The run in {path.parent} {_difference(earlier, self.settings)}.")
        self.done.places.clear()
        with whole_file(path) as file:
            file.write(json.dumps(self.settings) + "\n")

    def _read(self, goes_on: bool) -> dict[str, Any] | None:
        """The settings, with the places of the entries noted; `None` where the file ends before them."""
        settings, end = None, 0
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    entry = json.loads(line)
                    if settings is None:
                        settings = dict(entry)
                    else:
                        self.done.places[entry["key"]] = end
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(f"{self.path} is no journal of a run: choose another folder.") from error
                end += len(line)
        if end < self.path.stat().st_size:  # else another process may be adding to it
            if settings is None:
                raise ValueError(f"{self.path} is no journal of a run: choose another folder.")
            if goes_on:
                os.truncate(self.path, end)
        return settings

    def add(self, key: Key, value: Any) -> None:
        """Keeps an entry, on disk before this returns; where it cannot be written, what was kept before stays."""
        line = json.dumps({"key": key, "value": value}).encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            written = file.write(line)
            place = file.tell() - written
            if written < len(line):
                os.truncate(self.path, place)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.done.places[key] = place

    def finish(self, target: Path, document: dict[str, Any]) -> Path:
        """Writes the whole result, or nothing, and forgets the entries."""
        write_json(target, document)
        self.path.unlink()
        return target


class _Entries(Mapping[Key, Any]):
    """The values of a journal, read when they are asked for."""

    def __init__(self, path: Path):
        self.path = path
        self.places: dict[Key, int] = {}

    def __getitem__(self, key: Key) -> Any:
        with self.path.open("rb") as file:
            file.seek(self.places[key])
            return json.loads(file.readline())["value"]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _difference(earlier: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    names = [name for name in {**earlier, **wanted} if earlier.get(name) != wanted.get(name)]
    differing = [f"{name}={earlier.get(name)}, not {wanted.get(name)}" for name in names]
    return f"was begun with {' and with '.join(differing)}: go on with the same settings, or choose another folder"


def write_json(path: Path, document: dict[str, Any] | list[Any]) -> None:
    """Writes a file that is never seen half written."""
    with whole_file(path) as file:
        file.write(json.dumps(document, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """A result, or `None` where there is none yet."""
    return json.loads(path.read_text()) if path.exists() else None
