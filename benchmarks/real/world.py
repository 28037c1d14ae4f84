"""Scenes: drawings of real things that come, move, hide each other and go over filmed footage."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ..world.scene import CELL, FPS, Rendered
from .fetch import FILM_FPS, SPLITS

SIZES = ((168, 168), (224, 112), (112, 224), (196, 140), (140, 196), (140, 140), (224, 168))  # pixels: (width, height)
SIDES = (44, 110)  # pixels of a drawing
# A crowd, to choose among: so many things of such sides in frames of such a size, each for up to so many seconds.
CROWD, CROWD_SIDES, CROWD_SIZE, CROWD_LIFE = (5, 7), (56, 100), (224, 168), 3
SHOWN, HIDDEN = 0.15, 0.03  # of a token's pixels: from so many it shows a thing, up to so many it shows none
NOTHING, UNCLEAR = -1, -2


class Pictures:
    """The fetched drawings and films: `rgba` `[N, 128, 128, 4]`, `names` and `sets` of each, `films` by name."""

    def __init__(self, work: Path):
        stored = np.load(work / "drawings.npz")
        self.rgba, self.names, self.sets = stored["rgba"], stored["names"].tolist(), stored["sets"].tolist()
        films = [film for split in SPLITS.values() for film in split]
        self.films = {film: np.load(work / f"{film}.npy", mmap_mode="r") for film in films}

    def of(self, *sets: str) -> list[int]:
        """The drawings of some sets: `trained`, `drawing` (other drawings of trained names), `thing` (other things)."""
        return [index for index, own in enumerate(self.sets) if own in sets]


@dataclass(frozen=True)
class Thing:
    """
    One drawing in a scene.

    Attributes:
        drawing: its place among the [`Pictures`].
        name: what it is called.
        side: of its square, in pixels.
        start, stop: frames; it is there from the one until just before the other.
        corner, speed: (left, top) in pixels when it appears, and (along x, along y) in pixels a frame.
        turn, mirrored: degrees, and whether left is right.
    """

    drawing: int
    name: str
    side: int
    start: int
    stop: int
    corner: tuple[float, float]
    speed: tuple[float, float]
    turn: float
    mirrored: bool

    def corner_at(self, frame: int) -> tuple[int, int]:
        left, top = (c + s * (frame - self.start) for c, s in zip(self.corner, self.speed, strict=True))
        return round(left), round(top)


@dataclass(frozen=True)
class Scene(Rendered):
    """
    What is rendered and asked about.

    Attributes:
        film, since, crop: background, its first frame, and (left, top, scale) of what is seen of it.
        things: a later one hides an earlier one.
        disguised: whether the background is turned, has other colours and shows through another film.
        light, contrast: factors; grain: deviation of a pixel, of 255; quality: of JPEG, or 100 for none.
    """

    film: str
    since: int
    crop: tuple[int, int, float]
    things: tuple[Thing, ...]
    light: float
    contrast: float
    grain: float
    quality: int
    disguised: bool = False


def make_scene(
    pictures: Pictures,
    seed: int,
    seconds: int = 1,
    split: str = "train",
    drawings: Sequence[int] | None = None,
    most: int = 5,
    size: tuple[int, int] | None = None,
    crowd: bool = False,
) -> Scene:
    """
    Draws a scene; the same arguments give the same one.

    Args:
        seconds: its length.
        split: whose films.
        drawings: what may be shown; else what is trained. No two things of a scene have one name.
        most: things at a time, at most.
        size: of the frames, one of [`SIZES`], or else drawn.
        crowd: more things, each for a moment, as selectors are taught and tested with.
    """
    rng = np.random.default_rng([seed, seconds, sorted(SPLITS).index(split), most])
    width, height = size or SIZES[rng.integers(len(SIZES))]
    film = str(rng.choice(SPLITS[split], p=(0.6, 0.15, 0.25) if len(SPLITS[split]) == 3 else None))
    length, tall, wide = pictures.films[film].shape[:3]
    scale = float(rng.uniform(max(width / wide, height / tall), 1.0))
    left = int(rng.integers(0, int(wide - width / scale) + 1))
    top = int(rng.integers(0, int(tall - height / scale) + 1))
    return Scene(
        seed=seed,
        seconds=seconds,
        size=(width, height),
        film=film,
        since=int(rng.integers(length)),
        crop=(left, top, scale),
        things=_draw_things(
            rng, pictures, drawings or pictures.of("trained"), (width, height), seconds * FPS, most, crowd
        ),
        light=float(rng.uniform(0.65, 1.15)),
        contrast=float(rng.uniform(0.7, 1.15)),
        grain=float(rng.uniform(0, 8)),
        quality=int(rng.integers(35, 96)) if rng.random() < 0.6 else 100,
        disguised=split == "varied" and bool(rng.random() < 0.5),
    )


def _draw_things(
    rng: np.random.Generator,
    pictures: Pictures,
    drawings: Sequence[int],
    size: tuple[int, int],
    frames: int,
    most: int,
    crowd: bool,
) -> tuple[Thing, ...]:
    seconds = frames // FPS
    sides = CROWD_SIDES if crowd else SIDES
    if crowd:
        count = int(rng.integers(CROWD[0], CROWD[1] + 1))
    else:
        count = int(rng.integers(1, most + 1)) if seconds == 1 else int(rng.integers(2, most + 1 + seconds // 2))
    things: list[Thing] = []
    for drawing in rng.permutation(drawings)[: 3 * count]:
        if len(things) == count:
            break
        name = pictures.names[drawing]
        if any(name == thing.name for thing in things):
            continue
        side = int(np.exp(rng.uniform(np.log(sides[0]), np.log(min(sides[1], *size)))))
        stays = not crowd and (seconds == 1 or rng.random() < 0.3)
        longest = CROWD_LIFE if crowd else max(1, seconds // 2)
        life = frames if stays else FPS * int(rng.integers(1, longest + 1))
        start = 0 if stays else FPS * int(rng.integers(0, (frames - life) // FPS + 1))
        room = np.array(size) - side
        corner, end = rng.uniform(0, 1, 2) * room, rng.uniform(0, 1, 2) * room
        farthest = 14.0 * max(1, life - 1)
        way = np.clip(end - corner, -farthest, farthest) / max(1, life - 1)
        speed = way if rng.random() < 0.4 else np.zeros(2)
        thing = Thing(
            drawing=int(drawing),
            name=name,
            side=side,
            start=start,
            stop=start + life,
            corner=(float(corner[0]), float(corner[1])),
            speed=(float(speed[0]), float(speed[1])),
            turn=float(rng.uniform(-20, 20)) if rng.random() < 0.5 else 0.0,
            mirrored=bool(rng.random() < 0.5),
        )
        if all(_shares(thing, other) < 0.3 for other in things):
            things.append(thing)
    return tuple(things)


def _shares(one: Thing, other: Thing) -> float:
    """How much of the smaller square the other one hides at most."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    worst = 0.0
    for frame in {start, (start + stop) // 2, stop - 1} if start < stop else ():
        overlap = [
            min(a + one.side, b + other.side) - max(a, b)
            for a, b in zip(one.corner_at(frame), other.corner_at(frame), strict=True)
        ]
        worst = max(worst, max(0, overlap[0]) * max(0, overlap[1]) / min(one.side, other.side) ** 2)
    return worst


def render(scene: Scene, pictures: Pictures, without: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """
    Draws a scene at [`FPS`] frames per second.

    Args:
        without: the name of a thing to leave out.

    Returns:
        frames `[T, height, width, 3]` uint8 RGB, and owners `[T, height, width]` int16, the place among `scene.things`
        of what a pixel shows, or -1.
    """
    rng = np.random.default_rng([scene.seed, 7])
    film, (width, height) = pictures.films[scene.film], scene.size
    left, top, scale = scene.crop
    box = (left, top, left + width / scale, top + height / scale)
    frames = np.empty((scene.frames, height, width, 3), np.uint8)
    owners = np.full((scene.frames, height, width), -1, np.int16)
    sprites = [_sprite(thing, pictures.rgba[thing.drawing]) for thing in scene.things]
    light = np.clip((np.arange(256) - 128) * scene.contrast + 128, 0, 255) * scene.light
    for index in range(scene.frames):
        place = (scene.since + index * FILM_FPS // FPS) % (2 * len(film) - 1)
        behind = film[min(place, 2 * len(film) - 2 - place)]  # forth and back
        if scene.disguised:
            behind = _disguise(behind, pictures, np.random.default_rng([scene.seed, 9]))
        canvas = Image.fromarray(behind).resize((width, height), Image.Resampling.BILINEAR, box=box)
        frame = np.asarray(canvas).astype(np.float32)
        for number, thing in enumerate(scene.things):
            if thing.start <= index < thing.stop and thing.name != without:
                _paste(frame, owners[index], sprites[number], thing.corner_at(index), number)
        frame = light[frame.astype(np.uint8)]
        grain = rng.standard_normal((height, width, 1), np.float32) * scene.grain
        frames[index] = _compress(np.clip(frame + grain, 0, 255).astype(np.uint8), scene.quality)
    return frames, owners


def _disguise(frame: np.ndarray, pictures: Pictures, rng: np.random.Generator) -> np.ndarray:
    """A frame of a film that has not been made; the same `rng` gives all frames of a scene the same disguise."""
    frame = frame[:: rng.choice((-1, 1)), :: rng.choice((-1, 1)), rng.permutation(3)]
    if rng.random() < 0.3:
        frame = 255 - frame
    other = pictures.films[str(rng.choice(SPLITS["varied"]))]
    still, share = other[int(rng.integers(len(other)))], float(rng.choice((0.0, rng.uniform(0.2, 0.6))))
    height, width = frame.shape[:2]
    still = np.asarray(Image.fromarray(still).resize((width, height)))
    return ((1 - share) * frame + share * still).astype(np.uint8)


def _sprite(thing: Thing, rgba: np.ndarray) -> np.ndarray:
    image = Image.fromarray(rgba)
    if thing.mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if thing.turn:
        image = image.rotate(thing.turn, Image.Resampling.BILINEAR)
    return np.asarray(image.resize((thing.side, thing.side), Image.Resampling.BILINEAR)).astype(np.float32)


def _paste(frame: np.ndarray, owners: np.ndarray, sprite: np.ndarray, corner: tuple[int, int], number: int) -> None:
    height, width = owners.shape
    left, top = (min(max(0, c), limit - len(sprite)) for c, limit in zip(corner, (width, height), strict=True))
    place = np.s_[top : top + len(sprite), left : left + len(sprite)]
    opaque = sprite[..., 3:] / 255
    frame[place] += (sprite[..., :3] - frame[place]) * opaque
    owners[place][opaque[..., 0] > 0.5] = number


def _compress(frame: np.ndarray, quality: int) -> np.ndarray:
    if quality == 100:
        return frame
    packed = io.BytesIO()
    Image.fromarray(frame).save(packed, "JPEG", quality=quality)
    return np.asarray(Image.open(packed))


def token_things(owners: np.ndarray, count: int) -> np.ndarray:
    """
    Which thing every visual token shows most of.

    Args:
        owners: as [`render`] gives them, two frames a step.
        count: how many things.

    Returns:
        `[time, height, width]` int64: the thing's place, [`NOTHING`] or [`UNCLEAR`].
    """
    frames, height, width = owners.shape
    if count == 0:
        return np.full((frames // FPS, height // CELL, width // CELL), NOTHING)
    cells = owners.reshape(frames // FPS, FPS, height // CELL, CELL, width // CELL, CELL)
    cells = cells.transpose(0, 2, 4, 1, 3, 5).reshape(frames // FPS, height // CELL, width // CELL, -1)
    shares = np.stack([(cells == number).mean(-1) for number in range(count)], -1)
    most = shares.max(-1, initial=0.0)
    return np.where(most >= SHOWN, shares.argmax(-1), np.where(shares.sum(-1) < HIDDEN, NOTHING, UNCLEAR))
