"""TinyWorld: seeded videos of coloured shapes as mp4 files, with questions in plain English and captions.

`World = make_world(seed, seconds)`; then `render(world)`, `caption(world)`, `questions(world, rng)`, or
`build_dataset(folder, split, size)` for all of it on disk. A question knows which visual tokens hold its answer.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
from rich.progress import track

from qtsplus.data.clip import write_mp4
from qtsplus.data.questions import (
    LETTERS,
    POINT_KINDS,
    QUESTION_KINDS,
    WIDE_KINDS,
    Question,
    caption,
    evidence_tokens,
    moment,
    needle_recall,
    questions,
)
from qtsplus.data.scene import CELL, FPS, FRAME_SIZE, GRID, Sighting, World, WorldObject, make_world, render

# The seeds of one split are never those of another.
SPLITS = {
    "train": range(0, 10_000_000),
    "validation": range(10_000_000, 11_000_000),
    "test": range(11_000_000, 12_000_000),
}


def split_seed(split: str, index: int) -> int:
    """
    The seed of the `index`-th world of a split.

    Raises:
        ValueError: an unknown split, or more worlds than it has seeds.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {sorted(SPLITS)}.")
    if not 0 <= index < len(SPLITS[split]):
        raise ValueError(f"world {index} of {split!r}: expected an index from 0 to {len(SPLITS[split]) - 1}.")
    return SPLITS[split][index]


def split_world(split: str, index: int, seconds: Sequence[int] = (8, 16), max_objects: int = 12) -> World:
    """The `index`-th world of a split; its length is drawn from `seconds`."""
    seed = split_seed(split, index)
    return make_world(seed, int(np.random.default_rng([seed, 2]).choice(seconds)), max_objects)


def ask_world(world: World, multiple_choice: float = 0.5) -> list[Question]:
    """A world's caption, two of its moments and its questions; the same for the same world."""
    rng = np.random.default_rng([world.seed, world.seconds, 3])
    moments = rng.permutation(world.seconds)[:2]
    return [
        caption(world),
        *(moment(world, int(second)) for second in moments),
        *questions(world, rng, multiple_choice),
    ]


def build_dataset(
    folder: str | os.PathLike,
    split: str,
    size: int,
    seconds: Sequence[int] = (8, 16),
    max_objects: int = 12,
    multiple_choice: float = 0.5,
    conversations: bool = False,
    workers: int = 1,
    progress: bool = True,
) -> str:
    """
    Writes `size` worlds of a split as `<folder>/<split>/<index>.mp4` and their questions as `<folder>/<split>.jsonl`.

    A video that stands there already is not written again, so a build that was stopped goes on where it was. What
    decides the videos stands in `<folder>/<split>/videos.json`: with other arguments than there, the build is refused.

    Args:
        split: one of [`SPLITS`].
        size: worlds; each gives a caption, two moments and up to eight questions.
        seconds: lengths to draw from, each in [`SECONDS`].
        max_objects: in one video, in [`MAX_OBJECTS`]; few in short videos are where learning can start.
        multiple_choice: share of the questions that come with options.
        conversations: one record per video, with all that is asked about it as the turns of one conversation.
        workers: processes that render.
        progress: show a progress bar.

    Returns:
        The path of the JSONL file, which training reads. A record has the fields of [`Question`] and `id`, `video`
        (relative to `folder`), `split`, `seed`, `seconds`, `source` and `answer_text`.

    Raises:
        ValueError: an argument out of range, or videos in the folder that other arguments made.
    """
    _check_arguments(split, size, seconds, max_objects, multiple_choice, workers)
    folder = os.fspath(folder)
    os.makedirs(os.path.join(folder, split), exist_ok=True)
    _check_videos(os.path.join(folder, split), _what_decides_videos(split, seconds, max_objects))
    jobs = [(folder, split, index, tuple(seconds), max_objects) for index in range(size)]
    with contextlib.ExitStack() as stack:
        done: Iterable[World] = map(_write_video, jobs)
        if workers > 1:
            pool = stack.enter_context(concurrent.futures.ProcessPoolExecutor(workers))
            done = pool.map(_write_video, jobs, chunksize=8)
        worlds = list(track(done, "Rendering", total=size, disable=not progress))
    path = os.path.join(folder, f"{split}.jsonl")
    with open(path + ".part", "w", encoding="utf-8") as file:
        for index, world in enumerate(worlds):
            records = list(_records(split, index, world, multiple_choice))
            if conversations:
                records = [_conversation(records, np.random.default_rng([world.seed, 4]))]
            file.writelines(json.dumps(record) + "\n" for record in records)
    os.replace(path + ".part", path)
    return path


def _check_arguments(
    split: str, size: int, seconds: Sequence[int], max_objects: int, multiple_choice: float, workers: int
) -> None:
    for name, value in (("size", size), ("workers", workers)):
        if value != int(value) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number, at least 1.")
    if not 0 <= multiple_choice <= 1:
        raise ValueError(f"multiple_choice={multiple_choice!r}: expected a share from 0 to 1.")
    if not seconds:
        raise ValueError("seconds is empty: expected one length or more.")
    seed = split_seed(split, size - 1)
    for length in seconds:
        make_world(seed, length, max_objects)


def _what_decides_videos(split: str, seconds: Sequence[int], max_objects: int) -> dict[str, object]:
    """The arguments that decide a split's videos, and a digest of the frames that they give first."""
    first = render(split_world(split, 0, seconds, max_objects))
    digest = hashlib.sha256(first.tobytes()).hexdigest()
    return {"seconds": list(seconds), "max_objects": max_objects, "first_video": digest}


def _check_videos(folder: str, wanted: dict[str, object]) -> None:
    """Refuses to go on with other videos than those in a split's folder; says in an empty one what makes its videos."""
    path = os.path.join(folder, "videos.json")
    if not any(name.endswith(".mp4") for name in os.listdir(folder)):
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(wanted) + "\n")
        return
    try:
        with open(path, encoding="utf-8") as file:
            found = dict(json.load(file))
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} holds videos, but no videos.json says how they were made: remove the folder or choose another."
        ) from error
    differing = [
        f"{name}={found.get(name)}, not {wanted[name]}"
        for name in ("seconds", "max_objects")
        if found.get(name) != wanted[name]
    ]
    if not differing and found.get("first_video") != wanted["first_video"]:
        differing = ["another version of this package or of its libraries"]
    if differing:
        raise ValueError(
            f"{folder} holds videos that were made with {' and with '.join(differing)}: choose another folder, or "
            "remove that one to make them anew."
        )


def _video_name(split: str, index: int) -> str:
    return f"{split}/{index:06d}.mp4"


def _write_video(job: tuple[str, str, int, tuple[int, ...], int]) -> World:
    folder, split, index, seconds, max_objects = job
    world = split_world(split, index, seconds, max_objects)
    path = os.path.join(folder, _video_name(split, index))
    if not os.path.exists(path):
        # Written under another name first: a file that stands there is whole.
        part = path.removesuffix(".mp4") + ".part.mp4"
        write_mp4(part, render(world), FPS)
        os.replace(part, path)
    return world


def _records(split: str, index: int, world: World, multiple_choice: float) -> Iterator[dict]:
    for number, question in enumerate(ask_world(world, multiple_choice)):
        yield {
            "id": f"{split}-{index:06d}-{number:02d}",
            "video": _video_name(split, index),
            "split": split,
            "seed": world.seed,
            "seconds": world.seconds,
            **asdict(question),
            "source": question.source,
            "answer_text": question.answer_text,
        }


def _conversation(records: list[dict], rng: np.random.Generator) -> dict:
    """The records of one video, in random order, as the turns that end in the last of them."""
    *earlier, last = (records[index] for index in rng.permutation(len(records)))
    return {**last, "earlier": [[record["question"], record["answer"]] for record in earlier]}


__all__ = [
    "CELL",
    "FPS",
    "FRAME_SIZE",
    "GRID",
    "QUESTION_KINDS",
    "LETTERS",
    "POINT_KINDS",
    "Question",
    "SPLITS",
    "Sighting",
    "WIDE_KINDS",
    "World",
    "WorldObject",
    "ask_world",
    "build_dataset",
    "caption",
    "evidence_tokens",
    "make_world",
    "moment",
    "needle_recall",
    "questions",
    "render",
    "split_seed",
    "split_world",
]
