"""Scenes as clips: what the tower sees of them, and what is asked about them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from qtsplus.asking.summaries import JOIN

from .questions import WORDINGS, Question, ask_scene, join_things
from .tower import see
from .words import NAMES
from .world import CROWD_SIZE, NOTHING, UNCLEAR, Pictures, Scene, Thing, make_scene, render, token_things

SIZES = ((112, 112), (140, 112), (112, 140), (140, 140), (168, 112))  # pixels: (width, height)
SECONDS = (2, 4, 4, 8)
CROWD_SECONDS = 8
QUESTIONS = 8
TAUGHT_KINDS = (*WORDINGS, "absent", "some", "list")  # what is learned last
PARTS = 4  # crowds that follow each other in a film
# Visual tokens that the language model reads in training, of a clip by how many crowds it has.
ROOM = ((28, 72), (48, 385), (96, 769), (96, 1153), (96, 1537))


@dataclass(frozen=True)
class Clip:
    """
    Visual tokens and what is asked about them.

    Attributes:
        tokens: `[n, 576]`.
        places: `[n, 3]` int64, their (time, row, column).
        side: the larger of the grid's height and width, in tokens.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    side: int
    questions: tuple[Question, ...]


def clip_scene(
    pictures: Pictures,
    seed: int,
    split: str = "train",
    seconds: int | None = None,
    crowd: bool = False,
    drawings: Sequence[int] | None = None,
    plain: bool = False,
) -> tuple[Scene, np.ndarray, np.ndarray]:
    """
    A scene of things that are seen, its frames `[T, H, W, 3]`, and whom tokens show `[time, rows, columns]`.

    Args:
        drawings: what may be shown; else what is trained.
        plain: the background alone.
    """
    rng = np.random.default_rng([seed, 5])
    size, drawn = SIZES[rng.integers(len(SIZES))], SECONDS[rng.integers(len(SECONDS))]
    size = CROWD_SIZE if crowd else size
    scene = make_scene(pictures, seed, seconds or drawn, split, drawings, most=3, size=size, crowd=crowd)
    if plain:
        scene = replace(scene, things=())
    frames, owners = render(scene, pictures)
    shown = token_things(owners, len(scene.things))
    seen = [number for number in range(len(scene.things)) if (shown == number).any()]
    numbers = np.array([*(seen.index(n) if n in seen else n for n in range(len(scene.things))), UNCLEAR, NOTHING])
    return replace(scene, things=tuple(scene.things[number] for number in seen)), frames, numbers[shown]


def film_scene(pictures: Pictures, seed: int, split: str, parts: int) -> tuple[Scene, np.ndarray, np.ndarray]:
    """
    A film of crowds, one after the other with a cut between, in which no two things have one name; as [`clip_scene`].
    At most eight of them.
    """
    drawings = np.random.default_rng([seed, 8]).permutation(pictures.of("trained"))
    things: list[Thing] = []
    frames, shown = [], []
    for part, own in enumerate(np.array_split(drawings, parts)):
        scene, seen, tokens = clip_scene(
            pictures, parts * seed + part, split, CROWD_SECONDS, crowd=True, drawings=own.tolist()
        )
        frames.append(seen)
        shown.append(np.where(tokens >= 0, tokens + len(things), tokens))
        begun = part * scene.frames
        things += [replace(thing, start=thing.start + begun, stop=thing.stop + begun) for thing in scene.things]
    whole = replace(scene, seed=seed, seconds=parts * CROWD_SECONDS, things=tuple(things))
    return whole, np.concatenate(frames), np.concatenate(shown)


def look(pictures: Pictures, tower: nn.Module, seed: int, parts: int = 0) -> Clip:
    """
    A clip to learn from; the same arguments give the same one. Of many tokens some are left out at random, as a
    selector does, but not the last three of a thing.

    Args:
        parts: how many crowds follow each other in it, up to [`PARTS`]; else it has a few things.
    """
    rng = np.random.default_rng([seed, 6])
    if parts > 1:
        scene, frames, shown = film_scene(pictures, seed, "varied", parts)
    else:
        scene, frames, shown = clip_scene(
            pictures, seed, "varied", seconds=CROWD_SECONDS if parts else None, crowd=parts == 1
        )
    fewest, most = np.log(ROOM[parts])
    room = int(np.exp(rng.uniform(fewest, most))) if parts else int(rng.integers(*ROOM[0]))
    kept = _keep(shown.ravel(), room, rng)
    tokens = see(tower, torch.from_numpy(frames)[None])[torch.from_numpy(kept)]
    places = torch.from_numpy(np.stack(np.unravel_index(kept, shown.shape), 1))
    asked = ask_scene(scene, QUESTIONS * max(1, parts), seed, kinds=TAUGHT_KINDS, further=True)
    return Clip(tokens, places, max(scene.grid[1:]), tuple(one for one in asked if not one.doubtful))


def join(seed: int) -> Clip:
    """Chapters' texts of a film that is not seen, to be joined as `summarise` asks for it: each thing is named once."""
    rng = np.random.default_rng([seed, 9])
    lines = [JOIN]
    named: list[str] = []
    for _ in range(int(rng.integers(2, 7))):
        things = [str(name) for name in rng.choice(NAMES, int(rng.integers(1, 6)), replace=False)]
        lines.append(join_things(things))
        named += things
    overview = join_things(list(dict.fromkeys(named)))
    asked = Question("join", "\n".join(lines), overview)
    return Clip(torch.zeros(0, 576), torch.zeros(0, 3, dtype=torch.long), 0, (asked,))


def _keep(shown: np.ndarray, room: int, rng: np.random.Generator) -> np.ndarray:
    order = rng.permutation(len(shown))
    kept: list[int] = []
    for number in np.unique(shown[shown >= 0]):
        kept += [token for token in order if shown[token] == number][:3]
    taken = set(kept)
    kept += [token for token in order if token not in taken][: max(0, room - len(kept))]
    return np.sort(np.array(kept))
