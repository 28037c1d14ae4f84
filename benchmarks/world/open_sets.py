"""Worlds without a grid as mp4 files, with their questions and with what every token shows."""

import concurrent.futures
import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from .clip import write_mp4
from .open_questions import OPEN_PLAN, in_any_words, open_questions
from .open_tokens import count_pixels, name_tokens
from .openworld import SQUARE, OpenWorld, make_open, render_open
from .scene import FPS
from .splits import split_seed
from .token_words import write_token_words

MARGIN = 14  # pixels around a test video, into which it can be shifted


def _moved(world: OpenWorld, pixels: int) -> OpenWorld:
    things = (replace(thing, corner=(thing.corner[0] + pixels, thing.corner[1] + pixels)) for thing in world.things)
    return replace(world, things=tuple(things))


def _test_world(seed: int, seconds: int) -> OpenWorld:
    return replace(make_open(seed, seconds, size=SQUARE, bars=(MARGIN, MARGIN)), bars=(0, 0), light=1.0)


# The same questions about the same videos, shown otherwise; but for the last two, which have things of their own.
VARIANTS: dict[str, Callable[[int, int], OpenWorld]] = {
    "plain": _test_world,
    "shift5": lambda seed, seconds: _moved(_test_world(seed, seconds), 5),
    "shift14": lambda seed, seconds: _moved(_test_world(seed, seconds), 14),
    "dark": lambda seed, seconds: replace(_test_world(seed, seconds), light=0.6),
    "portrait": lambda seed, seconds: replace(make_open(seed, seconds, size=(112, 252), bars=(0, 0)), light=1.0),
    "letterboxed": lambda seed, seconds: replace(make_open(seed, seconds, size=(140, 196), bars=(0, 28)), light=1.0),
}


def build_open(
    folder: str | os.PathLike,
    split: str,
    count: int,
    seconds: int,
    *,
    few: bool = False,
    variant: str | None = None,
    conversations: bool = False,
    plan: Mapping[str, int] = OPEN_PLAN,
    first: int = 0,
    workers: int = 1,
) -> Path:
    """
    Writes `<folder>/<split>/<index>.mp4` and their questions as `<folder>/<split>.jsonl`. What is there is kept.

    Args:
        split: one of [`SPLITS`].
        count: worlds.
        seconds: of each.
        few: see [`make_open`].
        variant: one of [`VARIANTS`], for tests.
        conversations: one record per video, with all questions as its turns.
        plan: how many questions of each kind.
        first: the index of the first world in its split.
        workers: processes that render.

    Returns:
        The path of the JSONL file. A record has the fields of [`OpenQuestion`], as `read_tinyworld` takes them.
    """
    folder = Path(folder)
    (folder / split).mkdir(parents=True, exist_ok=True)
    write = functools.partial(_write, folder, split, first, seconds, few, variant, dict(plan), conversations)
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        records = list(pool.map(write, range(count), chunksize=8))
    path = folder / f"{split}.jsonl"
    lines = (json.dumps(record) + "\n" for record in itertools.chain.from_iterable(records))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _write(
    folder: Path,
    split: str,
    first: int,
    seconds: int,
    few: bool,
    variant: str | None,
    plan: dict[str, int],
    conversations: bool,
    index: int,
) -> list[dict]:
    """One video's file, and its records."""
    seed = split_seed(split, first + index)
    world = make_open(seed, seconds, few) if variant is None else VARIANTS[variant](seed, seconds)
    shown = count_pixels(world)
    name = f"{split}/{index:06d}"
    path = folder / f"{name}.mp4"
    if not path.exists():
        part = path.with_suffix(".part.mp4")
        write_mp4(part, render_open(world), FPS)
        write_token_words(path.with_suffix(".safetensors"), name_tokens(world, shown))
        os.replace(part, path)
    rng = np.random.default_rng([seed, seconds, 14])
    asked = open_questions(world, shown, rng, plan)
    records = []
    for number, question in enumerate(asked[place] for place in rng.permutation(len(asked))):
        records.append(
            {
                "id": f"{split}-{index:06d}-{number:02d}",
                "video": f"{name}.mp4",
                "token_words": f"{name}.safetensors",
                "question": in_any_words(question.kind, question.text, rng) if split == "train" else question.text,
                **{key: value for key, value in asdict(question).items() if key in ("kind", "answer")},
                "needles": [question.needles],
                "looks": [question.looks or (question.needles,)],
                "seed": seed,
                "seconds": seconds,
            }
        )
    return [_conversation(records)] if conversations and records else records


def _conversation(records: list[dict]) -> dict:
    """All records of a video as the turns that end in the last of them."""
    turns = [[record["question"], record["answer"]] for record in records[:-1]]
    dense = {name: [part for record in records for part in record[name]] for name in ("needles", "looks")}
    return {**records[-1], **dense, "earlier": turns}
