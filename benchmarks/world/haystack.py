"""A haystack of TinyWorld: a crowd as long as one likes, and short clips with one object each that it never shows."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from .clip import write_mp4
from .crowd import NAMES, Crowd, CrowdObject, make_crowd, render_crowd
from .scene import FPS, sightings
from .tinyworld import split_seed

# No background has an object of these names. Their words it has: red things, and other circles.
HIDDEN = (("red", "circle"), ("green", "star"), ("blue", "cross"), ("white", "ring"))
_SECONDS = 8  # of each world that the background is made of
# Worlds of the test split that no other file begins with.
_BACKGROUND, _NEEDLES = 500_000, 600_000


def write_background(path: Path, seconds: int) -> Path:
    """Writes a video of crowds, one after another, none of which has an object of a name in [`HIDDEN`]."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part.mp4")
        write_mp4(part, _background(seconds), FPS)
        os.replace(part, path)
    return path


def write_needles(folder: Path, count: int, seconds: int) -> Path:
    """
    Writes `needles.jsonl`, with a clip for each: a crowd in which one object has a name in [`HIDDEN`], the longest that
    any stays, and a question about its mark.

    Args:
        count: how many.
        seconds: length of a clip; of 1 second it is a still.

    Raises:
        ValueError: a length that no crowd has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for index in range(count):
        world, item = _needle(index, seconds)
        clip = folder / f"{index:03d}.mp4"
        if not clip.exists():
            part = clip.with_suffix(f".{os.getpid()}.part.mp4")
            write_mp4(part, render_crowd(world), FPS)
            os.replace(part, clip)
        question, seen = f"What is in the {item.name}?", [asdict(sighting) for sighting in sightings(item)]
        record = {"video": clip.name, "question": question, "answer": item.mark, "kind": "attribute"}
        records.append({**record, "evidence": [seen]})
    path = folder / "needles.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def _background(seconds: int) -> Iterator[np.ndarray]:
    for index in range(-(-seconds // _SECONDS)):
        frames = render_crowd(_without_hidden(make_crowd(split_seed("test", _BACKGROUND + index), _SECONDS)))
        yield from frames[: (seconds - index * _SECONDS) * FPS]


def _needle(index: int, seconds: int) -> tuple[Crowd, CrowdObject]:
    world = _without_hidden(make_crowd(split_seed("test", _NEEDLES + index), seconds))
    colour, shape = HIDDEN[index % len(HIDDEN)]
    # Of those that stand still, the one that stays longest.
    place = max(
        range(len(world.objects)),
        key=lambda at: (world.objects[at].direction is None, _life(world.objects[at])),
    )
    item = replace(world.objects[place], colour=colour, shape=shape)
    objects = (*world.objects[:place], item, *world.objects[place + 1 :])
    return replace(world, objects=objects), item


def _life(item: CrowdObject) -> int:
    return item.vanishes_at - item.appears_at


def _without_hidden(world: Crowd) -> Crowd:
    """The same world, in which the objects of hidden names have others that it does not use."""
    used = {(item.colour, item.shape) for item in world.objects}
    free = iter([name for name in NAMES if name not in used and name not in HIDDEN])
    objects = []
    for item in world.objects:
        if (item.colour, item.shape) in HIDDEN:
            colour, shape = next(free)
            item = replace(item, colour=colour, shape=shape)
        objects.append(item)
    return replace(world, objects=tuple(objects))


__all__ = ["HIDDEN", "write_background", "write_needles"]
