"""What can be asked and told about a TinyWorld: questions of eight kinds, captions, moments, and where each is seen."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qtsplus.data.records import LETTERS
from qtsplus.evaluation.labelled import Sighting, sighting_tokens

from .clip import COLOURS
from .scene import DIRECTIONS, OBJECT_SHAPES, World, WorldObject, sightings

POINT_KINDS = ("attribute", "existence", "direction", "when", "change")
WIDE_KINDS = ("count", "order", "relation", "summary")  # "relation" in a crowded world only
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
    One question of every kind that the world allows.

    Args:
        world: what to ask about.
        rng: draws the objects, the wording and the options.
        multiple_choice: share of the questions that come with options.
    """
    asked = []
    for ask in _ASK.values():
        possible = list(ask(world, rng))
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


__all__ = [
    "LETTERS",
    "POINT_KINDS",
    "QUESTION_KINDS",
    "Question",
    "WIDE_KINDS",
    "add_options",
    "caption",
    "evidence_tokens",
    "moment",
    "needle_recall",
    "questions",
]
