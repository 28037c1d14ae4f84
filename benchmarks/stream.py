"""A stream of one hour with a memory of a few hundred tokens: what each policy still knows, and what appending costs.

Two scenes. In the crowd twenty objects are there at all times and change by the second. In the room a camera looks at
what stands still, and somebody passes every half minute. In both an object of a name that nothing else has appears for
a few seconds in the first ten minutes, and is asked for at once and later. Frames have a camera's noise. Everything is
encoded once, and each policy is given the features: frames of one step see those of no other.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtsplus.evaluation.intervals import percent_interval, share_interval
from qtsplus.evaluation.labelled import sighting_tokens
from qtsplus.output import check_output, markdown_table
from qtsplus.results import environment, steps, write_json
from qtsplus.stream import POLICIES, Stream

from .world.crowd import MARKS, NAMES, Crowd, CrowdObject, make_crowd, render_crowd
from .world.haystack import HIDDEN, _life, _needle, _without_hidden
from .world.scene import CELL, GRID, sightings
from .world.tinyworld import split_seed

SECONDS = 8  # of a scene, many of which make an hour
LAGS = (0, 5, 20, 50)  # minutes between the last sight of an object and the question
FIRST = 600  # seconds in which the objects appear that are asked for
NOISE = 2.0  # standard deviation of a pixel, of 255
PASSING = 4  # of so many scenes of the room one has somebody who passes
CELLS = GRID * GRID
QUESTIONS_KEEP = 64  # of the tokens in memory, for each answer
_SCENES, _ROOM = 700_000, 800_000

# By the row of the table: the policy, and its share of the memory.
RIVALS: dict[str, tuple[str, float]] = {
    "the last four frames": ("oldest_first", 0.0),
    "oldest first": ("oldest_first", 1.0),
    "uniform thinning": ("uniform", 1.0),
    "diversity": ("diversity", 1.0),
    "redundancy": ("redundancy", 1.0),
    "standing question": ("question", 1.0),
    "another standing question": ("question", 1.0),
}


@dataclass(frozen=True)
class Asked:
    """An object that passes: the features `[8 * CELLS, d]` of its scene, question and answer, when and where."""

    features: torch.Tensor
    question: str
    answer: str
    tokens: np.ndarray  # that show it, counted from the scene's first
    gone: int  # the step of the scene in which it is not seen any more


def room() -> Crowd:
    """What stands in front of the camera all the time."""
    world = _without_hidden(make_crowd(split_seed("test", _ROOM), SECONDS, max_objects=12))
    standing = [item for item in world.objects if item.is_visible(0)]
    kept = [replace(item, appears_at=0, vanishes_at=SECONDS, direction=None, distance=0) for item in standing]
    return replace(world, objects=tuple(kept), drift=(0, 0))


def passing(world: Crowd, rng: np.random.Generator, name: tuple[str, str] | None = None) -> tuple[Crowd, CrowdObject]:
    """The room with one object more, of this name or of one that nothing in it has, for two to seven seconds."""
    taken = {(int(item.start[1]) // CELL, int(item.start[0]) // CELL) for item in world.objects}
    free = [cell for cell in np.ndindex(GRID, GRID) if cell not in taken]
    row, column = free[rng.integers(len(free))]
    used = {(item.colour, item.shape) for item in world.objects} | set(HIDDEN)
    others = [one for one in NAMES if one not in used]
    colour, shape = name or others[rng.integers(len(others))]
    begin = int(rng.integers(0, 3))
    place = (column * CELL + CELL / 2, row * CELL + CELL / 2)
    mark = MARKS[rng.integers(len(MARKS))]
    end = begin + int(rng.integers(2, 6))
    item = CrowdObject(colour, shape, begin, end, start=place, side=26, mark=mark)
    return replace(world, objects=(*world.objects, item)), item


class Scenes:
    """The scenes of one kind of stream, encoded."""

    def __init__(self, model: Any, processor: Any, kind: str):
        self.model, self.processor, self.kind = model, processor, kind
        self.room = room()
        self.noise = np.random.default_rng(0)

    def background(self, count: int) -> Iterator[torch.Tensor]:
        """The features of scene after scene, in which nothing has a hidden name."""
        rng = np.random.default_rng(1)
        for index in range(count):
            world = self.room
            if self.kind == "crowd":
                world = _without_hidden(make_crowd(split_seed("test", _SCENES + index), SECONDS))
            elif index % PASSING == 0:
                world, _ = passing(self.room, rng)
            yield self.encode(world)

    def asked(self, index: int) -> Asked:
        """A scene with an object to ask for."""
        rng, name = np.random.default_rng([2, index]), HIDDEN[index % len(HIDDEN)]
        world, item = _needle(index, SECONDS) if self.kind == "crowd" else passing(self.room, rng, name)
        tokens = sighting_tokens(sightings(item), (SECONDS, GRID, GRID))
        return Asked(self.encode(world), f"What is in the {item.name}?", item.mark, tokens, item.vanishes_at)

    def frames(self, world: Crowd) -> np.ndarray:
        frames = render_crowd(world)
        noisy = frames + self.noise.normal(0, NOISE, frames.shape).astype(np.float32)
        return np.clip(noisy, 0, 255).astype(np.uint8)

    def encode(self, world: Crowd) -> torch.Tensor:
        frames = self.frames(world)
        grid = self.processor.grid_of(*frames.shape[:3])
        pixels, grid = self.processor.preprocess_frames(frames, grid)
        return self.model.encode_videos(pixels, grid)[0]


@dataclass
class Film:
    """An hour of features `[steps * CELLS, d]`, with four objects to ask for and the step where each scene begins."""

    features: torch.Tensor
    asked: list[Asked]
    begins: list[int]


def film(background: torch.Tensor, scenes: Scenes, number: int) -> Film:
    """The background with four scenes in its first ten minutes replaced."""
    rng = np.random.default_rng([3, number])
    places = sorted(rng.choice(np.arange(2, FIRST // SECONDS), len(HIDDEN), replace=False).tolist())
    asked = [scenes.asked(number * len(HIDDEN) + index) for index in range(len(HIDDEN))]
    features = background.clone()
    for place, one in zip(places, asked, strict=True):
        features[place * SECONDS * CELLS : (place + 1) * SECONDS * CELLS] = one.features
    return Film(features, asked, [place * SECONDS for place in places])


def replay(stream: Stream, shown: Film, stops: Mapping[int, Callable[[], None]]) -> None:
    """Gives a stream an hour of features, and calls what is to happen in front of a step."""
    camera = stream.camera("video", (GRID * CELL, GRID * CELL, 3))
    total = len(shown.features) // CELLS
    cuts = sorted({*range(0, total, SECONDS), *stops, total})
    for first, last in zip(cuts, cuts[1:], strict=False):
        if first in stops:
            stops[first]()
        stream.remember(camera, shown.features[first * CELLS : last * CELLS], range(first, last))
    if total in stops:
        stops[total]()


def ask_all(
    model: Any, processor: Any, shown: Film, rival: str, tokens: int, lags: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Every question of a film at every lag, with one policy."""
    policy, share = RIVALS[rival]
    memory = int(tokens * share) or 2 * CELLS
    results: list[dict[str, Any]] = []
    groups = [[number] for number in range(len(shown.asked))] if policy == "question" else [range(len(shown.asked))]
    for group in groups:
        standing = shown.asked[(group[0] + rival.startswith("another")) % len(shown.asked)].question
        question = standing if policy == "question" else None
        stream = Stream(model, processor, memory_tokens=memory, policy=policy, question=question)
        stops: dict[int, Any] = {}
        for number in group:
            for lag in lags:
                step = shown.begins[number] + shown.asked[number].gone + 60 * lag
                before = stops.get(step, lambda: None)
                stops[step] = lambda n=number, lag=lag, before=before: (
                    before(),
                    results.append(_ask(stream, shown, n) | {"lag": lag, "question": n}),
                )
        replay(stream, shown, stops)
    yield from results


def _ask(stream: Stream, shown: Film, number: int) -> dict[str, Any]:
    one = shown.asked[number]
    answer = stream.ask(one.question, retention=1.0, max_visual_tokens=QUESTIONS_KEEP, max_new_tokens=4)
    tokens = stream.cameras["video"].tokens
    places = tokens.steps.numpy() * CELLS + tokens.cells.numpy()
    there = np.isin(one.tokens + shown.begins[number] * CELLS, places)
    return {"correct": answer.answer == one.answer, "remembered": bool(there.any()), "share": float(there.mean())}
