"""`qtsplus data check`: what is wrong with a set, row by row."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ..common.files import printable
from .formats import Row, iter_records, iter_rows, locate, media_folder
from .media import media_key, media_problem
from .records import SPECIAL_TOKEN, Caption, Record, VideoRecord, all_texts, media_name

_AT_ONCE = 256  # rows, whose videos are looked at together


@dataclass(frozen=True)
class BadRow:
    """A row that should not be trained on."""

    row: int  # its number, see [`Row`]
    id: str | None  # its own, or its video
    check: str  # "schema", "media", "duplicate", "special token" or "overlap"
    reason: str


@dataclass
class Checked:
    """What a set's check has found."""

    rows: int = 0  # how many it has
    bad: list[BadRow] = field(default_factory=list)  # in order; a row may stand there for several reasons
    videos: int = 0  # how many were looked at


def check_set(
    path: str | os.PathLike,
    media_root: str | os.PathLike | None = None,
    against: str | os.PathLike | None = None,
    media: bool = True,
) -> Checked:
    """
    Checks a set in any format of [`iter_rows`]; a `ValueError` for one that cannot be read at all, or holds no row.

    Args:
        media_root: where its videos are looked for; beside the file when absent.
        against: another set, with which it should share no video, such as the test set.
        media: look for every video, and decode a frame of it.
    """
    root = media_folder(path, media_root)
    others = {} if against is None else _videos(against)
    result = Checked()
    seen: dict[bytes, int] = {}  # the first row with a text, by its digest
    videos: dict[str, str | None] = {}
    if media:
        from ..model import video_qtsplus  # noqa: F401, an import in a thread could not be interrupted
    rows = iter_rows(path)
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        while batch := list(islice(rows, _AT_ONCE)):
            places = [locate(row, root) if media else None for row in batch]
            new = [place for place in dict.fromkeys(places) if place is not None and place not in videos]
            videos.update(zip(new, pool.map(media_problem, new), strict=True))
            for row, place in zip(batch, places, strict=True):
                result.rows += 1
                reasons = [("schema", row.problem)] if row.record is None else list(_reasons(row.record, row, seen))
                reasons.append(("media", None if place is None else videos[place]))
                name = media_name(row.record) if row.record is not None and others else None
                if (other := None if name is None else others.get(_digest(media_key(name)))) is not None:
                    reasons.append(("overlap", f"row {other} of {Path(str(against)).name} is about the same video."))
                result.bad += [BadRow(row.number, row.id, check, printable(why)) for check, why in reasons if why]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if not result.rows:
        raise ValueError(f"{path} holds no row; expected one or more to check.")
    result.videos = len(videos)
    return result


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()


def _reasons(record: Record, row: Row, seen: dict[bytes, int]) -> Iterator[tuple[str, str | None]]:
    """What is wrong with a record itself, or beside the earlier ones. Digests of these are held, not their texts."""

    def earlier(*texts: str | None) -> int | None:
        normal = "\x00".join(" ".join((text or "").casefold().split()) for text in texts)
        return first if (first := seen.setdefault(_digest(normal), row.number)) != row.number else None

    if record.id is not None and (first := earlier("id", record.id)):
        yield "duplicate", f"row {first} has the same id."
    kind, asked = ("caption", [record.caption]) if isinstance(record, Caption) else ("question", [record.question])
    if isinstance(record, VideoRecord):  # the answer makes no other: one question has one
        asked += [question for question, _ in record.earlier]
    if first := earlier("text", media_key(media_name(record) or ""), *asked):
        yield "duplicate", f"row {first} has the same {kind} about the same video."
    if token := SPECIAL_TOKEN.search("\n".join(all_texts(record))):
        yield "special token", f"{token[0]!r} in its text is a special token; it is read as text."


def _videos(path: str | os.PathLike) -> dict[bytes, int]:
    """By a video's digest the first record of a set that is about it."""
    videos: dict[bytes, int] = {}
    number = 0
    for number, record in enumerate(iter_records(path), start=1):
        name = media_name(record)
        if name is not None:
            videos.setdefault(_digest(media_key(name)), number)
    if not number:
        raise ValueError(f"{path} holds no record; expected another set, which should share no video with this one.")
    return videos
