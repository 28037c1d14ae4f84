"""The crowded TinyWorld: twenty marked shapes at a time over a texture that drifts, so that no token stands out.

Every object fills one cell of the grid of visual tokens at a time, and at every second as many are there. A name takes
two words ("red circle"), since there are other red things and other circles; no two objects of a video share it.
Objects stand still, or step from cell to cell, one a second.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw

from qtsplus.evaluation.labelled import sighting_tokens

from .clip import COLOURS
from .scene import (
    CELL,
    DIRECTIONS,
    FPS,
    FRAME_SIZE,
    GRID,
    OBJECT_SHAPES,
    World,
    WorldObject,
    draw_shape,
    sightings,
)
from .token_words import UNNAMED

# All words here are one token each of qtsplus-tiny's tokenizer.
CROWD_COLOURS = {**COLOURS, "black": (15, 15, 15), "white": (245, 245, 245)}
MARKS = ("ball", "box", "door", "book", "bird")
NAMES = tuple((colour, shape) for colour in CROWD_COLOURS for shape in OBJECT_SHAPES)

CROWD_SECONDS = range(1, 129)  # one second is a still
# Visible at a time. Twice as many come in a video, and some names must be left that never do.
MAX_CROWD = range(1, 23)
LEAST_ABSENT = 4
# An object moves with this chance, if it stays long enough.
MOVING = 0.25

# What a visual token can be said to show: its colour, shape and mark, or "nothing".
LABEL_WORDS = ("nothing", *CROWD_COLOURS, *OBJECT_SHAPES, *MARKS)
ASPECTS = tuple(("nothing", *words) for words in (CROWD_COLOURS, OBJECT_SHAPES, MARKS))
# And beside the second before: that its object has just come, and where it has moved.
CONTEXT = (("nothing", "appear"), ("nothing", *DIRECTIONS))
ALL_WORDS = (*LABEL_WORDS, "appear", *DIRECTIONS)


@dataclass(frozen=True)
class CrowdObject(WorldObject):
    """
    A shape with a mark in its middle.

    Attributes:
        mark: its name in [`MARKS`].
        distance: pixels that it moves in all, a cell each second from the first on.
    """

    mark: str = field(kw_only=True)

    def moved_at(self, time: float) -> float:
        return min(int(time - self.appears_at) * CELL, self.distance)


@dataclass(frozen=True)
class Crowd(World):
    """
    A crowded video.

    Attributes:
        objects: as many at every second, each alone in its cell.
        shade: mean of the background's texture.
        drift: pixels that the texture moves in a frame, along x and along y.
    """

    objects: tuple[CrowdObject, ...]
    drift: tuple[int, int] = field(kw_only=True)


# --------------------------------------------------------------------------------------------------------------------
# Making
# --------------------------------------------------------------------------------------------------------------------


def make_crowd(seed: int, seconds: int = 8, max_objects: int = 21) -> Crowd:
    """
    Makes a crowded world; the same arguments give the same one.

    Args:
        seed: any whole number from 0.
        seconds: length, in [`CROWD_SECONDS`].
        max_objects: visible at a time, in [`MAX_CROWD`]; there are so many or one less, of 36 cells.

    Raises:
        ValueError: `seconds` or `max_objects` out of range or not whole.
    """
    for name, value, known in (("seconds", seconds, CROWD_SECONDS), ("max_objects", max_objects, MAX_CROWD)):
        if value not in known:
            raise ValueError(
                f"{name}={value!r}: expected a whole number from {known[0]} to {known[-1]} in a crowded world."
            )
    rng = np.random.default_rng([seed, seconds, 5])
    count = int(rng.integers(max(1, max_objects - 1), max_objects + 1))
    lives = _make_lives(rng, seconds, count)
    objects = (
        _place(rng, seconds, lives, MOVING) or _place(rng, seconds, lives, MOVING / 2) or _place(rng, seconds, lives)
    )
    return Crowd(
        seed=seed,
        seconds=seconds,
        objects=tuple(sorted(objects, key=lambda item: (item.appears_at, item.colour, item.shape))),
        specks=(),
        shade=int(rng.integers(90, 150)),
        noise=0,
        drift=(int(rng.integers(-6, 7)), int(rng.integers(-6, 7))),
    )


def _make_lives(rng: np.random.Generator, seconds: int, count: int) -> list[tuple[int, int]]:
    """When objects appear and vanish, in order: `count` of them at every second."""
    thirds = min(3, len(NAMES) - LEAST_ABSENT - 2 * count)  # so many times three take turns, else two
    lives: list[tuple[int, int]] = []
    for place in range(count):
        turns = min(3 if place < thirds else 2, seconds)
        cuts = sorted(rng.choice(np.arange(1, seconds), turns - 1, replace=False).tolist()) if turns > 1 else []
        lives += zip([0, *cuts], [*cuts, seconds], strict=True)
    return sorted(lives)


def _place(
    rng: np.random.Generator, seconds: int, lives: list[tuple[int, int]], moving: float = 0.0
) -> list[CrowdObject]:
    """An object for each life, alone in its cells; none where no room was left, which only moving ones can cause."""
    names = rng.permutation(len(NAMES))
    taken = np.zeros((seconds, GRID, GRID), dtype=bool)
    objects = []
    for (appears_at, vanishes_at), name in zip(lives, names, strict=False):
        there = taken[appears_at:vanishes_at]
        direction, steps, path = _free_path(rng, there, rng.random() < moving)
        if path is None:
            return []
        rows, columns = path
        there[np.arange(len(there)), rows, columns] = True
        colour, shape = NAMES[name]
        objects.append(
            CrowdObject(
                colour,
                shape,
                appears_at,
                vanishes_at,
                start=(float(columns[0] * CELL + CELL / 2), float(rows[0] * CELL + CELL / 2)),
                side=int(rng.integers(24, 28)),
                direction=direction,
                distance=steps * CELL,
                mark=MARKS[rng.integers(len(MARKS))],
            )
        )
    return objects


def _free_path(
    rng: np.random.Generator, there: np.ndarray, move: bool
) -> tuple[str | None, int, tuple[np.ndarray, np.ndarray] | None]:
    """A way through the seconds of a life that meets nobody (`there` `[seconds, GRID, GRID]`): rows and columns."""
    life = len(there)
    if move and life > 2:
        direction, steps = str(rng.choice(list(DIRECTIONS))), int(rng.integers(2, min(life, 5)))
        walked = np.minimum(np.arange(life), steps)
        along_x, along_y = DIRECTIONS[direction]
        for cell in rng.permutation(GRID * GRID):
            rows, columns = cell // GRID + along_y * walked, cell % GRID + along_x * walked
            inside = min(rows[-1], columns[-1]) >= 0 and max(rows[-1], columns[-1]) < GRID
            if inside and not there[np.arange(life), rows, columns].any():
                return direction, steps, (rows, columns)
    free = np.flatnonzero(~there.any(axis=0))
    if not len(free):
        return None, 0, None
    row, column = divmod(int(rng.choice(free)), GRID)
    return None, 0, (np.full(life, row), np.full(life, column))


# --------------------------------------------------------------------------------------------------------------------
# Drawing
# --------------------------------------------------------------------------------------------------------------------


def render_crowd(world: Crowd) -> np.ndarray:
    """
    Draws a crowded world at [`FPS`] frames per second.

    Returns:
        `[T, FRAME_SIZE, FRAME_SIZE, 3]` uint8 RGB, T = seconds * FPS.
    """
    rng = np.random.default_rng([world.seed, world.seconds, 6])
    texture = _draw_texture(rng, world.shade)
    along_x, along_y = world.drift
    count = world.seconds * FPS
    frames = np.stack([np.roll(texture, (along_y * index, along_x * index), (0, 1)) for index in range(count)])
    for item in world.objects:
        paint, through = _draw_sprite(item.colour, item.shape, item.mark, item.side)
        for seen in sightings(item):
            left, top, right, bottom = seen.box
            under = frames[round(seen.start * FPS) : round(seen.end * FPS), top:bottom, left:right]
            under[:] = np.minimum(under * through + paint, 255)
    return frames


def _draw_texture(rng: np.random.Generator, shade: int) -> np.ndarray:
    """`[FRAME_SIZE, FRAME_SIZE, 3]` uint8: coloured clouds, rough and fine, that go on across the edges."""
    rows, columns = np.fft.fftfreq(FRAME_SIZE)[:, None], np.fft.rfftfreq(FRAME_SIZE)[None]
    falloff = 1 / np.maximum(np.hypot(rows, columns), 1 / FRAME_SIZE) ** 1.5
    phases = rng.normal(size=(2, 3, *falloff.shape))
    clouds = np.fft.irfft2(falloff * (phases[0] + 1j * phases[1]), s=(FRAME_SIZE, FRAME_SIZE))
    clouds -= clouds.mean(axis=(1, 2), keepdims=True)
    clouds *= 26 / clouds.std(axis=(1, 2), keepdims=True)
    tint = rng.uniform(-20, 20, 3)[:, None, None]
    return np.clip(clouds + shade + tint, 0, 255).astype(np.uint8).transpose(1, 2, 0)


@functools.cache  # 960 of 12 kB
def _draw_sprite(colour: str, shape: str, mark: str, side: int) -> tuple[np.ndarray, np.ndarray]:
    """What an object adds to each pixel `[side, side, 3]`, and how much of what is below stays `[side, side, 1]`."""
    fine = 4
    image = Image.new("RGBA", (side * fine, side * fine))
    canvas = ImageDraw.Draw(image)
    draw_shape(canvas, shape, (0, 0, side * fine - 1, side * fine - 1), CROWD_COLOURS[colour])
    ink = (15, 15, 15) if colour in ("yellow", "orange", "white") else (255, 255, 255)
    middle = side * fine / 2
    lower = 0.15 * side * fine if shape == "triangle" else 0.0
    _draw_mark(canvas, mark, middle, middle + lower, 0.2 * side * fine, ink)
    pixels = np.asarray(image.resize((side, side), Image.Resampling.BOX), dtype=np.float32)
    opaque = pixels[..., 3:] / 255
    return pixels[..., :3] * opaque, 1 - opaque


def _draw_mark(
    canvas: ImageDraw.ImageDraw, mark: str, x: float, y: float, half: float, ink: tuple[int, int, int]
) -> None:
    """Draws one of [`MARKS`] around (x, y), `half` its width."""
    if mark == "ball":
        canvas.ellipse([x - 0.75 * half, y - 0.75 * half, x + 0.75 * half, y + 0.75 * half], fill=ink)
    elif mark == "box":
        canvas.rectangle([x - half, y - half, x + half, y + half], outline=ink, width=round(0.4 * half))
    elif mark == "door":
        canvas.rectangle([x - 0.4 * half, y - half, x + 0.4 * half, y + half], fill=ink)
    elif mark == "book":
        canvas.rectangle([x - half, y - 0.4 * half, x + half, y + 0.4 * half], fill=ink)
    elif mark == "bird":
        wings = [(x - half, y - 0.8 * half), (x, y + 0.5 * half), (x + half, y - 0.8 * half)]
        canvas.line(wings, fill=ink, width=round(0.55 * half), joint="curve")
    else:
        raise ValueError(f"mark {mark!r}: expected one of {MARKS}.")


# --------------------------------------------------------------------------------------------------------------------
# What every token shows
# --------------------------------------------------------------------------------------------------------------------


def token_labels(world: Crowd, grid: tuple[int, int, int], seconds_per_grid: float = 1.0) -> np.ndarray:
    """
    What every visual token of a video shows, in words.

    Args:
        world: the video's.
        grid: (T, H, W) of its visual tokens.
        seconds_per_grid: seconds of video per step of the grid, so step t begins at second `t * seconds_per_grid`.

    Returns:
        `[T, H, W, 3]` int64, indices in [`LABEL_WORDS`] of a token's colour, shape and mark; three times that of
        "nothing" where there is none, [`UNNAMED`] where a coarse grid puts several objects in one token.
    """
    labels = np.full((grid[0] * grid[1] * grid[2], 3), LABEL_WORDS.index("nothing"), dtype=np.int64)
    shown = np.zeros(len(labels), dtype=np.int64)
    for item in world.objects:
        tokens = sighting_tokens(sightings(item), grid, seconds_per_grid)
        labels[tokens] = [LABEL_WORDS.index(word) for word in (item.colour, item.shape, item.mark)]
        shown[tokens] += 1
    labels[shown > 1] = UNNAMED
    return labels.reshape(*grid, 3)


def context_labels(world: Crowd, grid: tuple[int, int, int]) -> np.ndarray:
    """
    What every visual token shows beside those of the second before, in words.

    Args:
        world: the video's.
        grid: (T, H, W) of its visual tokens, a step each second.

    Returns:
        `[T, H, W, 2]` int64, of objects, indices in [`ALL_WORDS`]: "appear" where one has just come, and the direction
        in which it has moved since the second before, or "nothing". [`UNNAMED`] where there is no object or no second
        before; and in the second column where a moving object has not moved yet, or no more.
    """
    labels = np.full((grid[0] * grid[1] * grid[2], 2), UNNAMED, dtype=np.int64)
    for item in world.objects:
        tokens = sighting_tokens(sightings(item), grid)
        labels[tokens] = ALL_WORDS.index("nothing")
        if item.direction is not None:
            labels[tokens, 1] = UNNAMED
            last = item.appears_at + item.distance // CELL + 1
            moved = sighting_tokens(sightings(item, item.appears_at + 1, last), grid)
            labels[moved, 1] = ALL_WORDS.index(item.direction)
        came = sighting_tokens(sightings(item, item.appears_at, item.appears_at + 1), grid)
        labels[came] = [ALL_WORDS.index("appear"), UNNAMED]
    labels[: grid[1] * grid[2]] = UNNAMED
    return labels.reshape(*grid, 2)


def record_world(record: Mapping[str, object]) -> Crowd:
    """
    The world of a record that `python -m benchmarks tinyworld --crowd` wrote, made again from its seed.

    Raises:
        ValueError: a record of something else.
    """
    given = [record.get(name) for name in ("seed", "seconds", "max_objects")]
    if record.get("crowd") is not True or not all(isinstance(value, int) for value in given):
        raise ValueError(
            f"record {record.get('id')!r} is not of a crowded world; expected one that `python -m benchmarks tinyworld "
            "--crowd` wrote."
        )
    seed, seconds, max_objects = (int(str(value)) for value in given)
    return make_crowd(seed, seconds, max_objects)


__all__ = [
    "ALL_WORDS",
    "ASPECTS",
    "CONTEXT",
    "CROWD_COLOURS",
    "Crowd",
    "CrowdObject",
    "LABEL_WORDS",
    "MARKS",
    "context_labels",
    "make_crowd",
    "record_world",
    "render_crowd",
    "token_labels",
]
