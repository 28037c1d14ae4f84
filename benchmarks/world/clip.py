"""Small synthetic videos of coloured shapes that move over a quiet background, as real H.264 files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tests.clips import write_mp4

from qtsplus.model.video_qtsplus import open_video

COLOURS = {
    "red": (214, 48, 49),
    "green": (0, 148, 50),
    "blue": (9, 80, 208),
    "yellow": (249, 202, 36),
    "purple": (130, 58, 180),
    "orange": (240, 120, 20),
}
CLIP_SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True)
class ClipObject:
    """
    One shape of a clip.

    Attributes:
        colour, shape: its name in [`COLOURS`] and in [`CLIP_SHAPES`].
        appears_at, vanishes_at: seconds; it is visible from the one until just before the other.
        boxes: `[T, 4]` float, its (left, top, right, bottom) in pixels of every frame; NaN where it is not visible.
    """

    colour: str
    shape: str
    appears_at: float
    vanishes_at: float
    boxes: np.ndarray


@dataclass(frozen=True)
class Clip:
    """A rendered video: its file, length in seconds, frames per second, (width, height) in pixels and objects."""

    path: str
    seconds: float
    fps: float
    size: tuple[int, int]
    objects: tuple[ClipObject, ...]


def render_clip(
    path: str | os.PathLike, seconds: float = 8.0, fps: int = 8, size: tuple[int, int] = (224, 224), seed: int = 0
) -> Clip:
    """
    Renders three shapes of different colours, each of which comes, moves in a straight line, and goes.

    Args:
        path: the mp4 file to write.
        seconds: its length.
        fps: frames per second.
        size: (width, height) in pixels, both even.
        seed: the same seed gives the same frames.

    Returns:
        What can be seen, where and when.
    """
    rng = np.random.default_rng(seed)
    times = np.arange(max(1, round(seconds * fps))) / fps
    colours = rng.permutation(list(COLOURS))[:3]
    objects = tuple(_draw_object(rng, str(colour), times, seconds, size) for colour in colours)
    shade = int(rng.integers(190, 230))
    # Drawn as they are written, so that an hour of video takes no memory.
    write_mp4(path, (_render_frame(objects, index, size, shade) for index in range(len(times))), fps)
    return Clip(path=os.fspath(path), seconds=seconds, fps=fps, size=size, objects=objects)


def _draw_object(
    rng: np.random.Generator, colour: str, times: np.ndarray, seconds: float, size: tuple[int, int]
) -> ClipObject:
    appears_at, vanishes_at = (float(time) for time in seconds * rng.uniform((0, 0.6), (0.5, 1.0)))
    side = rng.uniform(0.2, 0.35) * min(size)
    room = np.array(size) - side
    start, stop = rng.uniform(0, 1, 2) * room, rng.uniform(0, 1, 2) * room
    progress = (times - appears_at) / (vanishes_at - appears_at)
    corner = start + progress[:, None] * (stop - start)
    boxes = np.concatenate([corner, corner + side], axis=1)
    boxes[(times < appears_at) | (times >= vanishes_at)] = np.nan
    return ClipObject(colour, str(rng.choice(CLIP_SHAPES)), appears_at, vanishes_at, boxes)


def _render_frame(objects: Sequence[ClipObject], index: int, size: tuple[int, int], shade: int) -> np.ndarray:
    image = Image.new("RGB", size, (shade, shade, shade))
    canvas = ImageDraw.Draw(image)
    for item in objects:
        left, top, right, bottom = item.boxes[index]
        if np.isnan(left):
            continue
        fill = COLOURS[item.colour]
        if item.shape == "circle":
            canvas.ellipse([left, top, right, bottom], fill=fill)
        elif item.shape == "square":
            canvas.rectangle([left, top, right, bottom], fill=fill)
        else:
            canvas.polygon([(left, bottom), ((left + right) / 2, top), (right, bottom)], fill=fill)
    return np.asarray(image)


def read_video(path: str, choose: Any) -> tuple[np.ndarray, Any]:
    """The chosen frames of a video `[T, H, W, 3]`, and its metadata, as [`open_video`] gives them."""
    video = open_video(path, choose)
    return np.stack(list(video.decode())), video.about.metadata
