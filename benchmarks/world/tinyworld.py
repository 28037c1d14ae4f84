"""TinyWorld: seeded videos of coloured shapes as mp4 files, with questions in plain English and captions.

`World = make_world(seed, seconds)`; then `render(world)`, `caption(world)`, `questions(world, rng)`, or
`build_dataset(folder, split, size)` for all of it on disk. A question knows which visual tokens hold its answer.
`crowd=True` builds crowded worlds instead, see `crowd.py`.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from .clip import write_mp4
from .crowd import (
    ALL_WORDS,
    ASPECTS,
    CONTEXT,
    Crowd,
    context_labels,
    make_crowd,
    render_crowd,
    token_labels,
)
from .crowd_questions import CROWD_PLAN, crowd_questions
from .questions import (
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
from .scene import CELL, FPS, FRAME_SIZE, GRID, World, WorldObject, make_world, render
from .token_words import NamedTokens, write_token_words

FRAME_SIZES = tuple(FRAME_SIZE // times for times in (1, 2, 3, 6))  # all of whole visual tokens

# The seeds of one split are never those of another.
SPLITS = {
    "train": range(0, 10_000_000),
    "validation": range(10_000_000, 11_000_000),
    "test": range(11_000_000, 12_000_000),
    "harness": range(12_000_000, 13_000_000),  # the task of lmms-eval; nothing was chosen by it
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


def split_world(
    split: str,
    index: int,
    seconds: Sequence[int] = (8, 16),
    max_objects: int | None = None,
    crowd: bool = False,
    first: int = 0,
) -> World:
    """The `index`-th world of a split from `first` on, sparse or crowded; its length is drawn from `seconds`."""
    seed = split_seed(split, first + index)
    length = int(np.random.default_rng([seed, 2]).choice(seconds))
    return _maker(crowd)(seed, length, _most_objects(max_objects, crowd))


def _maker(crowd: bool) -> Callable[[int, int, int], World]:
    return make_crowd if crowd else make_world


def _most_objects(max_objects: int | None, crowd: bool) -> int:
    """What was said, or else 12 in a video, or 21 at a time in a crowd."""
    if max_objects is not None:
        return max_objects
    return 21 if crowd else 12


def draw_world(world: World) -> np.ndarray:
    """A world's frames, `[T, FRAME_SIZE, FRAME_SIZE, 3]` uint8 RGB."""
    return render_crowd(world) if isinstance(world, Crowd) else render(world)


def ask_world(world: World, multiple_choice: float = 0.5, plan: Mapping[str, int] = CROWD_PLAN) -> list[Question]:
    """A world's caption, two of its moments and its questions (a crowd's questions); the same for the same world."""
    rng = np.random.default_rng([world.seed, world.seconds, 3])
    if isinstance(world, Crowd):
        return crowd_questions(world, rng, multiple_choice, plan)
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
    max_objects: int | None = None,
    multiple_choice: float = 0.5,
    conversations: bool = False,
    workers: int = 1,
    progress: bool = True,
    crowd: bool = False,
    frame_size: int = FRAME_SIZE,
    ask: Mapping[str, int] | None = None,
    teacher_videos: str | os.PathLike | None = None,
    first: int = 0,
) -> str:
    """
    Writes `size` worlds of a split as `<folder>/<split>/<index>.mp4` and their questions as `<folder>/<split>.jsonl`.

    A video that stands there already is not written again, so a build that was stopped goes on where it was. What
    decides the videos stands in `<folder>/<split>/videos.json`: with other arguments than there, the build is refused.

    Args:
        split: one of [`SPLITS`].
        size: worlds; each gives a caption, two moments and up to eight questions, or a crowd up to sixteen questions.
        seconds: lengths to draw from, each in [`SECONDS`], of crowds in [`CROWD_SECONDS`].
        max_objects: in one video, in [`MAX_OBJECTS`], or 12; of crowds at a time, in [`MAX_CROWD`], or 21. Few in
            short videos are where learning can start.
        multiple_choice: share of the questions that come with options.
        conversations: one record per video, with all that is asked about it as the turns of one conversation.
        workers: processes that render.
        progress: show a progress bar.
        crowd: crowded worlds, see [`make_crowd`].
        frame_size: pixels a side of the frames, [`FRAME_SIZE`] or a part of it in whole visual tokens: the same videos,
            smaller. Their records and what the tokens show stay those of full size.
        ask: of crowds, by its kind how many questions to ask, where that is not as [`CROWD_PLAN`] has it.
        teacher_videos: a folder that holds the same videos with larger frames, which the records then name as their
            `teacher_video`, relative to `folder`.
        first: the index of the first world in its split.

    Returns:
        The path of the JSONL file, which training reads. A record has the fields of [`Question`] and `id`, `video`
        (relative to `folder`), `split`, `seed`, `seconds`, `max_objects`, `crowd`, `source` and `answer_text`.

    Raises:
        ValueError: an argument out of range, videos in the folder that other arguments made, or too few of the same
            videos in `teacher_videos`.
    """
    most = _most_objects(max_objects, crowd)
    unknown = sorted(set(ask or {}) - set(CROWD_PLAN))
    if unknown or (ask and not crowd) or any(count < 0 for count in (ask or {}).values()):
        raise ValueError(f"ask={ask!r}: expected counts of {', '.join(CROWD_PLAN)}, about crowds.")
    made_with: dict[str, Any] = {"seconds": list(seconds), "max_objects": most, "crowd": crowd}
    if frame_size != FRAME_SIZE:
        made_with["frame_size"] = frame_size
    make = functools.partial(split_world, split, seconds=tuple(seconds), max_objects=most, crowd=crowd, first=first)
    _check_arguments(split, size, seconds, most, crowd, multiple_choice, workers, first)
    if frame_size not in FRAME_SIZES:
        raise ValueError(f"frame_size={frame_size!r}: expected one of {', '.join(map(str, FRAME_SIZES))}.")
    folder = os.fspath(folder)
    first_video = hashlib.sha256(draw_world(make(0)).tobytes()).hexdigest()
    wanted = {**made_with, **({"first": first} if first else {}), "first_video": first_video}
    if teacher_videos is not None:
        _check_teacher_videos(teacher_videos, split, size, wanted)
    os.makedirs(os.path.join(folder, split), exist_ok=True)
    _check_videos(os.path.join(folder, split), wanted)
    jobs = [(os.path.join(folder, _video_name(split, index)), index, make, frame_size) for index in range(size)]
    with contextlib.ExitStack() as stack:
        done: Iterable[World] = map(_write_video, jobs)
        if workers > 1:
            pool = stack.enter_context(concurrent.futures.ProcessPoolExecutor(workers))
            done = pool.map(_write_video, jobs, chunksize=8)
        console = Console(stderr=True)
        bar = track(done, "Rendering", total=size, disable=not (progress and console.is_terminal), console=console)
        worlds = list(bar)
    path = os.path.join(folder, f"{split}.jsonl")
    with open(path + ".part", "w", encoding="utf-8") as file:
        for index, world in enumerate(worlds):
            asked = ask_world(world, multiple_choice, {**CROWD_PLAN, **(ask or {})})
            records = list(_records(split, index, world, asked, made_with))
            if teacher_videos is not None:
                theirs = _beside(folder, os.path.join(teacher_videos, _video_name(split, index)))
                records = [{**record, "teacher_video": theirs} for record in records]
            if conversations:
                records = [_conversation(records, np.random.default_rng([world.seed, 4]))]
            file.writelines(json.dumps(record) + "\n" for record in records)
    os.replace(path + ".part", path)
    return path


def _check_arguments(
    split: str,
    size: int,
    seconds: Sequence[int],
    most: int,
    crowd: bool,
    multiple_choice: float,
    workers: int,
    first: int,
) -> None:
    for name, value in (("size", size), ("workers", workers)):
        if value != int(value) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number, at least 1.")
    if not 0 <= multiple_choice <= 1:
        raise ValueError(f"multiple_choice={multiple_choice!r}: expected a share from 0 to 1.")
    if not seconds:
        raise ValueError("seconds is empty: expected one length or more.")
    seed = split_seed(split, first + size - 1)
    for length in seconds:
        _maker(crowd)(seed, length, most)


def _check_videos(folder: str, wanted: dict[str, Any]) -> None:
    """
    Refuses to go on with other videos than those in a split's folder; says in an empty one what makes its videos: the
    arguments that decide them, and a digest of the frames that they give first.
    """
    path = os.path.join(folder, "videos.json")
    if not any(name.endswith(".mp4") for name in os.listdir(folder)):
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(wanted) + "\n")
        return
    found = _read_made_with(folder)
    if found is None:
        raise ValueError(
            f"{folder} holds videos, but no videos.json says how they were made: remove the folder or choose another."
        )
    differing = _differing(found, wanted, ("seconds", "max_objects", "crowd", "frame_size", "first"))
    if differing:
        raise ValueError(
            f"{folder} holds videos that were made with {differing}: choose another folder, or remove that one to make "
            "them anew."
        )


def _check_teacher_videos(teacher_videos: str | os.PathLike, split: str, size: int, wanted: dict[str, Any]) -> None:
    """Refuses a folder that does not hold the split's first `size` videos, with frames as large or larger."""
    folder = os.path.join(teacher_videos, split)
    found = _read_made_with(folder)
    if found is None:
        raise ValueError(
            f"teacher_videos: no {os.path.join(folder, 'videos.json')} says how videos were made; expected a folder in "
            f"which `python -m benchmarks tinyworld` made the split {split!r}."
        )
    differing = _differing(found, wanted, ("seconds", "max_objects", "crowd", "first"))
    if differing:
        raise ValueError(
            f"teacher_videos: {folder} holds videos that were made with {differing}; expected the same videos with "
            "larger frames."
        )
    theirs, ours = (made_with.get("frame_size", FRAME_SIZE) for made_with in (found, wanted))
    if theirs not in FRAME_SIZES or theirs % ours:
        raise ValueError(
            f"teacher_videos: {folder} holds frames of {theirs} pixels a side; expected a multiple of {ours}."
        )
    there = sum(os.path.exists(os.path.join(teacher_videos, _video_name(split, index))) for index in range(size))
    if there < size:
        raise ValueError(f"teacher_videos: {folder} holds {there} of the first {size} videos; make the others first.")


def _read_made_with(folder: str) -> dict[str, Any] | None:
    """What made the videos of a split's folder; `None` where nothing says so."""
    try:
        with open(os.path.join(folder, "videos.json"), encoding="utf-8") as file:
            return {"crowd": False, **json.load(file)}  # folders are older than crowds
    except (FileNotFoundError, TypeError, ValueError):
        return None


def _differing(found: dict[str, Any], wanted: dict[str, Any], names: Sequence[str]) -> str | None:
    """How videos were made otherwise than is wanted, in these arguments or in what the frames came out as."""
    differing = [
        f"{name}={found.get(name)}, not {wanted.get(name)}" for name in names if found.get(name) != wanted.get(name)
    ]
    if not differing and found.get("first_video") != wanted["first_video"]:
        differing = ["another version of this package or of its libraries"]
    return " and with ".join(differing) or None


def _video_name(split: str, index: int) -> str:
    return f"{split}/{index:06d}.mp4"


def _beside(folder: str, path: str) -> str:
    """A path as seen from a folder, wherever links lead."""
    return os.path.relpath(os.path.realpath(path), os.path.realpath(folder))


def _words_name(video: str) -> str:
    return video.removesuffix(".mp4") + ".safetensors"


def _write_video(job: tuple[str, int, Callable[[int], World], int]) -> World:
    path, index, make, frame_size = job
    world = make(index)
    if not os.path.exists(path):
        # Written under another name first: a file that stands there is whole.
        part = path.removesuffix(".mp4") + ".part.mp4"
        write_mp4(part, _shrink(draw_world(world), frame_size), FPS)
        if isinstance(world, Crowd):
            labels = [label(world, _grid(world)) for label in (token_labels, context_labels)]
            named = NamedTokens(np.concatenate(labels, axis=-1), ALL_WORDS, ASPECTS, CONTEXT)
            write_token_words(_words_name(path), named)
        os.replace(part, path)
    return world


def _shrink(frames: np.ndarray, frame_size: int) -> np.ndarray:
    """`[T, FRAME_SIZE, FRAME_SIZE, 3]` uint8 with `frame_size` pixels a side, each the mean of those it covers."""
    times = FRAME_SIZE // frame_size
    if times == 1:
        return frames
    covered = frames.reshape(len(frames), frame_size, times, frame_size, times, 3)
    return covered.mean(axis=(2, 4)).round().astype(np.uint8)


def _grid(world: World) -> tuple[int, int, int]:
    """Of a world's visual tokens, one step a second."""
    return world.seconds, GRID, GRID


def _records(
    split: str, index: int, world: World, asked: Sequence[Question], made_with: dict[str, Any]
) -> Iterator[dict]:
    for number, question in enumerate(asked):
        supervision: dict[str, Any] = {}
        if isinstance(world, Crowd):
            needles = sorted(set[int]().union(*(part.tolist() for part in evidence_tokens(question, _grid(world)))))
            supervision = {"token_words": _words_name(_video_name(split, index)), "needles": [needles]}
        yield {
            "id": f"{split}-{index:06d}-{number:02d}",
            "video": _video_name(split, index),
            **supervision,
            "split": split,
            "seed": world.seed,
            **made_with,
            "seconds": world.seconds,
            **asdict(question),
            "source": question.source,
            "answer_text": question.answer_text,
        }


def _conversation(records: list[dict], rng: np.random.Generator) -> dict:
    """The records of one video, in random order, as the turns that end in the last of them."""
    *earlier, last = turns = [records[index] for index in rng.permutation(len(records))]
    supervision = {"needles": [record["needles"][0] for record in turns]} if "needles" in last else {}
    return {**last, **supervision, "earlier": [[record["question"], record["answer"]] for record in earlier]}


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
    "WIDE_KINDS",
    "World",
    "WorldObject",
    "ask_world",
    "build_dataset",
    "caption",
    "draw_world",
    "evidence_tokens",
    "make_world",
    "moment",
    "needle_recall",
    "questions",
    "render",
    "split_seed",
    "split_world",
]
