"""Small videos with known content, which the bundled model understands, as real H.264 files."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageDraw

from qtsplus.evaluation.labelled import Sighting
from qtsplus.model.video_qtsplus import open_video

COLOURS = {
    "red": (214, 48, 49),
    "green": (0, 148, 50),
    "blue": (9, 80, 208),
    "yellow": (249, 202, 36),
    "purple": (130, 58, 180),
    "orange": (240, 120, 20),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
NAMES = [(colour, shape) for colour in COLOURS for shape in SHAPES]
MARKS = ("ball", "door", "book", "bird")
SIDE = 168
FPS = 2  # pixels of a frame, 6 x 6 visual tokens; frames per second
_ROOM = 56  # pixels of a place, in which one thing is at a time


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    """Frames, `[T, H, W, 3]` uint8."""
    return np.random.default_rng(seed).integers(0, 255, (*shape, 3), np.uint8)


def write_mp4(
    path: str | os.PathLike,
    frames: Iterable[np.ndarray],
    fps: float,
    codec: str = "libx264",
    first: int = 0,
    muxer: dict[str, str] | None = None,
    **options: str,
) -> None:
    """
    Encodes frames, each `[H, W, 3]` uint8 with H and W even; the same frames give the same bytes.

    Args:
        first: the number of the first frame, which a player shows `first / fps` seconds late.
        muxer, options: of the container and of the encoder.
    """
    with av.open(os.fspath(path), "w", options=muxer or {}) as container:
        rate = Fraction(fps).limit_denominator(1001)
        if codec == "libx264":
            options.setdefault("preset", "veryfast")
            # The AVX-512 code of x264 gives other bytes every time.
            options.setdefault("x264-params", "cpu-independent=1")
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for number, array in enumerate(frames):
            if number == 0:
                stream.height = array.shape[0]
                stream.width = array.shape[1]
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            frame.pts = first + number
            frame.time_base = 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def render_clip(path: str | os.PathLike, seconds: float = 8, fps: int = 8, size=(224, 224), seed: int = 0) -> None:
    """Three coloured discs that cross the picture, in a frame of (width, height)."""
    rng = np.random.default_rng(seed)
    count = max(1, round(seconds * fps))
    side = 0.3 * min(size)
    room = np.array(size) - side
    colours = rng.permutation(list(COLOURS))
    discs = {}
    for colour in colours[:3]:
        first, last = room * rng.uniform(0, 1, (2, 2))
        discs[colour] = np.linspace(first, last, count)

    def draw(index: int) -> np.ndarray:
        image = Image.new("RGB", size, (210, 210, 210))
        canvas = ImageDraw.Draw(image)
        for colour, places in discs.items():
            left, top = places[index]
            canvas.ellipse([left, top, left + side, top + side], fill=COLOURS[colour])
        return np.asarray(image)

    write_mp4(path, map(draw, range(count)), fps)


@dataclass(frozen=True)
class Thing:
    """A shape with a mark in it, which stands at (x, y) in pixels, its middle, between two whole seconds."""

    colour: str
    shape: str
    mark: str
    appears_at: int
    vanishes_at: int
    start: tuple[int, int]
    side: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def question(self) -> str:
        return f"What is in the {self.name}?"

    @property
    def box(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom), all inside."""
        x, y = self.start
        half = self.side // 2
        return (
            x - half,
            y - half,
            x + half,
            y + half,
        )

    @property
    def sighting(self) -> Sighting:
        left, top, right, bottom = self.box
        return Sighting(
            self.appears_at,
            self.vanishes_at,
            (left / SIDE, top / SIDE, right / SIDE, bottom / SIDE),
        )


@dataclass(frozen=True)
class World:
    """A video of things, no two of one name."""

    seed: int
    seconds: int
    objects: tuple[Thing, ...]


def make_world(seed: int, seconds: int = 8, objects: int = 8) -> World:
    """Draws `objects` things that stay for 1 to 3 seconds, as far as there is room for them."""
    rng = np.random.default_rng(seed)
    places = SIDE // _ROOM
    free = np.ones((seconds, places, places), dtype=bool)
    things = []
    longest = min(3, seconds)
    for name in rng.permutation(len(NAMES))[:objects]:
        life = int(rng.integers(1, longest + 1))
        begin = int(rng.integers(0, seconds - life + 1))
        end = begin + life
        free_places = np.argwhere(free[begin:end].all(0))
        if len(free_places) == 0:
            continue
        row, column = rng.choice(free_places)
        free[begin:end, row, column] = False
        side = int(rng.integers(24, 30))
        x, y = rng.choice((14, 42), 2)  # in the middle of a token
        colour, shape = NAMES[name]
        thing = Thing(
            colour=colour,
            shape=shape,
            mark=str(rng.choice(MARKS)),
            appears_at=begin,
            vanishes_at=end,
            start=(int(column * _ROOM + x), int(row * _ROOM + y)),
            side=side,
        )
        things.append(thing)
    things.sort(key=lambda thing: thing.appears_at)
    return World(seed, seconds, tuple(things))


def render_world(world: World) -> np.ndarray:
    """`[T, 168, 168, 3]` uint8, two frames a second: the things before clouds, with grain."""
    rng = np.random.default_rng(world.seed)
    greys = rng.integers(100, 150, (6, 6, 3), dtype=np.uint8)
    clouds = Image.fromarray(greys).resize((SIDE, SIDE), Image.BICUBIC)
    frames = []
    for index in range(world.seconds * FPS):
        second = index / FPS
        frame = clouds.copy()
        canvas = ImageDraw.Draw(frame)
        for thing in world.objects:
            if thing.appears_at <= second < thing.vanishes_at:
                _draw(canvas, thing)
        grain = rng.integers(0, 5, (SIDE, SIDE, 1))  # no two frames are the same
        frames.append(np.asarray(frame) + grain)
    return np.stack(frames).clip(0, 255).astype(np.uint8)


def _draw(canvas: ImageDraw.ImageDraw, thing: Thing) -> None:
    colour = COLOURS[thing.colour]
    left, top, right, bottom = thing.box
    x, y = thing.start
    side = thing.side
    if thing.shape == "circle":
        canvas.ellipse(thing.box, fill=colour)
    elif thing.shape == "square":
        canvas.rectangle(thing.box, fill=colour)
    elif thing.shape == "triangle":
        canvas.polygon([(left, bottom), (x, top), (right, bottom)], fill=colour)
    elif thing.shape == "cross":
        arm = side / 6
        canvas.rectangle([x - arm, top, x + arm, bottom], fill=colour)
        canvas.rectangle([left, y - arm, right, y + arm], fill=colour)
    else:
        canvas.ellipse(thing.box, outline=colour, width=side // 4)
    if thing.shape == "triangle":
        y += 0.14 * side
    paint = (250, 250, 250)
    if thing.colour in ("yellow", "orange"):
        paint = (15, 15, 15)
    _draw_mark(canvas, thing.mark, x, y, 0.275 * side, paint)


# How far a mark reaches to the right and down, as parts of `half`.
MARK_SIDES = {
    "ball": (0.7, 0.7),
    "door": (0.3, 1),
    "book": (1, 0.3),
}


def _draw_mark(
    canvas: ImageDraw.ImageDraw,
    mark: str,
    x: float,
    y: float,
    half: float,
    paint: tuple[int, int, int],
) -> None:
    """Draws a mark around (x, y), which reaches `half` pixels to each side."""
    if mark in MARK_SIDES:
        across, along = MARK_SIDES[mark]
        width = across * half
        height = along * half
        draw = canvas.ellipse if mark == "ball" else canvas.rectangle
        draw([x - width, y - height, x + width, y + height], fill=paint)
    else:
        wing_tips = y - 0.8 * half
        wings = [
            (x - half, wing_tips),
            (x, y + 0.6 * half),
            (x + half, wing_tips),
        ]
        width = max(2, round(0.5 * half))
        canvas.line(wings, fill=paint, width=width, joint="curve")


def write_records(folder: Path, videos: int = 2, seconds: int = 4, objects: int = 6) -> Path:
    """`records.jsonl`: of every video a question about each thing, with its answer and its evidence."""
    lines = []
    for seed in range(videos):
        world = make_world(seed, seconds, objects)
        write_mp4(folder / f"{seed}.mp4", render_world(world), FPS)
        for thing in world.objects:
            record = {
                "video": f"{seed}.mp4",
                "kind": "attribute",
                "question": thing.question,
                "answer": thing.mark,
                "evidence": [[asdict(thing.sighting)]],
            }
            lines.append(json.dumps(record) + "\n")
    path = folder / "records.jsonl"
    path.write_text("".join(lines))
    return path


LIBRARY = {
    "a.mp4": make_world(160, 6),
    "b.mp4": make_world(161, 6),
    "more/c.mp4": make_world(162, 6),
}


def read_video(path: str, choose: Any) -> tuple[np.ndarray, Any]:
    """The chosen frames of a video `[T, H, W, 3]`, and its metadata, as [`open_video`] gives them."""
    video = open_video(path, choose)
    return np.stack(list(video.decode())), video.about.metadata
