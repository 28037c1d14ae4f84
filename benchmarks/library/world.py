"""Crowds of which each object asked for stands in one only, by its colour, shape and mark together."""

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..world.clip import write_mp4
from ..world.crowd import MARKS, NAMES, Crowd, CrowdObject, make_crowd, render_crowd
from ..world.scene import FPS
from ..world.tinyworld import split_seed

SECONDS = 8
_FIRST = 800_000  # of the test split; no other file begins there
# Of the five marks, how many a name bears in one video only: 150 in all.
_RARE = {name: 4 if place < 6 else 3 for place, name in enumerate(NAMES)}
_WORDINGS = (
    "Is there a {mark}? In which direction does the {name} move?",
    "In which direction does the {mark} in the {name} move?",
)


class Hidden(NamedTuple):
    """A question, its answer, the video of its object, and the object."""

    question: str
    answer: str
    video: int
    item: CrowdObject


def make_library(videos: int, first: int = _FIRST) -> tuple[list[Crowd], list[Hidden]]:
    """
    Crowds, and two questions about each of the moving objects that are in one of them only. Every other object with a
    name of theirs bears another mark.
    """
    rng = np.random.default_rng([first, videos])
    marks = {name: [str(mark) for mark in rng.permutation(MARKS)] for name in NAMES}
    worlds = [make_crowd(split_seed("test", first + index), SECONDS) for index in range(videos)]
    for index, world in enumerate(worlds):
        names = [(item.colour, item.shape) for item in world.objects]
        common = [str(rng.choice(marks[name][_RARE[name] :])) for name in names]
        objects = tuple(replace(item, mark=mark) for item, mark in zip(world.objects, common, strict=True))
        worlds[index] = replace(world, objects=objects)
    rare = [(name, mark) for name in NAMES for mark in marks[name][: _RARE[name]]]
    hidden: list[Hidden] = []
    free = set(range(videos))
    for place in rng.permutation(len(rare)):
        name, mark = rare[place]
        places = [index for index in sorted(free) if _moving(worlds[index], name)]
        if places:
            index = int(rng.choice(places))
            free.remove(index)
            item = replace(_moving(worlds[index], name)[0], mark=mark)
            others = [item if (one.colour, one.shape) == name else one for one in worlds[index].objects]
            worlds[index] = replace(worlds[index], objects=tuple(others))
            texts = [wording.format(mark=mark, name=item.name) for wording in _WORDINGS]
            hidden += [Hidden(text, str(item.direction), index, item) for text in texts]
    return worlds, hidden


def _moving(world: Crowd, name: tuple[str, str]) -> list[CrowdObject]:
    return [item for item in world.objects if (item.colour, item.shape) == name and item.direction is not None]


def write_videos(folder: Path, worlds: list[Crowd]) -> None:
    """Writes `000.mp4` and so on; those that are there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, world in enumerate(worlds):
        path = folder / f"{index:03d}.mp4"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}.part")
            write_mp4(f"{part}.mp4", render_crowd(world), FPS)
            os.replace(f"{part}.mp4", path)
