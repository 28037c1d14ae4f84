"""What can be asked about a crowded world: many questions about one video, none of which looks where another looks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qtsplus.evaluation.labelled import Sighting

from .crowd import CROWD_COLOURS, MARKS, NAMES, Crowd, CrowdObject
from .questions import Question, add_options, plural, with_article
from .scene import CELL, DIRECTIONS, GRID, OBJECT_SHAPES, sightings

# Of each kind how many, as far as a video allows; those that need most come first.
CROWD_PLAN = {"relation": 3, "order": 1, "direction": 1, "count": 1, "when": 2, "attribute": 6, "existence": 2}

# From so many objects at a time on, no single word may say who is meant; with fewer that could not be.
CROWDED = 18

_BESIDE = {"left": -1, "right": 1}


class _Seen(NamedTuple):
    """An object that must be seen, between two seconds of its life (`None`: all of it)."""

    item: CrowdObject
    start: int | None = None
    end: int | None = None


class _Candidate(NamedTuple):
    """Something that could be asked: a text, its answer, wrong ones, and what must be seen to know."""

    text: str
    answer: str
    wrong: Sequence[str]
    needles: tuple[_Seen, ...] = ()

    def question(self, kind: str) -> Question:
        evidence: tuple[tuple[Sighting, ...], ...] = tuple(sightings(*needle) for needle in self.needles)
        return Question(self.text, self.answer, None, self.text, kind, evidence)


def crowd_questions(
    world: Crowd, rng: np.random.Generator, multiple_choice: float = 0.5, plan: Mapping[str, int] = CROWD_PLAN
) -> list[Question]:
    """
    Questions about a crowd; by the usual plan up to sixteen.

    No two of them need the same object, so no two need the same token.

    Args:
        world: what to ask about.
        rng: draws the objects, the wording and the options.
        multiple_choice: share of the questions that come with options.
        plan: how many of each kind, as far as the video allows.
    """
    view = _View.of(world)
    asked: list[Question] = []
    used: set[CrowdObject] = set()
    for kind, count in plan.items():
        for _ in range(count):
            drawn = _draw(view, kind, used, {question.query for question in asked}, rng)
            if drawn is None:
                break
            used.update(needle.item for needle in drawn.needles)
            question = drawn.question(kind)
            asked.append(add_options(question, drawn.wrong, rng) if rng.random() < multiple_choice else question)
    return asked


def _draw(
    view: "_View", kind: str, used: set[CrowdObject], texts: set[str], rng: np.random.Generator
) -> _Candidate | None:
    """One question of a kind about objects that are not used yet; every form and every answer is as likely."""
    forms = _FORMS[kind]
    for index in rng.permutation(len(forms)):
        by_answer: dict[str, list[_Candidate]] = {}
        for candidate in forms[index](view):
            if candidate.text not in texts and not used.intersection(needle.item for needle in candidate.needles):
                by_answer.setdefault(candidate.answer, []).append(candidate)
        if by_answer:
            chosen = list(by_answer.values())[rng.integers(len(by_answer))]
            return chosen[rng.integers(len(chosen))]
    return None


# --------------------------------------------------------------------------------------------------------------------
# Who can be named
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """
    A world as its questions see it.

    Attributes:
        named, with_mark, coloured: the objects that their colour and shape, their shape and mark, or their colour and
            mark tell from all others of the video, where neither word does at any second of their life.
        cells: `[seconds, GRID, GRID]`, the index of the object in each cell, or -1.
    """

    world: Crowd
    named: list[CrowdObject]
    with_mark: list[CrowdObject]
    coloured: list[CrowdObject]
    cells: np.ndarray

    @classmethod
    def of(cls, world: Crowd) -> "_View":
        objects = world.objects
        seconds = np.arange(world.seconds)
        alive = np.array([(item.appears_at <= seconds) & (seconds < item.vanishes_at) for item in objects])
        words = {name: np.array([getattr(item, name) for item in objects]) for name in ("colour", "shape", "mark")}
        same = {name: column[:, None] == column[None] for name, column in words.items()}
        crowded = alive[:, 0].sum() >= CROWDED

        def has_twins(name: str) -> np.ndarray:
            others = (same[name] & ~np.eye(len(objects), dtype=bool)).astype(int) @ alive
            return (others.astype(bool) | ~alive).all(axis=1) | (not crowded)

        def told_by(one: str, other: str) -> list[CrowdObject]:
            unique = (same[one] & same[other]).sum(axis=1) == 1
            return [objects[index] for index in np.flatnonzero(unique & has_twins(one) & has_twins(other))]

        cells = np.full((world.seconds, GRID, GRID), -1)
        for index, item in enumerate(objects):
            for second in range(item.appears_at, item.vanishes_at):
                left, top, right, bottom = item.box_at(second)
                cells[second, (top + bottom) // 2 // CELL, (left + right) // 2 // CELL] = index
        return cls(
            world,
            named=told_by("colour", "shape"),
            with_mark=told_by("shape", "mark"),
            coloured=told_by("colour", "mark"),
            cells=cells,
        )


# --------------------------------------------------------------------------------------------------------------------
# What can be asked
# --------------------------------------------------------------------------------------------------------------------

_Possible = Iterator[_Candidate]


def _ask_mark(view: _View) -> _Possible:
    for item in view.named:
        yield _Candidate(f"What is in the {item.name}?", item.mark, MARKS, (_Seen(item),))


def _ask_colour(view: _View) -> _Possible:
    for item in view.with_mark:
        text = f"What colour is the {item.shape} with the {item.mark}?"
        yield _Candidate(text, item.colour, tuple(CROWD_COLOURS), (_Seen(item),))


def _ask_shape(view: _View) -> _Possible:
    for item in view.coloured:
        text = f"What shape is the {item.colour} object with the {item.mark}?"
        yield _Candidate(text, item.shape, OBJECT_SHAPES, (_Seen(item),))


def _ask_existence(view: _View) -> _Possible:
    for item in view.named:
        text = f"Is there {with_article(item.colour)} {item.shape} in the video?"
        yield _Candidate(text, "Yes", ("No",), (_Seen(item),))
    there = {(item.colour, item.shape) for item in view.world.objects}
    colours, shapes = ({name[part] for name in there} for part in (0, 1))
    for colour, shape in NAMES:
        # Both words are true of something.
        if (colour, shape) not in there and colour in colours and shape in shapes:
            yield _Candidate(f"Is there {with_article(colour)} {shape} in the video?", "No", ("Yes",))


def _ask_appearance(view: _View) -> _Possible:
    for item in view.named:
        if came := item.appears_at:
            text = f"At which second does the {item.name} appear?"
            yield _Candidate(text, str(came), _numbers(view.world.seconds), (_Seen(item, came, came + 1),))


def _ask_vanishing(view: _View) -> _Possible:
    for item in view.named:
        if (went := item.vanishes_at) < view.world.seconds:
            text = f"At which second does the {item.name} vanish?"
            yield _Candidate(text, str(went), _numbers(view.world.seconds), (_Seen(item, went - 1, went),))


def _ask_direction(view: _View) -> _Possible:
    for item in view.named:
        if item.direction is not None:
            text = f"In which direction does the {item.name} move?"
            yield _Candidate(text, item.direction, tuple(DIRECTIONS), (_Seen(item),))


def _ask_count(view: _View) -> _Possible:
    for second in range(view.world.seconds):
        visible = [item for item in view.world.objects if item.is_visible(second)]
        groups = [
            (f"{colour} objects", [item for item in visible if item.colour == colour]) for colour in CROWD_COLOURS
        ]
        groups += [(plural(shape), [item for item in visible if item.shape == shape]) for shape in OBJECT_SHAPES]
        for name, items in groups:
            # More than five would leave too few objects to the other questions.
            if 0 < len(items) < 6:
                text = f"How many {name} are there at second {second}?"
                needles = tuple(_Seen(item, second, second + 1) for item in items)
                yield _Candidate(text, str(len(items)), _numbers(7)[1:], needles)


def _ask_order(view: _View) -> _Possible:
    for one in view.named:
        for other in view.named:
            if one.appears_at != other.appears_at:  # each pair both ways round
                first = min(one, other, key=lambda item: item.appears_at)
                text = f"Which object appears first, the {one.name} or the {other.name}?"
                needles = tuple(_Seen(item, item.appears_at, item.appears_at + 1) for item in (one, other))
                yield _Candidate(text, first.name, (one.name, other.name), needles)


def _ask_after(view: _View) -> _Possible:
    for shape in OBJECT_SHAPES:
        alike = [item for item in view.world.objects if item.shape == shape]
        for item in view.named:
            later = [other for other in alike if other.appears_at > item.appears_at]
            soonest = [other for other in later if other.appears_at == min(o.appears_at for o in later)]
            if len(soonest) == 1:
                text = f"What colour is the first {shape} to appear after the {item.name}?"
                needles = (_Seen(item), _Seen(soonest[0]))
                yield _Candidate(text, soonest[0].colour, tuple(CROWD_COLOURS), needles)


def _ask_beside(view: _View) -> _Possible:
    for item in view.named:
        x, y = (int(along) // CELL for along in item.start)
        for side, step in _BESIDE.items():
            if item.direction is not None or not 0 <= x + step < GRID:
                continue
            beside = view.cells[item.appears_at : item.vanishes_at, y, x + step]
            found = set(beside[beside >= 0].tolist())
            other = view.world.objects[found.pop()] if len(found) == 1 else None
            if other is None or other.direction is not None:
                continue
            both = max(item.appears_at, other.appears_at), min(item.vanishes_at, other.vanishes_at)
            needles = (_Seen(item, *both), _Seen(other, *both))
            place = f"the object to the {side} of the {item.name}?"
            yield _Candidate(f"What is in {place}", other.mark, MARKS, needles)
            yield _Candidate(f"What colour is {place}", other.colour, tuple(CROWD_COLOURS), needles)


def _numbers(stop: int) -> list[str]:
    return [str(number) for number in range(stop)]


_FORMS: dict[str, tuple[Callable[[_View], _Possible], ...]] = {
    "attribute": (_ask_mark, _ask_colour, _ask_shape),
    "existence": (_ask_existence,),
    "when": (_ask_appearance, _ask_vanishing),
    "direction": (_ask_direction,),
    "count": (_ask_count,),
    "order": (_ask_order,),
    "relation": (_ask_after, _ask_beside),
}


__all__ = ["CROWD_PLAN", "crowd_questions"]
