"""`qtsplus data check`: what is wrong with a set, row by row."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .formats import iter_rows, locate, media_folder
from .media import AnyPath, media_problem


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
    Checks a set in any format of [`iter_rows`], and decodes a frame of every video.

    Args:
        media_root: where its videos are looked for; beside the file when absent.

    Raises:
        ValueError: a set that cannot be read at all, or holds no row.
    """
    root = media_folder(path, media_root)
    rows_of_video: dict[str, list[tuple[int, str | None]]] = {}  # numbers and names, by the place of the video
    bad: list[BadRow] = []
    count = 0
    for row in iter_rows(path):
        count += 1
        if row.record is None:
            bad.append(BadRow(row.number, row.id, str(row.problem)))
        place = locate(row, root)
        if place is not None:
            rows_of_video.setdefault(place, []).append((row.number, row.id))
    if count == 0:
        raise ValueError(f"{path} holds no row; expected one or more to check.")
    with ThreadPoolExecutor() as pool:
        problems = pool.map(media_problem, rows_of_video)
        for problem, rows in zip(problems, rows_of_video.values(), strict=True):
            if problem is not None:
                bad += [BadRow(number, name, problem) for number, name in rows]
    bad.sort(key=lambda found: found.row)
    return Checked(count, bad, len(rows_of_video))
