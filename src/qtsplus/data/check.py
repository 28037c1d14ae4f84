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
from .records import SPECIAL_TOKEN, Caption, VideoRecord, all_texts, media_name

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
    """The findings of a set's check."""

    rows: int = 0  # the number of rows
    bad: list[BadRow] = field(default_factory=list)  # in order; a row may be there for several reasons
    videos: int = 0  # the number of videos that were looked at


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
    other_set = Path(str(against)).name
    result = Checked()
    seen: dict[bytes, int] = {}  # the first row with a text, by its digest
    videos: dict[str, str | None] = {}  # what is wrong with each video
    for batch in _batches(iter_rows(path)):
        places: list[str | None] = [None] * len(batch)
        if media:
            places = [locate(row, root) for row in batch]
            videos.update(_media_problems([place for place in places if place is not None and place not in videos]))
        for row, place in zip(batch, places, strict=True):
            result.rows += 1
            reasons = list(_reasons(row, seen))
            if place is not None:
                reasons.append(("media", videos[place]))
            other = _other_row(row, others)
            if other is not None:
                reasons.append(("overlap", f"row {other} of {other_set} is about the same video."))
            for check, reason in reasons:
                if reason:
                    result.bad.append(BadRow(row.number, row.id, check, printable(reason)))
    if not result.rows:
        raise ValueError(f"{path} holds no row; expected one or more to check.")
    result.videos = len(videos)
    return result


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch = list(islice(rows, _AT_ONCE))
    while batch:
        yield batch
        batch = list(islice(rows, _AT_ONCE))


def _media_problems(places: list[str]) -> dict[str, str | None]:
    """What is wrong with each video, from one frame of it; several are decoded at a time."""
    from ..model import video_qtsplus  # noqa: F401, an import in a thread could not be interrupted

    places = list(dict.fromkeys(places))
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        return dict(zip(places, pool.map(media_problem, places), strict=True))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _other_row(row: Row, others: dict[bytes, int]) -> int | None:
    """The row of the other set that is about the same video."""
    if row.record is None:
        return None
    name = media_name(row.record)
    if name is None:
        return None
    return others.get(_digest(media_key(name)))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()


def _reasons(row: Row, seen: dict[bytes, int]) -> Iterator[tuple[str, str | None]]:
    """What is wrong with a row itself, or beside the earlier ones. Digests of these are held, not their texts."""
    record = row.record
    if record is None:
        yield "schema", row.problem
        return

    def first_with(texts: list[str]) -> int:
        """The first row with these texts, which may be this one."""
        normal = "\x00".join(" ".join(text.casefold().split()) for text in texts)
        return seen.setdefault(_digest(normal), row.number)

    if record.id is not None:
        first = first_with(["id", record.id])
        if first != row.number:
            yield "duplicate", f"row {first} has the same id."
    kind = "question"
    texts = ["text", media_key(media_name(record) or "")]
    if isinstance(record, Caption):
        kind = "caption"
        texts.append(record.caption)
    else:
        texts.append(record.question)
    if isinstance(record, VideoRecord):  # an answer does not make it another record: one question has one answer
        texts += [question for question, _ in record.earlier]
    first = first_with(texts)
    if first != row.number:
        yield "duplicate", f"row {first} has the same {kind} about the same video."
    token = SPECIAL_TOKEN.search("\n".join(all_texts(record)))
    if token is not None:
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
