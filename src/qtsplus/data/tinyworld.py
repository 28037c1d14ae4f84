"""TinyWorld: seeded videos of coloured shapes as mp4 files, with questions in plain English and captions.

`World = make_world(seed, seconds)`; then `render(world)`, `caption(world)`, `questions(world, rng)`, or
`build_dataset(folder, split, size)` for all of it on disk. A question knows which visual tokens hold its answer.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from rich.progress import track

from qtsplus.data.clip import COLOURS, write_mp4
from qtsplus.data.scene import (
    CELL,
    DIRECTIONS,
    FPS,
    FRAME_SIZE,
    GRID,
    OBJECT_SHAPES,
    Sighting,
    World,
    WorldObject,
    make_world,
    render,
    sighting_tokens,
    sightings,
)

LETTERS = "ABCD"

# The seeds of one split are never those of another.
SPLITS = {
    "train": range(0, 10_000_000),
    "validation": range(10_000_000, 11_000_000),
    "test": range(11_000_000, 12_000_000),
}

POINT_KINDS = ("attribute", "existence", "direction", "when", "change")
WIDE_KINDS = ("count", "order", "summary")
QUESTION_KINDS = POINT_KINDS + WIDE_KINDS

Needle = tuple[Sighting, ...]


@dataclass(frozen=True)
class Question:
    """
    A question about a world.

    Attributes:
        question: the user's text, with the options where there are any.
        answer: the option's letter, or a short text.
        options: the texts of the options in order, or `None` for a free answer.
        query: the question without its options.
        kind: one of [`QUESTION_KINDS`], or "caption" or "moment" for dense supervision.
        evidence: the needles that must be found: each a tuple of [`Sighting`], any one of which will do. Empty where
            nothing in the video could be pointed at ("Is there a ..?" with the answer no).
    """

    question: str
    answer: str
    options: tuple[str, ...] | None
    query: str
    kind: str
    evidence: tuple[Needle, ...] = ()

    @property
    def answer_text(self) -> str:
        """The answer in words, also where `answer` is a letter."""
        return self.answer if self.options is None else self.options[LETTERS.index(self.answer)]

    @property
    def source(self) -> str:
        """What training counts it as: "caption" (dense supervision), "mcq" or "vqa"."""
        if self.kind in ("caption", "moment"):
            return "caption"
        return "vqa" if self.options is None else "mcq"


# --------------------------------------------------------------------------------------------------------------------
# Questions
# --------------------------------------------------------------------------------------------------------------------


def questions(world: World, rng: np.random.Generator, multiple_choice: float = 0.5) -> list[Question]:
    """
    One question of every kind that the world allows, in the order of [`QUESTION_KINDS`].

    Args:
        world: what to ask about.
        rng: draws the objects, the wording and the options.
        multiple_choice: share of the questions that come with options.
    """
    asked = []
    for kind in QUESTION_KINDS:
        possible = list(_ASK[kind](world, rng))
        if possible:
            question, wrong = possible[rng.integers(len(possible))]
            only_options = question.kind == "summary" and question.query == NEVER_SHOWN
            if wrong and (only_options or rng.random() < multiple_choice):
                question = add_options(question, wrong, rng)
            asked.append(question)
    return asked


def add_options(question: Question, wrong: Iterable[str], rng: np.random.Generator) -> Question:
    """The same question as multiple choice, with up to three of the wrong answers."""
    wrong = sorted(set(wrong) - {question.answer})
    chosen = [question.answer, *(wrong[index] for index in rng.permutation(len(wrong))[: len(LETTERS) - 1])]
    options = tuple(chosen[index] for index in rng.permutation(len(chosen)))
    listed = " ".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    return replace(
        question,
        question=f"{question.query} {listed} Answer with the letter.",
        answer=LETTERS[options.index(question.answer)],
        options=options,
    )


def _free(kind: str, text: str, answer: str, *evidence: Needle) -> Question:
    return Question(text, answer, None, text, kind, evidence)


# Each of the following yields what could be asked: a question with a free answer, and wrong answers for its options.
_Possible = Iterator[tuple[Question, Sequence[str]]]


def _ask_attribute(world: World, rng: np.random.Generator) -> _Possible:
    still = [item for item in world.objects if item.later_colour is None]
    shapes = collections.Counter(item.shape for item in world.objects)
    colours = collections.Counter(colour for item in world.objects for colour in item.colours)
    for item in still:
        if shapes[item.shape] == 1:
            text = f"What colour is the {item.shape}?"
            yield _free("attribute", text, item.colour, sightings(item)), list(COLOURS)
        if colours[item.colour] == 1:
            yield _free("attribute", f"Which shape is {item.colour}?", item.shape, sightings(item)), OBJECT_SHAPES


def _ask_existence(world: World, rng: np.random.Generator) -> _Possible:
    there = {(colour, item.shape): item for item in world.objects for colour in item.colours}
    if rng.random() < 0.5:
        (colour, shape), item = list(there.items())[rng.integers(len(there))]
        stretch = (None, item.changes_at) if colour == item.colour else (item.changes_at, None)
        text = f"Is there {with_article(colour)} {shape} in the video?"
        yield _free("existence", text, "Yes", sightings(item, *stretch)), ["No"]
    else:
        every = [(colour, shape) for colour in COLOURS for shape in OBJECT_SHAPES if (colour, shape) not in there]
        # Half of these differ from a shape that is there by the colour alone.
        shown = {shape for _, shape in there}
        similar = [(colour, shape) for colour, shape in every if shape in shown]
        absent = similar if similar and rng.random() < 0.5 else every
        colour, shape = absent[rng.integers(len(absent))]
        yield _free("existence", f"Is there {with_article(colour)} {shape} in the video?", "No"), ["Yes"]


def _ask_direction(world: World, rng: np.random.Generator) -> _Possible:
    for item in world.objects:
        if item.direction is not None:
            text = f"In which direction does the {item.name} move?"
            yield _free("direction", text, item.direction, sightings(item)), list(DIRECTIONS)


def _ask_when(world: World, rng: np.random.Generator) -> _Possible:
    seconds = range(world.seconds)
    for item in world.objects:
        came, went = item.appears_at, item.vanishes_at
        text = f"At which second does the {item.name} appear?"
        yield _free("when", text, str(came), sightings(item, came, came + 1)), [str(second) for second in seconds]
        if went < world.seconds:
            text = f"At which second does the {item.name} vanish?"
            yield _free("when", text, str(went), sightings(item, went - 1, went)), [str(second) for second in seconds]


def _ask_change(world: World, rng: np.random.Generator) -> _Possible:
    for item in world.objects:
        if item.later_colour is not None:
            text = f"What colour does the {item.name} turn into?"
            wrong = [colour for colour in COLOURS if colour != item.colour]
            yield _free("change", text, item.later_colour, sightings(item, item.changes_at)), wrong


def _ask_count(world: World, rng: np.random.Generator) -> _Possible:
    numbers = [str(number) for number in range(1, 7)]
    groups = collections.defaultdict(list)
    for item in world.objects:
        groups[plural(item.shape)].append(item)
    for colour in COLOURS:
        ever = [item for item in world.objects if colour in item.colours]
        if ever and all(item.later_colour is None for item in ever):
            groups[f"{colour} objects"] = ever
    for name, items in groups.items():
        # More than one is rarer and more telling: asked as often as all the rest together.
        for _ in range(1 if len(items) == 1 else 3):
            text = f"How many {name} are there in the video?"
            yield _free("count", text, str(len(items)), *map(sightings, items)), numbers


def _ask_order(world: World, rng: np.random.Generator) -> _Possible:
    for index, first in enumerate(world.objects):
        for second in world.objects[index + 1 :]:
            if first.appears_at < second.appears_at:
                named, then = (first, second) if rng.random() < 0.5 else (second, first)
                text = f"Which object appears first, the {named.name} or the {then.name}?"
                starts = [sightings(item, item.appears_at, item.appears_at + 1) for item in (first, second)]
                yield _free("order", text, first.name, *starts), [second.name]


NEVER_SHOWN = "Which colour is never in the video?"


def _ask_summary(world: World, rng: np.random.Generator) -> _Possible:
    everything = [sightings(item) for item in world.objects]
    number = len(world.objects)
    yield (
        _free("summary", "How many objects are there in the video?", str(number), *everything),
        [str(other) for other in range(max(1, number - 3), number + 4)],
    )
    shown = {colour for item in world.objects for colour in item.colours}
    missing = sorted(set(COLOURS) - shown)
    if missing and len(shown) >= len(LETTERS) - 1:
        yield _free("summary", NEVER_SHOWN, missing[rng.integers(len(missing))], *everything), sorted(shown)
    names = [item.name for item in world.objects]
    yield _free("summary", "Name all objects of the video in order.", ", ".join(names), *everything), ()


_ASK: dict[str, Callable[[World, np.random.Generator], _Possible]] = {
    "attribute": _ask_attribute,
    "existence": _ask_existence,
    "direction": _ask_direction,
    "when": _ask_when,
    "change": _ask_change,
    "count": _ask_count,
    "order": _ask_order,
    "summary": _ask_summary,
}


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def with_article(name: str) -> str:
    return ("an " if name[0] in "aeiou" else "a ") + name


# --------------------------------------------------------------------------------------------------------------------
# Dense supervision
# --------------------------------------------------------------------------------------------------------------------


def caption(world: World) -> Question:
    """Everything that happens, one sentence per object, in the order in which they appear."""
    text = " ".join(_describe(item, world.seconds) for item in world.objects)
    return _free("caption", "Describe the video.", text, *map(sightings, world.objects))


def _describe(item: WorldObject, seconds: int) -> str:
    parts = [f"{with_article(item.name).capitalize()} appears at second {item.appears_at}"]
    if item.direction is not None:
        parts.append(f"moves {item.direction}")
    if item.later_colour is not None:
        parts.append(f"turns {item.later_colour} at second {item.changes_at}")
    parts.append(f"vanishes at second {item.vanishes_at}" if item.vanishes_at < seconds else "stays")
    return ", ".join(parts[:-1]) + f" and {parts[-1]}."


def moment(world: World, second: int) -> Question:
    """What is visible during one second and how it moves, which teaches times and names before anything else."""
    items = sorted(world.visible(second), key=lambda item: (item.colour_at(second), item.shape))
    named = [
        with_article(f"{item.colour_at(second)} {item.shape}") + (f" moving {item.direction}" if item.direction else "")
        for item in items
    ]
    answer = " and ".join(named) if named else "nothing"
    evidence = [sightings(item, second, second + 1) for item in items]
    return _free("moment", f"What is there at second {second}?", answer, *evidence)


# --------------------------------------------------------------------------------------------------------------------
# Evidence
# --------------------------------------------------------------------------------------------------------------------


def evidence_tokens(question: Question, grid: tuple[int, int, int], seconds_per_grid: float = 1.0) -> list[np.ndarray]:
    """
    The visual tokens that hold a question's answer.

    Args:
        question: with its evidence.
        grid: (time, height, width) of the video's visual tokens.
        seconds_per_grid: seconds of video per step of the grid.

    Returns:
        per needle `[k]` int64, ascending indices among the `time * height * width` tokens; any one of them will do.
    """
    return [sighting_tokens(needle, grid, seconds_per_grid) for needle in question.evidence]


def needle_recall(kept_indices: Sequence[int], needles: Sequence[np.ndarray]) -> float | None:
    """Share of the needles of which a token was kept; `None` where a question has none."""
    kept = np.asarray(kept_indices)
    return float(np.mean([np.isin(needle, kept).any() for needle in needles])) if needles else None


# --------------------------------------------------------------------------------------------------------------------
# On disk
# --------------------------------------------------------------------------------------------------------------------


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
