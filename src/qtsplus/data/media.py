"""The videos of a set under their media root: where they lie, and whether they can be read."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.journals import State, file_state

if TYPE_CHECKING:
    from ..model.video_qtsplus import AboutVideo

AnyPath = str | os.PathLike
UNREADABLE = (ValueError, OSError)  # what reading a bad video raises
_SUFFIXES = (
    "mp4 mkv webm mov avi m4v ts m2ts mpg mpeg wmv flv mts ogv gif 3gp 3g2 vob m2v asf f4v mxf dv mjpeg y4m nut ivf rm"
)
VIDEO_SUFFIXES = tuple(f".{suffix}" for suffix in _SUFFIXES.split())  # of what the reader can open


def find_media(
    name: str,
    root: AnyPath,
    source: object = None,
) -> str:
    """
    Where a video lies, which a record names as a file, with its suffix or without, a folder of frames, or an address:
    under the root, or under the folder of it that LLaVA-Video's rows name as their source. Else `root/name`.
    """
    if "://" in name or name.startswith("data:"):
        return name
    bases = [Path(root, name)]
    if isinstance(source, str):
        bases.append(Path(root, source, name))
    for base in bases:
        for suffix in ("", *VIDEO_SUFFIXES):
            place = f"{base}{suffix}"
            if os.path.exists(place):
                return place
    return str(bases[0])


def media_state(place: str) -> dict[str, State]:
    """The [`file_state`] of a file, or of each file in a folder, by its name; empty for an address."""
    if not place:
        return {}
    try:
        files = [Path(place)]
        if os.path.isdir(place):
            files = [path for path in sorted(files[0].iterdir()) if path.exists()]
        return {path.name: file_state(path) for path in files}
    except (OSError, ValueError):
        return {}


def examine(path: str) -> "AboutVideo | None":
    """
    Raises one of [`UNREADABLE`] for a file, an address or a folder of frames that a model could not read. Gives what is
    known about a video; `None` for a folder.

    Of a file a frame is decoded and every packet is read, which tells whether the end is there; of a folder every frame
    is decoded.
    """
    from ..model.video_qtsplus import open_folder, open_video

    if os.path.isdir(path):
        for _ in open_folder(path, fps=1.0).decode():
            pass
        return None
    about = open_video(path, lambda total, fps: [0]).about
    if about.warnings:
        raise ValueError(about.warnings[0])
    return about


def is_readable(path: str) -> bool:
    """Whether [`examine`] finds nothing wrong."""
    try:
        examine(path)
    except UNREADABLE:
        return False
    return True
