"""What a run has finished, in SQLite: an item counts once it stands here, and is never asked about again."""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

JOURNAL = "journal.sqlite"

_TABLES = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS items (
    position INTEGER PRIMARY KEY, id TEXT NOT NULL, failed INTEGER NOT NULL, kept TEXT NOT NULL, dropped TEXT NOT NULL,
    reasons TEXT NOT NULL, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL
);
"""


@dataclass
class Ledger:
    """
    What one item has cost so far.

    Args:
        requests: that were sent, also those that failed.
        prompt_tokens, completion_tokens: as the teacher counts them.
        reasons: why something had to be asked again, one sentence each.
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """
    A finished item.

    Args:
        position: of the item in the input.
        id: the item's.
        failed: nothing came of it; the ledger's reasons say why.
        kept, dropped: the rows that came of it.
        ledger: what it cost.
    """

    position: int
    id: str
    failed: bool
    kept: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    ledger: Ledger


class Journal:
    """
    The journal of a folder. A process that is killed loses no entry; one whose machine loses power may lose the last.

    Args:
        folder: where `journal.sqlite` is, or is made.

    Raises:
        ValueError: the file is no journal.
    """

    def __init__(self, folder: Path):
        self.path = folder / JOURNAL
        # Every write is a transaction of its own, in a log that outlives the process.
        self.database = sqlite3.connect(self.path, isolation_level=None)
        try:
            self.database.execute("PRAGMA journal_mode=WAL")
            self.database.execute("PRAGMA synchronous=NORMAL")
            self.database.executescript(_TABLES)
        except sqlite3.DatabaseError as error:
            self.database.close()
            raise ValueError(f"{self.path} is no journal of a run ({error}): choose another folder.") from error

    def close(self) -> None:
        self.database.close()

    def settings(self) -> dict[str, Any]:
        """What the run was begun with; empty for a new one."""
        rows = self.database.execute("SELECT name, value FROM settings")
        return {name: json.loads(value) for name, value in rows}

    def require_settings(self, wanted: Mapping[str, Any]) -> None:
        """
        Notes the settings of a new run.

        Raises:
            ValueError: the run was begun with others.
        """
        found = self.settings()
        if not found:
            rows = [(name, json.dumps(value)) for name, value in wanted.items()]
            with self.database:
                self.database.execute("BEGIN")
                self.database.executemany("INSERT INTO settings VALUES (?, ?)", rows)
            return
        names = [name for name in {**found, **wanted} if found.get(name) != json.loads(json.dumps(wanted.get(name)))]
        if names:
            differing = [f"{name}={found.get(name)}, not {wanted.get(name)}" for name in names]
            raise ValueError(
                f"The run in {self.path.parent} was begun with {' and with '.join(differing)}: go on with what it was "
                "begun with, or choose another folder."
            )

    def has(self, position: int) -> bool:
        """Whether an item is finished."""
        return self.database.execute("SELECT 1 FROM items WHERE position = ?", (position,)).fetchone() is not None

    def write(self, entry: Entry) -> None:
        """Finishes an item; it is on disk when this returns."""
        texts = (_dump(entry.kept), _dump(entry.dropped), json.dumps(entry.ledger.reasons))
        costs = (entry.ledger.requests, entry.ledger.prompt_tokens, entry.ledger.completion_tokens)
        row = (entry.position, entry.id, entry.failed, *texts, *costs)
        self.database.execute(f"INSERT INTO items VALUES ({', '.join('?' * len(row))})", row)

    def forget_failed(self) -> None:
        """Lets what failed be tried again."""
        self.database.execute("DELETE FROM items WHERE failed")

    def entries(self) -> Iterator[Entry]:
        """All finished items by position, one at a time."""
        rows = self.database.execute("SELECT * FROM items ORDER BY position")
        for position, name, failed, kept, dropped, reasons, requests, read, written in rows:
            ledger = Ledger(requests, read, written, json.loads(reasons))
            yield Entry(position, name, bool(failed), _load(kept), _load(dropped), ledger)

    def totals(self) -> dict[str, int]:
        """Finished and failed items, and the sums of what they cost."""
        names = [entry.name for entry in fields(Ledger) if entry.name != "reasons"]
        sums = ", ".join(f"COALESCE(SUM({name}), 0)" for name in ("failed", *names))
        row = self.database.execute(f"SELECT COUNT(*), {sums} FROM items").fetchone()
        return dict(zip(("items", "failed", *names), row, strict=True))


def _dump(rows: Iterable[Mapping[str, Any]]) -> str:
    return json.dumps(list(rows))


def _load(text: str) -> list[dict[str, Any]]:
    return json.loads(text)


__all__ = ["JOURNAL", "Entry", "Journal", "Ledger"]
