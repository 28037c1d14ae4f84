"""What can be asked about a world without a grid, and the visual tokens that hold each answer: one, or a hundred."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .open_tokens import Shown
from .openworld import OPEN_COLOURS, OpenWorld, Thing, crossing_frame
from .scene import FPS, with_article

# Of each kind how many, as far as a video allows.
OPEN_PLAN = {"mark": 4, "existence": 4, "stay": 6, "colours": 2, "crossing": 2, "order": 1}
# How each kind is asked: in tests the first way, in training any. The last is never trained, but all of its words are.
WORDINGS = {
    "mark": (
        "What is in the {}?",
        "What mark is in the {}?",
        "Which mark can be seen in the {}?",
        "What does the {} have in it?",
        "Which mark does the {} have?",
        "What mark does the {} have?",
    ),
    "existence": ("Is there {}?", "Is {} there?", "Does {} come?", "Can you see {}?", "Can {} be seen?"),
    "stay": (
        "How long is the {} there?",
        "How long does the {} stay?",
        "For how long is the {} there?",
        "How long can the {} be seen?",
        "For how long does the {} stay?",
    ),
    "colours": (
        "Which colours does the {} take?",
        "What colours does the {} take?",
        "Which colours does the {} have?",
        "Which colours does the {} have in turn?",
        "What colours does the {} have?",
    ),
    "crossing": (
        "What crosses the middle {}?",
        "Which thing crosses the middle {}?",
        "What is {} to cross the middle?",
        "What comes through the middle {}?",
        "Which thing is {} to cross the middle?",
    ),
    "order": (
        "Which colours cross the middle, in order?",
        "What colours cross the middle, in order?",
        "In which order do colours cross the middle?",
        "Which colours come through the middle, in turn?",
        "In which order do colours come through the middle?",
    ),
}
LEAST_SEEN = 300  # pixels of a thing over its whole life, for it to be asked about


@dataclass(frozen=True)
class OpenQuestion:
    """
    A question about a video.

    Attributes:
        kind: one of [`OPEN_PLAN`].
        text, answer: what is asked, and the whole of what is to be said.
        needles: the visual tokens, ascending, that hold what decides the answer; none where the answer is that there is
            no such thing.
        looks: for the words of the answer in turn the tokens that show what is said, as far as that is more than the
            needles tell.
    """

    kind: str
    text: str
    answer: str
    needles: tuple[int, ...]
    looks: tuple[tuple[int, ...], ...] = ()


def open_questions(
    world: OpenWorld, shown: Shown, rng: np.random.Generator, plan: Mapping[str, int] = OPEN_PLAN
) -> list[OpenQuestion]:
    """
    Questions about a world, of each kind in rounds in which every answer that the world has comes once.

    Args:
        world, shown: see [`count_pixels`].
        rng: draws what is asked.
        plan: how many of each kind.
    """
    asked: list[OpenQuestion] = []
    for kind, count in plan.items():
        by_answer: dict[str, list[OpenQuestion]] = {}
        for question in _KINDS[kind](world, shown):
            by_answer.setdefault(question.answer, []).append(question)
        answers = sorted(by_answer)
        answers = [answers[index] for index in rng.permutation(len(answers))]
        rounds = min(map(len, by_answer.values()), default=0)
        for number in range(min(count, rounds * len(answers))):
            questions = by_answer[answers[number % len(answers)]]
            asked.append(questions.pop(int(rng.integers(len(questions)))))
    return asked


def in_words(kind: str, text: str, number: int) -> str:
    """A question of a kind, asked in the first of [`WORDINGS`], in another one."""
    before, _, behind = WORDINGS[kind][0].partition("{}")
    name = text.removeprefix(before).removesuffix(behind)
    return WORDINGS[kind][number].format(name)


def in_any_words(kind: str, text: str, rng: np.random.Generator) -> str:
    """The same in any wording that is trained, one of eight in lower case."""
    said = in_words(kind, text, int(rng.integers(len(WORDINGS[kind]) - 1)))
    return said.lower() if rng.random() < 0.125 else said


def _plain(world: OpenWorld, shown: Shown) -> Iterator[tuple[int, Thing]]:
    """The things of one colour that can be seen well enough."""
    for number, thing in enumerate(world.things):
        if not thing.changes and shown.bodies[number].sum() >= LEAST_SEEN:
            yield number, thing


def _marks(world: OpenWorld, shown: Shown) -> Iterator[OpenQuestion]:
    for number, thing in _plain(world, shown):
        if thing.mark is not None:
            yield OpenQuestion(
                "mark", f"What is in the {thing.name}?", thing.mark, tuple(shown.needle(number).tolist())
            )


def _existence(world: OpenWorld, shown: Shown) -> Iterator[OpenQuestion]:
    changing = {thing.shape for thing in world.things if thing.changes}
    shapes = sorted({thing.shape for thing in world.things} - changing)
    there = {thing.name for thing in world.things}
    for number, thing in _plain(world, shown):
        yield OpenQuestion(
            "existence", f"Is there {with_article(thing.name)}?", "Yes", tuple(shown.needle(number).tolist())
        )
    for name in (f"{colour} {shape}" for colour in OPEN_COLOURS for shape in shapes):
        if name not in there:
            yield OpenQuestion("existence", f"Is there {with_article(name)}?", "No", ())


def _stays(world: OpenWorld, shown: Shown) -> Iterator[OpenQuestion]:
    for number, thing in _plain(world, shown):
        stay = world.stay(thing)
        if stay is not None and world.seconds > 2:
            text = f"How long is the {thing.name} there?"
            yield OpenQuestion("stay", text, stay, tuple(shown.needle(number).tolist()))


def _colours(world: OpenWorld, shown: Shown) -> Iterator[OpenQuestion]:
    """The thing that changes is the only one of its shape."""
    for number, thing in enumerate(world.things):
        if thing.changes:
            edges = (thing.start, *thing.changes, thing.stop)
            # The first step that shows a colour alone, and what is left of its time.
            spans = [slice(-(-start // FPS), stop // FPS) for start, stop in zip(edges, edges[1:], strict=False)]
            looks = tuple(tuple(shown.needle(number, slice(span.start, span.start + 1)).tolist()) for span in spans)
            text = f"Which colours does the {thing.shape} take?"
            yield OpenQuestion("colours", text, " ".join(thing.colours), tuple(shown.needle(number).tolist()), looks)


def _crossers(world: OpenWorld, shown: Shown) -> list[tuple[int, Thing, tuple[int, ...]]]:
    """What crosses the middle, in order: the second, the thing, and its tokens then."""
    crossings = []
    for number, thing in enumerate(world.things):
        frame = crossing_frame(thing, world)
        if frame is not None:
            steps = slice((frame - 1) // FPS, frame // FPS + 1)
            crossings.append((frame, thing, tuple(shown.needle(number, steps).tolist())))
    crossings.sort(key=lambda crossing: crossing[0])
    return [(frame // FPS, thing, tokens) for frame, thing, tokens in crossings]


def _crossings(world: OpenWorld, shown: Shown) -> Iterator[OpenQuestion]:
    crossers = _crossers(world, shown)
    if len(crossers) > 1 and crossers[0][0] + 1 < crossers[-1][0]:
        needles = tuple(sorted({token for *_, tokens in crossers for token in tokens}))
        for word, (_, thing, tokens) in (("first", crossers[0]), ("last", crossers[-1])):
            yield OpenQuestion("crossing", f"What crosses the middle {word}?", thing.name, needles, (tokens, tokens))


def _orders(world: OpenWorld, shown: Shown) -> Iterator[OpenQuestion]:
    crossers = _crossers(world, shown)
    seconds = [second for second, *_ in crossers]
    colours = [thing.colours[0] for _, thing, _ in crossers]
    apart = all(second + 1 < other for second, other in zip(seconds, seconds[1:], strict=False))
    if len(crossers) == 3 and len(set(colours)) == 3 and apart:
        looks = tuple(tokens for *_, tokens in crossers)
        needles = tuple(sorted({token for tokens in looks for token in tokens}))
        yield OpenQuestion("order", WORDINGS["order"][0], " ".join(colours), needles, looks)


_KINDS: dict[str, Callable[[OpenWorld, Shown], Iterator[OpenQuestion]]] = {
    "mark": _marks,
    "existence": _existence,
    "stay": _stays,
    "colours": _colours,
    "crossing": _crossings,
    "order": _orders,
}

__all__ = ["OPEN_PLAN", "WORDINGS", "OpenQuestion", "in_any_words", "in_words", "open_questions"]
