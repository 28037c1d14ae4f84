"""`qtsplus data check`: what is wrong with a set, row by row."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .formats import Row, iter_records, iter_rows, locate, media_folder
from .media import AnyPath, media_key, media_problem
from .records import Caption, Record, VideoRecord, media_name


@dataclass(frozen=True)
class BadRow:
    """A row that should not be trained on."""

    row: int  # its number, see [`Row`]
    id: str | None  # its own, or its video
    check: str  # "schema", "media", "duplicate" or "overlap"
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
    other_videos: set[str] = set()
    if against is not None:
        other_videos = {_video_key(record) for record in iter_records(against)}
        if not other_videos:
            raise ValueError(f"{against} holds no record; expected a set that shares no video with this one.")
    first_rows: dict[str, int] = {}
    rows_of_video: dict[str, list[tuple[int, str | None]]] = {}  # numbers and names, by the place of the video
    bad: list[BadRow] = []
    count = 0
    for row in iter_rows(path):
        count += 1
        for check, reason in _problems(row, first_rows, other_videos):
            bad.append(BadRow(row.number, row.id, check, reason))
        place = locate(row, root) if media else None
        if place is not None:
            rows_of_video.setdefault(place, []).append((row.number, row.id))
    if count == 0:
        raise ValueError(f"{path} holds no row; expected one or more to check.")
    with ThreadPoolExecutor() as pool:
        problems = pool.map(media_problem, rows_of_video)
        for problem, rows in zip(problems, rows_of_video.values(), strict=True):
            if problem is not None:
                bad += [BadRow(number, name, "media", problem) for number, name in rows]
    bad.sort(key=lambda found: found.row)
    return Checked(count, bad, len(rows_of_video))


def _problems(
    row: Row,
    first_rows: dict[str, int],
    other_videos: set[str],
) -> Iterator[tuple[str, str]]:
    """
    The checks that a row fails, with the reasons.

    Args:
        first_rows: the first row with an id or a question, which is noted here.
        other_videos: what the videos of another set are called.
    """
    record = row.record
    if record is None:
        yield "schema", str(row.problem)
        return
    for what, text in _marks(record):
        first = first_rows.setdefault(f"{what} {text}", row.number)
        if first != row.number:
            yield "duplicate", f"row {first} has the same {what}."
    video = _video_key(record)
    if video in other_videos and video != "":
        yield "overlap", "the other set has the same video."


def _marks(record: Record) -> Iterator[tuple[str, str]]:
    """What no two rows may share; a question has one answer, which is not part of it."""
    if record.id is not None:
        yield "id", record.id
    texts = [_video_key(record)]
    what = "question about the same video"
    if isinstance(record, Caption):
        what = "caption about the same video"
        texts.append(record.caption)
    else:
        texts.append(record.question)
    if isinstance(record, VideoRecord):
        texts += record.turns[::2]
    yield what, "\0".join(" ".join(text.casefold().split()) for text in texts)


def _video_key(record: Record) -> str:
    """What the video of a record is called in every set; empty for a record without one."""
    name = media_name(record)
    return "" if name is None else media_key(name)
