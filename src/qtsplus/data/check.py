"""`qtsplus data check`: what is wrong with a set, row by row."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .formats import iter_rows, locate, media_folder
from .media import UNREADABLE, AnyPath, examine
from .records import Choice, check_shown, parse_needles


@dataclass(frozen=True)
class BadRow:
    """A row that should not be trained on."""

    row: int  # its number, see [`Row`]
    id: str | None  # its own, or its video
    reason: str


@dataclass(frozen=True)
class Checked:
    """The findings of a set's check."""

    rows: int  # the number of rows
    bad: list[BadRow]  # in order
    videos: int  # the number of videos that were looked at


def check_set(path: AnyPath, media_root: AnyPath | None = None) -> Checked:
    """
    Checks a set in any format of [`iter_rows`] with its evidence, and decodes a frame of every video.

    Args:
        media_root: where its videos are looked for; beside the file when absent.

    Raises:
        ValueError: a set that cannot be read at all, or holds no row.
    """
    root = media_folder(path, media_root)
    rows_of_video: dict[str, list[tuple[int, str | None]]] = {}  # numbers and names, by the place of the video
    sightings = {}  # by the number of the row
    bad = []
    count = 0
    for row in iter_rows(path):
        count += 1
        try:
            if row.record is None:
                raise ValueError(row.problem)
            if not isinstance(row.record, Choice):  # whose evidence is a text
                sightings[row.number] = sum(parse_needles(row.content, "its evidence"), [])
        except ValueError as error:
            bad.append(BadRow(row.number, row.id, str(error)))
        place = locate(row, root)
        if place is not None:
            rows_of_video.setdefault(place, []).append((row.number, row.id))
    if count == 0:
        raise ValueError(f"{path} holds no row; expected one or more to check.")
    with ThreadPoolExecutor() as pool:
        examined = [pool.submit(examine, place) for place in rows_of_video]
    for video, rows in zip(examined, rows_of_video.values(), strict=True):
        for number, name in rows:
            try:
                about = video.result()
                if about is not None:
                    check_shown("its evidence", sightings.get(number, ()), about)
            except UNREADABLE as error:
                bad.append(BadRow(number, name, " ".join(str(error).split())))
    bad.sort(key=lambda found: found.row)
    return Checked(count, bad, len(rows_of_video))
