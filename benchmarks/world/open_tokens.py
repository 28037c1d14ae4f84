"""What every visual token of a world without a grid shows, counted in pixels."""

from dataclasses import dataclass

import numpy as np

from .openworld import OPEN_COLOURS, OPEN_MARKS, OPEN_SHAPES, OpenWorld, Thing, draw_owners
from .scene import CELL, DIRECTIONS, FPS
from .token_words import UNNAMED, NamedTokens

OPEN_WORDS = ("nothing", *OPEN_COLOURS, *OPEN_SHAPES, *OPEN_MARKS, *DIRECTIONS, "appear")
OPEN_ASPECTS = tuple(("nothing", *words) for words in (OPEN_COLOURS, OPEN_SHAPES, OPEN_MARKS, DIRECTIONS))
# Beside earlier tokens: that its thing has just come, and which colour it had before, where it has just changed.
OPEN_CONTEXT = (("nothing", "appear"), ("nothing", *OPEN_COLOURS))

# A token names the thing that it shows most of if that is an eighth of the token, or a third of what is to be seen of
# the thing; and nothing if nothing takes a fiftieth of it. Between those it has no label.
NAMED_SHARE, NAMED_PART, EMPTY_SHARE = 0.125, 0.34, 0.02
MOVES = 3.0  # pixels a frame from which a token says where its thing moves


@dataclass(frozen=True)
class Shown:
    """
    Pixels that each token shows.

    Attributes:
        bodies, marks: `[things, T, H, W]`, of a thing with its mark, and of its mark, over the frames of a step.
    """

    bodies: np.ndarray
    marks: np.ndarray

    def needle(self, number: int, part: slice = slice(None)) -> np.ndarray:
        """`[k]`, ascending: the tokens that show a pixel of a thing, in some of the steps."""
        steps = np.zeros(self.bodies.shape[1], dtype=bool)
        steps[part] = True
        return np.flatnonzero((self.bodies[number] > 0) & steps[:, None, None])


def count_pixels(world: OpenWorld) -> Shown:
    """What the tokens of a world show, on its [`OpenWorld.grid`]."""
    steps, rows, columns = world.grid
    owners = draw_owners(world).reshape(steps, FPS, rows, CELL, columns, CELL) + 1
    tokens = np.arange(steps * rows * columns).reshape(steps, 1, rows, 1, columns, 1)
    kinds = 2 * len(world.things) + 1
    counts = np.bincount((tokens * kinds + owners).ravel(), minlength=tokens.size * kinds)
    counts = counts.reshape(steps, rows, columns, kinds)[..., 1:].reshape(steps, rows, columns, -1, 2)
    counts = np.moveaxis(counts, 3, 0)
    return Shown(counts.sum(-1), counts[..., 1])


def name_tokens(world: OpenWorld, shown: Shown) -> NamedTokens:
    """What the tokens of a world show, in words, and which thing that is."""
    labels = np.full((*world.grid, len(OPEN_ASPECTS) + len(OPEN_CONTEXT)), UNNAMED)
    owners = np.full(world.grid, -1)
    if not world.things:
        labels[..., : len(OPEN_ASPECTS)] = 0
        return NamedTokens(labels, OPEN_WORDS, OPEN_ASPECTS, OPEN_CONTEXT, owners)
    bodies, area = shown.bodies, FPS * CELL * CELL
    most = bodies.argmax(0)
    main, second = np.take_along_axis(bodies, most[None], 0)[0], np.sort(bodies, 0)[-2] if len(bodies) > 1 else 0
    whole = np.maximum(bodies.sum((2, 3)), 1)[most, np.arange(len(most))[:, None, None]]
    named = ((main > NAMED_SHARE * area) | (main > NAMED_PART * whole)) & (2 * second < main)
    labels[main <= EMPTY_SHARE * area, : len(OPEN_ASPECTS)] = 0
    for number, thing in enumerate(world.things):
        own = named & (most == number)
        owners[own] = number
        labels[own] = _thing_labels(world, thing)[np.nonzero(own)[0]]
        _label_mark(labels, own, thing, shown.marks[number])
    labels[0, ..., len(OPEN_ASPECTS) :] = UNNAMED
    return NamedTokens(labels, OPEN_WORDS, OPEN_ASPECTS, OPEN_CONTEXT, owners)


def _thing_labels(world: OpenWorld, thing: Thing) -> np.ndarray:
    """`[T, aspects]`, of a thing's tokens in every step, but for its mark."""
    visible = thing.is_visible(world.frames).reshape(-1, FPS)
    colours = [thing.colour_at(frame) for frame in range(world.frames)]
    moving = thing.direction if max(map(abs, thing.speed)) >= MOVES else "nothing"
    labels = np.full((world.seconds, len(OPEN_ASPECTS) + len(OPEN_CONTEXT)), UNNAMED)
    shape, moves = OPEN_WORDS.index(thing.shape), OPEN_WORDS.index(moving or "nothing")
    before: str | None = None
    for step in range(world.seconds):
        seen = {colours[FPS * step + frame] for frame in range(FPS) if visible[step, frame]}
        pure = len(seen) == 1
        colour = seen.pop() if pure else None
        labels[step, 0] = OPEN_WORDS.index(colour) if colour else UNNAMED
        labels[step, 1] = shape
        labels[step, 3] = moves if visible[step].all() and (moves or not max(map(abs, thing.speed))) else UNNAMED
        if colour is None:
            continue
        labels[step, 4] = OPEN_WORDS.index("appear" if before is None else "nothing")
        if before is not None:
            labels[step, 5] = OPEN_WORDS.index(before) if before != colour else 0
        before = colour
    return labels


def _label_mark(labels: np.ndarray, own: np.ndarray, thing: Thing, marks: np.ndarray) -> None:
    """A mark is named where most of it is to be seen; other tokens of its thing have no word for it."""
    labels[own, 2] = UNNAMED
    if thing.mark is None:
        labels[own, 2] = 0
        return
    most = marks >= np.maximum(0.5 * marks.sum((1, 2), keepdims=True), 1)
    labels[own & most, 2] = OPEN_WORDS.index(thing.mark)
