"""Scenes as clips of visual tokens with their questions: what an ideal tower would see, or what the trained one sees."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from .questions import WORDINGS, ask_scene
from .reading import Clip
from .words import NAMES
from .world import NOTHING, UNCLEAR, Pictures, Scene, make_scene, render, token_things

Eyes = Callable[[np.ndarray, np.ndarray, np.random.Generator], torch.Tensor]
PLACES = {name: place for place, name in enumerate(NAMES)}


def look(
    pictures: Pictures,
    eyes: Eyes,
    seed: int,
    seconds: int,
    questions: int = 8,
    most: int = 4,
    room: int | None = None,
    held_out: bool = False,
    kinds: tuple[str, ...] = tuple(WORDINGS),
    split: str = "train",
) -> Clip | None:
    """
    A clip of one scene, or none where nothing is to be seen; the same arguments give the same one.

    Args:
        eyes: from frames `[T, H, W, 3]` and what tokens show `[time, rows, columns]` to tokens `[n, 576]`, all of them.
        room: so many tokens at most. Others are left out at random, but not the last three of a thing.
        held_out: see [`ask_scene`].
    """
    rng = np.random.default_rng([seed, seconds, 5])
    scene = make_scene(pictures, seed, seconds, split, most=most)
    frames, owners = render(scene, pictures)
    shown = token_things(owners, len(scene.things))
    visible = [number for number in range(len(scene.things)) if (shown == number).any()]
    if not visible:
        return None
    asked = replace(scene, things=tuple(scene.things[number] for number in visible))
    tokens = eyes(frames, name_tokens(scene, shown), rng)
    kept = _keep(shown.ravel(), room, rng)
    places = np.stack(np.unravel_index(kept, shown.shape), 1)
    return Clip(
        tokens=tokens[torch.from_numpy(kept)],
        places=torch.from_numpy(places),
        side=max(scene.grid[1:]),
        questions=tuple(ask_scene(asked, questions, seed, held_out, kinds=kinds)),
    )


def name_tokens(scene: Scene, shown: np.ndarray) -> np.ndarray:
    """What [`token_things`] says as places among the names, `len(NAMES)` for nothing and -100 where it is unclear."""
    assert (NOTHING, UNCLEAR) == (-1, -2)
    return np.array([*(PLACES.get(thing.name, UNCLEAR) for thing in scene.things), -100, len(NAMES)])[shown]


def _keep(shown: np.ndarray, room: int | None, rng: np.random.Generator) -> np.ndarray:
    order = rng.permutation(len(shown))
    if room is None or len(shown) <= room:
        return np.arange(len(shown))
    kept: list[int] = []
    for number in np.unique(shown[shown >= 0]):
        kept += [token for token in order if shown[token] == number][:3]
    taken = set(kept)
    kept += [token for token in order if token not in taken][: max(0, room - len(kept))]
    return np.sort(np.array(kept))
