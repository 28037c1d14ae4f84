"""TinyWorld's scenes: a few coloured shapes that come, move, change colour and go, drawn on a noisy background.

Everything happens on whole seconds, and objects keep to the cells of the grid of visual tokens: one that stands still
fills about one token, one that moves at most two, and no two objects ever share a token. So what a question asks for is
held by few of a video's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from qtsplus.evaluation.labelled import Sighting

from .clip import COLOURS

OBJECT_SHAPES = ("circle", "square", "triangle", "cross", "ring", "star")
# Cells moved per second, along x and along y.
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

FPS = 2
CELL = 28  # pixels of a visual token's side: 2 x 2 patches of 14
GRID = 6  # cells per side
FRAME_SIZE = CELL * GRID

SECONDS = range(2, 129)  # of a world, which is drawn in memory
MAX_OBJECTS = range(1, len(COLOURS) * len(OBJECT_SHAPES) + 1)  # no two share a colour and a shape


@dataclass(frozen=True)
class WorldObject:
    """
    One shape of a world.

    Attributes:
        colour, shape: its name in [`COLOURS`] and in [`OBJECT_SHAPES`].
        appears_at, vanishes_at: whole seconds; visible from the one until just before the other.
        start: (x, y) in pixels of its centre when it appears.
        side: of its bounding box, in pixels.
        direction: a name in [`DIRECTIONS`], or `None` where it stands still.
        distance: pixels that it moves in all.
        later_colour, changes_at: its colour from that whole second on; `None` where it never changes.
    """

    colour: str
    shape: str
    appears_at: int
    vanishes_at: int
    start: tuple[float, float]
    side: int
    direction: str | None = None
    distance: int = 0
    later_colour: str | None = None
    changes_at: int | None = None

    @property
    def name(self) -> str:
        """Its colour, at first, and shape: "red circle"."""
        return f"{self.colour} {self.shape}"

    @property
    def colours(self) -> tuple[str, ...]:
        """The colours that it ever has, in order."""
        return (self.colour,) if self.later_colour is None else (self.colour, self.later_colour)

    def is_visible(self, time: float) -> bool:
        return self.appears_at <= time < self.vanishes_at

    def colour_at(self, time: float) -> str:
        if self.later_colour is None or self.changes_at is None or time < self.changes_at:
            return self.colour
        return self.later_colour

    def moved_at(self, time: float) -> float:
        """Pixels that it has moved by a time in seconds."""
        duration = self.vanishes_at - self.appears_at - 1 / FPS
        return self.distance * (time - self.appears_at) / duration

    def box_at(self, time: float) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) in pixels at a time in seconds, the last two exclusive."""
        moved = self.moved_at(time)
        along_x, along_y = DIRECTIONS[self.direction] if self.direction else (0, 0)
        left = round(self.start[0] + along_x * moved - self.side / 2)
        top = round(self.start[1] + along_y * moved - self.side / 2)
        return left, top, left + self.side, top + self.side


@dataclass(frozen=True)
class Speck:
    """A small grey disc that no question asks for: `radius` pixels around (x, y), from one second to another."""

    start: int
    stop: int
    x: int
    y: int
    radius: int
    shade: int


@dataclass(frozen=True)
class World:
    """
    A video that can be rendered and asked about.

    Attributes:
        seed, seconds: what it was made from; its length is a whole number of seconds.
        objects: in the order in which they appear.
        specks: distractors, drawn below the objects.
        shade: of the background, 0 to 255.
        noise: largest deviation of a pixel, of 255.
    """

    seed: int
    seconds: int
    objects: tuple[WorldObject, ...]
    specks: tuple[Speck, ...]
    shade: int
    noise: int

    def visible(self, time: float) -> list[WorldObject]:
        return [item for item in self.objects if item.is_visible(time)]


def sightings(item: WorldObject, start: float | None = None, end: float | None = None) -> tuple[Sighting, ...]:
    """Where an object is in its life, or in the part of it between two times in seconds; one for each place."""
    first = item.appears_at if start is None else max(start, item.appears_at)
    last = item.vanishes_at if end is None else min(end, item.vanishes_at)
    seen: list[Sighting] = []
    for frame in range(round(first * FPS), round(last * FPS)):
        begin, box = frame / FPS, item.box_at(frame / FPS)
        if seen and seen[-1].box == box:
            begin = seen.pop().start
        seen.append(Sighting(begin, (frame + 1) / FPS, box, frame=(FRAME_SIZE, FRAME_SIZE)))
    return tuple(seen)


# --------------------------------------------------------------------------------------------------------------------
# Making
# --------------------------------------------------------------------------------------------------------------------


def make_world(seed: int, seconds: int = 8, max_objects: int = 12) -> World:
    """
    Makes a world; the same arguments give the same one.

    About one object comes for every three seconds, and at most `max_objects`; in longer videos they stay longer. No
    two objects ever have the same colour and shape, so a name always means one of them.

    Args:
        seed: any whole number from 0.
        seconds: length, in [`SECONDS`].
        max_objects: in [`MAX_OBJECTS`].

    Raises:
        ValueError: `seconds` or `max_objects` out of range or not whole.
    """
    if seconds not in SECONDS:
        raise ValueError(f"seconds={seconds!r}: expected a whole number of seconds from {SECONDS[0]} to {SECONDS[-1]}.")
    if max_objects not in MAX_OBJECTS:
        raise ValueError(
            f"max_objects={max_objects!r}: expected a whole number from {MAX_OBJECTS[0]} to {MAX_OBJECTS[-1]}."
        )
    rng = np.random.default_rng([seed, seconds])
    wanted = min(max_objects, 1 + seconds // 3 + int(rng.integers(0, 2)))
    objects: list[WorldObject] = []
    for _ in range(wanted * 20):
        candidate = _make_object(rng, seconds, wanted)
        if not any(_clash(candidate, other) for other in objects):
            objects.append(candidate)
        if len(objects) == wanted:
            break
    objects.sort(key=lambda item: (item.appears_at, item.colour, item.shape))
    return World(
        seed=seed,
        seconds=seconds,
        objects=tuple(objects),
        specks=tuple(_make_speck(rng, seconds) for _ in range(seconds)),
        shade=int(rng.integers(190, 230)),
        noise=int(rng.integers(2, 10)),
    )


def _make_object(rng: np.random.Generator, seconds: int, count: int) -> WorldObject:
    shortest = min(3, seconds)
    longest = min(seconds, max(5, 3 * seconds // (2 * count)))
    life = int(rng.integers(shortest, longest + 1))
    appears_at = int(rng.integers(0, seconds - life + 1))
    colour, later_colour = (str(name) for name in rng.permutation(list(COLOURS))[:2])
    shape, side = str(rng.choice(OBJECT_SHAPES)), int(rng.integers(21, 26))

    fate = rng.choice(["move", "change", "stay"], p=[0.45, 0.25, 0.3])
    direction, steps = None, 0
    low, high = [0, 0], [GRID, GRID]
    if fate == "move":
        direction, steps = str(rng.choice(list(DIRECTIONS))), int(rng.integers(2, 4))
        low = [steps if along < 0 else 0 for along in DIRECTIONS[direction]]
        high = [GRID - steps if along > 0 else GRID for along in DIRECTIONS[direction]]
    x, y = (float(index * CELL + CELL / 2) for index in rng.integers(low, high))
    return WorldObject(
        colour,
        shape,
        appears_at,
        vanishes_at=appears_at + life,
        start=(x, y),
        side=side,
        direction=direction,
        distance=steps * CELL,
        later_colour=later_colour if fate == "change" else None,
        changes_at=appears_at + int(rng.integers(1, life)) if fate == "change" else None,
    )


def _make_speck(rng: np.random.Generator, seconds: int) -> Speck:
    start = int(rng.integers(0, seconds))
    stop = start + int(rng.integers(1, 4))
    x, y = (int(value) for value in rng.integers(4, FRAME_SIZE - 4, 2))
    return Speck(start, stop, x, y, radius=int(rng.integers(2, 5)), shade=int(rng.integers(60, 150)))


def _clash(one: WorldObject, other: WorldObject) -> bool:
    """Whether two objects share a name, or a token at the same second."""
    if one.shape == other.shape and set(one.colours) & set(other.colours):
        return True
    seconds = range(max(one.appears_at, other.appears_at), min(one.vanishes_at, other.vanishes_at))
    if any(_cells(one, second) & _cells(other, second) for second in seconds):
        return True
    # One that comes where another goes would look like the same one in a new colour.
    return any(
        before.vanishes_at == after.appears_at
        and _cells(before, before.vanishes_at - 1) & _cells(after, after.appears_at)
        for before, after in ((one, other), (other, one))
    )


def _cells(item: WorldObject, second: int) -> set[tuple[int, int]]:
    """The cells that an object touches during a second."""
    cells = set()
    for time in (second, second + 1 / FPS):
        left, top, right, bottom = item.box_at(time)
        columns, rows = range(left // CELL, (right - 1) // CELL + 1), range(top // CELL, (bottom - 1) // CELL + 1)
        cells |= {(row, column) for row in rows for column in columns}
    return cells


# --------------------------------------------------------------------------------------------------------------------
# Drawing
# --------------------------------------------------------------------------------------------------------------------


def render(world: World) -> np.ndarray:
    """
    Draws a world at [`FPS`] frames per second.

    Returns:
        `[T, FRAME_SIZE, FRAME_SIZE, 3]` uint8 RGB, T = seconds * FPS.
    """
    rng = np.random.default_rng([world.seed, world.seconds, 1])
    frames = np.stack([_draw_frame(world, index / FPS) for index in range(world.seconds * FPS)])
    noise = rng.integers(-world.noise, world.noise + 1, frames.shape, dtype=np.int16)
    return np.clip(frames + noise, 0, 255).astype(np.uint8)


def _draw_frame(world: World, time: float) -> np.ndarray:
    image = Image.new("RGB", (FRAME_SIZE, FRAME_SIZE), (world.shade,) * 3)
    canvas = ImageDraw.Draw(image)
    for speck in world.specks:
        if speck.start <= time < speck.stop:
            x, y, radius = speck.x, speck.y, speck.radius
            canvas.ellipse([x - radius, y - radius, x + radius, y + radius], fill=(speck.shade,) * 3)
    for item in world.visible(time):
        left, top, right, bottom = item.box_at(time)
        draw_shape(canvas, item.shape, (left, top, right - 1, bottom - 1), COLOURS[item.colour_at(time)])
    return np.asarray(image)


def draw_shape(canvas: ImageDraw.ImageDraw, shape: str, box: Sequence[float], colour: tuple[int, int, int]) -> None:
    """Draws one of [`OBJECT_SHAPES`] into a box (left, top, right, bottom), all inclusive."""
    left, top, right, bottom = box
    width, middle_x, middle_y = right - left, (left + right) / 2, (top + bottom) / 2
    if shape == "circle":
        canvas.ellipse(box, fill=colour)
    elif shape == "square":
        canvas.rectangle(box, fill=colour)
    elif shape == "triangle":
        canvas.polygon([(left, bottom), (middle_x, top), (right, bottom)], fill=colour)
    elif shape == "ring":
        canvas.ellipse(box, outline=colour, width=max(2, round(width / 5)))
    elif shape == "cross":
        arm = width / 6
        canvas.rectangle([middle_x - arm, top, middle_x + arm, bottom], fill=colour)
        canvas.rectangle([left, middle_y - arm, right, middle_y + arm], fill=colour)
    elif shape == "star":
        angles = np.arange(10) * np.pi / 5 - np.pi / 2
        reach = np.where(np.arange(10) % 2 == 0, width / 2, width / 5)
        points = np.stack([middle_x + reach * np.cos(angles), middle_y + reach * np.sin(angles)], axis=1)
        canvas.polygon([tuple(point) for point in points], fill=colour)
    else:
        raise ValueError(f"shape {shape!r}: expected one of {OBJECT_SHAPES}.")
