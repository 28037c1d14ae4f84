"""The videos of a set under their media root: where they lie, and whether they can be read."""

import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

UNREADABLE = (ValueError, OSError, Image.DecompressionBombError)  # what reading a bad video raises
OTHER_IMAGES = (".gif", ".tif", ".tiff", ".heic", ".avif", ".jp2")  # of which some are not read as frames
VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v")


def find_media(name: str, root: str | os.PathLike, source: str | None = None) -> str:
    """
    Where a video lies, which a record names as a file, with its suffix or without, a folder of frames, or an address:
    under the root, or under the folder of it that LLaVA-Video's rows name as their source. Else `root/name`.
    """
    plain = os.path.join(root, name)
    if "://" in name or os.path.exists(plain):
        return name if "://" in name else plain
    bases = [plain, *([os.path.join(root, source, name)] if source else [])]
    return next((base + end for base in bases for end in ("", *VIDEO_SUFFIXES) if os.path.exists(base + end)), plain)


def media_key(name: str) -> str:
    """What one video is called whether its suffix is named or not."""
    name = os.path.normpath(name)
    return name[: -len(Path(name).suffix)] if name.lower().endswith(VIDEO_SUFFIXES) else name


def is_frame_folder(path: str) -> bool:
    """Whether a folder holds images."""
    from ..video_qtsplus import IMAGE_SUFFIXES

    with os.scandir(path) as entries:
        return any(entry.name.lower().endswith(IMAGE_SUFFIXES) for entry in entries)


def media_problem(path: str) -> str | None:
    """
    Why a model could not read a file, an address or a folder of frames; `None` for a good one.

    Of a file a frame is decoded and every packet is read, which tells whether the end is there; of a folder the first
    and the last frame are decoded.
    """
    from ..video_qtsplus import image_paths, load_frames, open_video

    try:
        if os.path.isdir(path):
            frames = image_paths(path)
            load_frames([frames[0], frames[-1]])
            return _folder_problem(path, [os.path.basename(frame) for frame in frames])
        video = open_video(path, lambda total, fps: np.zeros(1, dtype=np.int64))
    except UNREADABLE as error:
        return " ".join(str(error).split())
    return video.warnings[0] if video.warnings else None


def _folder_problem(folder: str, frames: Sequence[str]) -> str | None:
    """What of a folder is not read, or is not there."""
    others = sorted(name for name in set(os.listdir(folder)) - set(frames) if name.lower().endswith(OTHER_IMAGES))
    if others:
        return f"{others[0]!r} in {folder!r} is an image of a kind that is not read as a frame."
    counted = [re.fullmatch(r"(\D*)(\d+)(\D*)", name) for name in frames]
    numbers = [int(match[2]) for match in counted if match is not None]
    if len(numbers) < len(frames) or len({(match[1], match[3]) for match in counted if match is not None}) > 1:
        return None
    steps = [after - before for before, after in pairwise(numbers)]
    gap = next((place for place, step in enumerate(steps) if step > min(steps)), None)
    return None if gap is None else f"frames are missing in {folder!r} between {frames[gap]!r} and {frames[gap + 1]!r}."
