"""`qtsplus data check`: what is wrong with a set, row by row."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from .formats import Row, iter_records, iter_rows, locate, media_folder
from .media import AnyPath, media_key, media_problem
from .records import SPECIAL_TOKEN, Caption, Record, VideoRecord, media_name


@dataclass(frozen=True)
class BadRow:
    """A row that should not be trained on."""

    row: int  # its number, see [`Row`]
    id: str | None  # its own, or its video
    check: str  # "schema", "media", "duplicate", "special token" or "overlap"
    reason: str


@dataclass(frozen=True)
class Checked:
    """The findings of a set's check."""

    rows: int  # the number of rows
    bad: list[BadRow]  # in order; a row may be there for several reasons
    videos: int  # the number of videos that were looked at


def check_set(
    path: AnyPath,
    media_root: AnyPath | None = None,
    against: AnyPath | None = None,
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
    others = {} if against is None else _rows_by_video(against)
    first_rows: dict[str, int] = {}
    rows_of_video: dict[str, list[BadRow]] = {}  # which are bad if the video at this place is
    bad: list[BadRow] = []
    count = 0
    for row in iter_rows(path):
        count += 1
        for check, reason in _problems(row, first_rows, others):
            bad.append(BadRow(row.number, row.id, check, reason))
        place = locate(row, root) if media else None
        if place is not None:
            about = BadRow(row.number, row.id, "media", "")
            rows_of_video.setdefault(place, []).append(about)
    if not count:
        raise ValueError(f"{path} holds no row; expected one or more to check.")
    with ThreadPoolExecutor() as pool:
        problems = pool.map(media_problem, rows_of_video)
        for problem, rows in zip(problems, rows_of_video.values(), strict=True):
            if problem is not None:
                bad += [replace(row, reason=problem) for row in rows]
    bad.sort(key=lambda found: found.row)
    return Checked(count, bad, len(rows_of_video))


def _problems(row: Row, first_rows: dict[str, int], others: dict[str, str]) -> Iterator[tuple[str, str]]:
    """
    The checks that a row fails, with the reasons.

    Args:
        first_rows: the first row with an id or a question, which is noted here.
        others: the row of another set that is about a video.
    """
    record = row.record
    if record is None:
        yield "schema", str(row.problem)
        return
    if record.id is not None:
        first = first_rows.setdefault(f"id {record.id}", row.number)
        if first != row.number:
            yield "duplicate", f"row {first} has the same id."
    kind = "caption" if isinstance(record, Caption) else "question"
    first = first_rows.setdefault(f"{kind} {_normal_text(record)}", row.number)
    if first != row.number:
        yield "duplicate", f"row {first} has the same {kind} about the same video."
    token = SPECIAL_TOKEN.search(json.dumps(record.row(), ensure_ascii=False))
    if token is not None:
        yield "special token", f"{token[0]!r} in its text is a special token; it is read as text."
    video = _video_key(record)
    if video and video in others:
        yield "overlap", f"{others[video]} is about the same video."


def _normal_text(record: Record) -> str:
    """The video and the text by which a record is recognised; a question has one answer, which is not part of it."""
    texts = [_video_key(record)]
    if isinstance(record, Caption):
        texts.append(record.caption)
    else:
        texts.append(record.question)
    if isinstance(record, VideoRecord):
        texts += [question for question, _ in record.earlier]
    return "\x00".join(" ".join(text.casefold().split()) for text in texts)


def _video_key(record: Record) -> str:
    """What the video of a record is called in every set; empty for a record without one."""
    name = media_name(record)
    if name is None:
        return ""
    return media_key(name)


def _rows_by_video(path: AnyPath) -> dict[str, str]:
    """By video the first row of a set that is about it."""
    rows: dict[str, str] = {}
    number = 0
    for number, record in enumerate(iter_records(path), start=1):
        rows.setdefault(_video_key(record), f"row {number} of {Path(path).name}")
    if not number:
        raise ValueError(f"{path} holds no record; expected another set, which should share no video with this one.")
    return rows
