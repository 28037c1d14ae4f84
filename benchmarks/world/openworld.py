"""A world without a grid: shapes at any pixel and of any size, that come, move, change colour, hide each other and go.

A shape covers from half a visual token to nine, and is there from half a second to the whole video. Frames are wide,
square or tall, some with black bars; light, contrast and grain differ from video to video. Masks have hard edges, so
which tokens show a shape is known to the pixel.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

from .clip import COLOURS
from .scene import DIRECTIONS, SHAPES, Rendered, draw_shape

OPEN_COLOURS = {**COLOURS, "black": (15, 15, 15)}
OPEN_SHAPES = SHAPES
OPEN_MARKS = ("ball", "door", "book", "bird")
STAYS = ("short", "half", "throughout")

# (width, height) in pixels, of whole tokens; 36 of them at most.
SQUARE = (168, 168)
OPEN_SIZES = (SQUARE, (252, 112), (112, 252), (196, 140), (140, 196), (140, 140))
OPEN_SECONDS = range(1, 129)
SIDES = (20, 84)  # pixels: half a token, nine tokens
MARKED_SIDES = (20, 34)
SEGMENT = 3  # frames that a colour lasts at least, so that one token shows it alone


@dataclass(frozen=True)
class Thing:
    """
    One shape.

    Attributes:
        colours: one, or three that it takes in order.
        shape, mark: names in [`OPEN_SHAPES`] and [`OPEN_MARKS`]; most have no mark.
        side: of its bounding box, in pixels.
        start, stop: frames; it is visible from the one until just before the other.
        changes: the frames at which it takes its second and its third colour.
        corner: (left, top) in pixels when it appears.
        speed: (along x, along y) in pixels a frame.
    """

    colours: tuple[str, ...]
    shape: str
    side: int
    start: int
    stop: int
    changes: tuple[int, ...] = ()
    mark: str | None = None
    corner: tuple[float, float] = (0.0, 0.0)
    speed: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        return f"{self.colours[0]} {self.shape}"

    @property
    def direction(self) -> str | None:
        """Where it moves, a name in [`DIRECTIONS`]."""
        signs = tuple(int(np.sign(speed)) for speed in self.speed)
        return next((name for name, along in DIRECTIONS.items() if along == signs), None)

    def colour_at(self, frame: int) -> str:
        return self.colours[sum(change <= frame for change in self.changes)]

    def boxes(self, frames: int) -> np.ndarray:
        """`[frames, 4]` int, (left, top, right, bottom), the last two exclusive; where it would be if not visible."""
        moved = np.arange(frames)[:, None] - self.start
        corner = np.rint(np.array(self.corner) + moved * np.array(self.speed)).astype(int)
        return np.concatenate([corner, corner + self.side], axis=1)

    def is_visible(self, frames: int) -> np.ndarray:
        """`[frames]` bool."""
        return (np.arange(frames) >= self.start) & (np.arange(frames) < self.stop)


@dataclass(frozen=True)
class OpenWorld(Rendered):
    """
    A video that can be rendered and asked about.

    Attributes:
        bars: (along x, along y), pixels of black at either side; nothing is drawn there.
        things: a later one hides an earlier one.
        shade, clouds: mean of the background's texture and its deviation, of 255.
        drift: pixels that the texture moves in a frame, along x and along y.
        light, contrast: factors of a pixel, and of what it differs from grey by.
        grain: largest deviation of a pixel, of 255.
    """

    bars: tuple[int, int]
    things: tuple[Thing, ...]
    shade: int
    clouds: float
    drift: tuple[int, int]
    light: float
    contrast: float
    grain: int

    def stay(self, thing: Thing) -> str | None:
        """How long a thing stays, one of [`STAYS`]; `None` for what lies between them."""
        share = (thing.stop - thing.start) / self.frames
        if share == 1:
            return "throughout"
        if 0.4 <= share <= 0.6:
            return "half"
        return "short" if share <= 0.2 else None


# --------------------------------------------------------------------------------------------------------------------
# Making
# --------------------------------------------------------------------------------------------------------------------


def make_open(
    seed: int,
    seconds: int = 8,
    few: bool = False,
    size: tuple[int, int] | None = None,
    bars: tuple[int, int] | None = None,
) -> OpenWorld:
    """
    Makes a world; the same arguments give the same one.

    Args:
        seed: any whole number from 0.
        seconds: length, in [`OPEN_SECONDS`].
        few: a third of the things, for what learning starts with.
        size: of the frames, one of [`OPEN_SIZES`], or else drawn.
        bars: see [`OpenWorld`], or else drawn.

    Raises:
        ValueError: `seconds` or `size` out of range.
    """
    if seconds not in OPEN_SECONDS:
        raise ValueError(f"seconds={seconds!r}: expected a whole number from {OPEN_SECONDS[0]} to {OPEN_SECONDS[-1]}.")
    if size is not None and size not in OPEN_SIZES:
        raise ValueError(f"size={size!r}: expected one of {OPEN_SIZES}.")
    rng = np.random.default_rng([seed, seconds, 11])
    drawn = OPEN_SIZES[rng.choice(len(OPEN_SIZES), p=(0.4, 0.12, 0.12, 0.12, 0.12, 0.12))]
    wide, tall = (int(width) for width in rng.integers(6, 30, 2))
    barred = rng.random()  # by chance
    world = OpenWorld(
        seed=seed,
        seconds=seconds,
        size=size or drawn,
        bars=bars or ((wide, 0) if barred < 0.1 else (0, tall) if barred < 0.2 else (0, 0)),
        things=(),
        shade=int(rng.integers(80, 190)),
        clouds=float(rng.uniform(4, 26)),
        drift=(int(rng.integers(-5, 6)), int(rng.integers(-5, 6))),
        light=float(rng.uniform(0.55, 1.15)),
        contrast=float(rng.uniform(0.75, 1.1)),
        grain=int(rng.integers(0, 13)),
    )
    return replace(world, things=_fill(rng, world, few))


def _fill(rng: np.random.Generator, world: OpenWorld, few: bool) -> tuple[Thing, ...]:
    """Places the planned things one by one; what finds no room in some tries is left out."""
    things: list[Thing] = []
    placed: list[np.ndarray] = []
    names = _Names(rng)
    for plan in _plans(rng, world, few):
        side = _draw_side(rng, plan)
        for attempt in range(8):
            thing = _place(rng, world, replace(plan, side=max(SIDES[0], round(side * 0.88**attempt))))
            if thing is None:
                continue
            boxes = thing.boxes(world.frames)
            if not any(_clash(thing, boxes, other, theirs) for other, theirs in zip(things, placed, strict=True)):
                things.append(names.give(thing))
                placed.append(boxes)
                break
    return tuple(sorted(things, key=lambda thing: (thing.mark is not None, -thing.side)))


class _Names:
    """Colours and shapes so that no two things of a video share both; those that change have their shape alone."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        shapes = [str(shape) for shape in rng.permutation(OPEN_SHAPES)]
        self.changing, common = shapes[:2], shapes[2:]
        pairs = [(colour, shape) for colour in OPEN_COLOURS for shape in common]
        self.pairs = [pairs[index] for index in rng.permutation(len(pairs))]

    def give(self, thing: Thing) -> Thing:
        if thing.changes:
            colours = tuple(str(colour) for colour in self.rng.permutation(list(OPEN_COLOURS))[:3])
            return replace(thing, colours=colours, shape=self.changing.pop())
        colour, shape = self.pairs.pop()
        return replace(thing, colours=(colour,), shape=shape)


def _plans(rng: np.random.Generator, world: OpenWorld, few: bool) -> list[Thing]:
    """When things come and go, and which of them change, cross the middle or have a mark."""
    frames, plans = world.frames, []

    def plan(life: int, **more: object) -> None:
        start = int(rng.integers(0, frames - life + 1))
        plans.append(Thing((), "", 0, start, start + life, **more))  # type: ignore[arg-type]

    if world.seconds < 3:  # a still: nearly all of it is there
        for number in range(3 if few else 9):
            mark = _draw(rng, OPEN_MARKS) if number % 2 else None
            plan(int(rng.integers(1, frames + 1)) if rng.random() < 0.3 else frames, mark=mark)
        return plans
    times = 1 if few else 2
    for _ in range(times):
        life = int(rng.integers(min(3 * SEGMENT, frames), frames + 1))
        if life >= 3 * SEGMENT:
            start = int(rng.integers(0, frames - life + 1))
            spare = np.sort(rng.integers(0, life - 3 * SEGMENT + 1, 2))
            changes = tuple(int(start + SEGMENT * (place + 1) + spare[place]) for place in range(2))
            plans.append(Thing((), "", 0, start, start + life, changes))
    # Every other video has one more of these, so that their order can be asked.
    crossings = rng.permutation(3)[: times + (world.seed + 1) % 2] if frames >= 10 else ()
    for third in crossings:  # at times of their own
        middle = int((third + rng.uniform(0.35, 0.65)) * frames / 3)
        reach = int(rng.integers(2, 4))
        start = max(0, middle - reach)
        plans.append(Thing((), "", 0, start, min(frames, middle + reach + 1), speed=(float(middle - start) + 1, 0.0)))
    for _ in range(times):
        plan(frames)
        plan(int(rng.integers(np.ceil(0.4 * frames), int(0.6 * frames) + 1)))
        plan(int(rng.integers(1, max(1, int(0.2 * frames)) + 1)))
    for _ in range(2 * times):
        plan(int(rng.integers(1, min(frames, 5) + 1)), mark=_draw(rng, OPEN_MARKS))
    return plans


def _draw(rng: np.random.Generator, names: Sequence[str]) -> str:
    return str(names[int(rng.integers(len(names)))])


def _draw_side(rng: np.random.Generator, plan: Thing) -> int:
    """Small ones are as likely as large ones are, by the logarithm."""
    low, high = MARKED_SIDES if plan.mark else (22, 44) if plan.speed[0] else SIDES
    return int(round(float(np.exp(rng.uniform(np.log(low), np.log(high))))))


def _place(rng: np.random.Generator, world: OpenWorld, plan: Thing) -> Thing | None:
    """A place for all of its life inside of the frame, if there is room for such a thing."""
    low = np.array(world.bars)
    room = np.array(world.size) - 2 * low - plan.side
    life = plan.stop - plan.start - 1
    if (room < 1).any():
        return None
    if plan.speed[0]:  # how many frames until it stands in the middle
        speed = float(rng.uniform(6, min(16, room[0] / 2 / max(plan.speed[0], life + 1 - plan.speed[0]) + 6)))
        speed *= float(rng.choice((-1, 1)))
        left = world.size[0] / 2 - plan.side / 2 - (plan.speed[0] - rng.uniform(0.2, 0.8)) * speed
        corner, moves = (left, float(low[1] + rng.uniform(0, room[1]))), (speed, 0.0)
    else:
        corner, moves = tuple(low + rng.uniform(0, 1, 2) * room), (0.0, 0.0)
        if rng.random() < 0.3 and life:
            along = int(rng.integers(2))
            speed = float(rng.uniform(1, 10) * rng.choice((-1, 1)))
            moves = (speed, 0.0) if along == 0 else (0.0, speed)
    thing = replace(plan, corner=(float(corner[0]), float(corner[1])), speed=moves)
    first, last = thing.boxes(plan.stop)[[plan.start, plan.stop - 1]]
    ends = np.array(world.size) - low
    if min((first[:2] - low).min(), (last[:2] - low).min(), (ends - first[2:]).min(), (ends - last[2:]).min()) < 0:
        return None
    if not plan.speed[0] and moves[0] and crossing_frame(thing, world) is not None:
        return None
    return thing


def crossing_frame(thing: Thing, world: OpenWorld) -> int | None:
    """The first frame in which the middle of a thing has come to the other side of the frame's; `None` if never."""
    if not thing.speed[0]:
        return None
    boxes = thing.boxes(world.frames)[thing.start : thing.stop]
    beyond = boxes[:, 0] + boxes[:, 2] > world.size[0]
    turns = np.flatnonzero(beyond[1:] != beyond[:-1])
    return int(thing.start + turns[0] + 1) if len(turns) else None


def _clash(one: Thing, ours: np.ndarray, other: Thing, theirs: np.ndarray) -> bool:
    """Whether one hides too much of the other: a fifth of the smaller box, or any of one with a mark."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    if start >= stop:
        return False
    ours, theirs = ours[start:stop], theirs[start:stop]
    overlap = np.minimum(ours[:, 2:], theirs[:, 2:]) - np.maximum(ours[:, :2], theirs[:, :2])
    shared = np.clip(overlap, 0, None).prod(1).max() / min(one.side, other.side) ** 2
    return bool(shared > (0 if one.mark or other.mark else 0.2))


# --------------------------------------------------------------------------------------------------------------------
# Drawing
# --------------------------------------------------------------------------------------------------------------------


def render_open(world: OpenWorld, without: Thing | None = None) -> np.ndarray:
    """
    Draws a world at [`FPS`] frames per second.

    Args:
        without: a thing to leave out; what lies below it is seen.

    Returns:
        `[T, height, width, 3]` uint8 RGB, T = seconds * FPS.
    """
    rng = np.random.default_rng([world.seed, world.seconds, 12])
    texture = _draw_texture(rng, world)
    frames = np.empty((world.frames, *texture.shape), dtype=np.float32)
    shown = draw_owners(world, without)
    for index, frame in enumerate(frames):
        frame[:] = np.roll(texture, (world.drift[1] * index, world.drift[0] * index), (0, 1))
        paint = np.array([_paint(thing, index) for thing in world.things]).reshape(-1, 3)
        drawn = shown[index] >= 0
        frame[drawn] = paint[shown[index][drawn]]
    frames = ((frames - 128) * world.contrast + 128) * world.light
    across, down = world.bars
    frames[:, :, :across] = frames[:, :, world.size[0] - across :] = 0
    frames[:, :down] = frames[:, world.size[1] - down :] = 0
    grain = rng.integers(-world.grain, world.grain + 1, (8, *texture.shape[:2], 1), dtype=np.int16)
    return np.clip(frames + np.resize(grain, (len(frames), *grain.shape[1:])), 0, 255).astype(np.uint8)


def draw_owners(world: OpenWorld, without: Thing | None = None) -> np.ndarray:
    """
    Which thing every pixel shows.

    Returns:
        `[T, height, width]` int16: 2 i for the body of thing i, 2 i + 1 for its mark, -1 for the background.
    """
    width, height = world.size
    shown = np.full((world.frames, height, width), -1, dtype=np.int16)
    for number, thing in enumerate(world.things):
        if thing is without:
            continue
        boxes = thing.boxes(world.frames)
        for frame in range(thing.start, thing.stop):
            left, top, right, bottom = boxes[frame]
            under = shown[frame, top:bottom, left:right]
            under[shape_mask(thing.shape, thing.side)] = 2 * number
            if thing.mark is not None:
                under[mark_mask(thing.mark, thing.shape, thing.side)] = 2 * number + 1
    return shown


def _paint(thing: Thing, frame: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The colours of its body and of its mark."""
    colour = thing.colour_at(frame)
    return OPEN_COLOURS[colour], (15, 15, 15) if colour in ("yellow", "orange") else (250, 250, 250)


@functools.cache
def shape_mask(shape: str, side: int) -> np.ndarray:
    """`[side, side]` bool."""
    image = Image.new("RGB", (4 * side, 4 * side))
    box = (0, 0, 4 * side - 1, 4 * side - 1)
    if shape == "ring":
        ImageDraw.Draw(image).ellipse(box, outline=(255, 255, 255), width=side)
    else:
        draw_shape(ImageDraw.Draw(image), shape, box, (255, 255, 255))
    return _halve(image, side)


@functools.cache
def mark_mask(mark: str, shape: str, side: int) -> np.ndarray:
    """`[side, side]` bool; a bit below the middle of a triangle."""
    image = Image.new("RGB", (4 * side, 4 * side))
    canvas, x, half = ImageDraw.Draw(image), 2.0 * side, 1.1 * side
    y = x + (0.55 * side if shape == "triangle" else 0)
    if mark == "ball":
        canvas.ellipse([x - 0.7 * half, y - 0.7 * half, x + 0.7 * half, y + 0.7 * half], fill="white")
    elif mark == "door":
        canvas.rectangle([x - 0.3 * half, y - half, x + 0.3 * half, y + half], fill="white")
    elif mark == "book":
        canvas.rectangle([x - half, y - 0.3 * half, x + half, y + 0.3 * half], fill="white")
    elif mark == "bird":
        wings = [(x - half, y - 0.8 * half), (x, y + 0.6 * half), (x + half, y - 0.8 * half)]
        canvas.line(wings, fill="white", width=round(0.5 * half), joint="curve")
    else:
        raise ValueError(f"mark {mark!r}: expected one of {OPEN_MARKS}.")
    return _halve(image, side)


def _halve(image: Image.Image, side: int) -> np.ndarray:
    return np.asarray(image.convert("L").resize((side, side), Image.Resampling.BOX)) >= 128


def _draw_texture(rng: np.random.Generator, world: OpenWorld) -> np.ndarray:
    """`[height, width, 3]` float: coloured clouds, rough and fine, that go on across the edges."""
    width, height = world.size
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    falloff = 1 / np.maximum(np.hypot(rows, columns), 1 / max(world.size)) ** 1.5
    phases = rng.normal(size=(2, 3, *falloff.shape))
    clouds = np.fft.irfft2(falloff * (phases[0] + 1j * phases[1]), s=(height, width))
    clouds -= clouds.mean(axis=(1, 2), keepdims=True)
    clouds *= world.clouds / clouds.std(axis=(1, 2), keepdims=True)
    tint = rng.uniform(-20, 20, 3)[:, None, None]
    return np.clip(clouds + world.shade + tint, 0, 255).transpose(1, 2, 0)
