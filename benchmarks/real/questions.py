"""What is asked about a scene: kinds of questions, each in wordings that are trained and in others that never are."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .words import FOOTAGE, KINDS, NAMES, OTHER_KINDS
from .world import Scene, Thing

ALL_KINDS: Final = {**OTHER_KINDS, **KINDS}
ASKED_KINDS = ("animal", "bird", "insect", "food", "fruit", "vegetable", "vehicle", "plant", "building")
HELD_OUT_KINDS = ("sea animal", "furniture", "tool", "musical instrument", "clothing")
CONTENT = {"food": "something to eat", "vehicle": "a means of transport", "animal": "a living creature"}
CONTENT |= {"musical instrument": "something to make music with", "clothing": "something to wear"}

# What else a thing is called: some words are trained, the others never are.
SYNONYMS: Final[Mapping[str, str]] = {
    **{"car": "automobile", "airplane": "plane", "truck": "lorry", "bread": "loaf"},
}
HELD_OUT_SYNONYMS: Final[Mapping[str, str]] = {
    **{"bicycle": "bike", "telephone": "phone", "rabbit": "bunny", "dog": "puppy", "cat": "kitten", "ship": "boat"},
    **{"corn": "maize", "airplane": "aeroplane", "pig": "hog", "clock": "alarm clock", "axe": "hatchet"},
}

_NEVER = [*HELD_OUT_SYNONYMS.values(), *HELD_OUT_KINDS]
_NEVER += [CONTENT[kind] for kind in ("animal", "musical instrument", "clothing")]
OTHER_WORDS: Final = re.compile(rf"\b({'|'.join(_NEVER)})\b")

# {a} is a thing with its article, {t} with "the", {k} a kind, {A} and {B} things with "the". The second are held out.
WORDINGS: Final[Mapping[str, tuple[Sequence[str], Sequence[str]]]] = {
    "present": (
        ["Is there {a}?", "Can you see {a}?", "Does {a} appear?", "Is {a} shown?", "Do you see {a} in the video?"],
        ["Is {a} visible anywhere?", "Did the camera catch {a}?", "Have you spotted {a}?"],
    ),
    "absent": (
        ["Is there no {n}?", "Is {t} missing?", "Is it true that {a} never appears?"],
        ["Is the video without {a}?", "Would you say no {n} is there?"],
    ),
    "kind": (
        ["What {k} is there?", "Which {k} can be seen?", "What {k} appears in the video?", "Name the {k}."],
        ["Tell me which {k} is shown.", "What kind of {k} do we see?"],
    ),
    "some": (
        ["Is there {k}?", "Does {k} appear?", "Can you see {k} in the video?"],
        ["Is {k} anywhere to be found?", "Did you notice {k}?"],
    ),
    "which": (
        ["Which of them is there, {A} or {B}?", "What do you see, {A} or {B}?", "Is it {A} or {B} that appears?"],
        ["{A} or {B}: which one is shown?", "Which one can be seen, {A} or {B}?"],
    ),
    "first": (
        ["Which comes first, {A} or {B}?", "What appears first, {A} or {B}?"],
        ["Which one is seen earlier, {A} or {B}?", "Does {A} or {B} come first?"],
    ),
    "list": (
        ["What can be seen?", "What is in the video?", "Name everything that appears.", "What do you see?"],
        ["List the things that are shown.", "Which things appear?"],
    ),
}
YES_OR_NO = ("present", "absent", "some")  # asked in the same words about what is there and what is not
# What the base and its selector learn beside the first of each; no record to test with has one.
FURTHER: Final[Mapping[str, Sequence[str]]] = {
    "present": ["Is {a} in the video?", "Does the clip show {a}?", "Was {a} filmed?"],
    "absent": [
        *("Is {t} absent from the video?", "Is {t} nowhere to be seen?", "Does the clip lack {a}?"),
        *("Is it right that no {n} appears?", "Does {a} not appear?", "Can it be that there is no {n} here?"),
    ],
    "kind": ["What {k} do you see?", "Which {k} does the clip show?"],
    "some": ["Do you see {k}?", "Does the clip show {k}?", "Is {k} in the video?", "Was {k} filmed?"],
    "which": ["Is {A} or {B} in the video?", "{A} and {B}: only one of them is here. Which?"],
    "first": ["What shows up sooner, {A} or {B}?", "Which was there before the other, {A} or {B}?"],
    "list": ["Summarise the video.", "What happens, in order?", "Describe the clip.", "Tell me what comes and goes."],
}
PLURAL = {"grapes", "cherries", "scissors", "jeans", "gloves", "socks", "glasses", "pancakes", "blueberries"}
PLURAL |= {"spectacles", "trousers", "sweets", "flames", "bones", "sunglasses"}
MASS = {"bread", "cheese", "chocolate", "sushi", "popcorn", "corn", "broccoli", "fire", "candy", "garlic", "spaghetti"}
MASS |= {"soccer", "tennis", "baseball", "basketball", "clothing", "food", "maize", "football", "custard"}


@dataclass(frozen=True)
class Question:
    """
    A question about a scene.

    Attributes:
        kind: a name in [`WORDINGS`].
        about: names of the things that the answer rests on; none for "No".
        other_words: it has a synonym or a kind that is never trained.
        doubtful: the film behind the drawings shows what the answer takes for not there.
    """

    kind: str
    question: str
    answer: str
    about: tuple[str, ...] = ()
    other_words: bool = False
    doubtful: bool = False


def article(word: str) -> str:
    if word in PLURAL or word in MASS:
        return word
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


def join_things(names: Sequence[str]) -> str:
    """ "The dog, the car and the grapes"."""
    listed = [f"the {name}" for name in names]
    text = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    return text[0].upper() + text[1:]


class Asker:
    """
    Asks about one scene.

    Args:
        held_out: with wordings, synonyms and kinds that are never trained.
        names: what may be asked for that is not there.
        further: with [`FURTHER`] wordings too.
    """

    def __init__(
        self,
        scene: Scene,
        rng: np.random.Generator,
        held_out: bool = False,
        names: Sequence[str] = NAMES,
        further: bool = False,
    ) -> None:
        self.scene, self.rng, self.held_out, self.names, self.further = scene, rng, held_out, names, further
        self.things = sorted(scene.things, key=lambda thing: (thing.start, middle(thing, scene)[0]))
        self.shown = {thing.name for thing in self.things}

    def ask(self, kind: str) -> Question | None:
        """One question of a kind, or none where the scene gives none."""
        asks: dict[str, Callable[[], Question | None]] = {
            **{"present": self._present, "absent": self._absent, "kind": self._kind, "some": self._some},
            **{"which": self._which, "first": self._first, "list": self._list},
        }
        return asks[kind]()

    def _pick(self, of: Sequence):
        return of[int(self.rng.integers(len(of)))] if len(of) else None

    def _say(
        self, kind: str, answer: str, about: Sequence[str] = (), missing: Sequence[str] = (), **words: str
    ) -> Question:
        wording = self._pick([*WORDINGS[kind][self.held_out], *(FURTHER.get(kind, ()) if self.further else ())])
        doubtful = bool(FOOTAGE.get(self.scene.film, frozenset()).intersection(missing))
        text = wording.format(**words)
        other = self.held_out and bool(OTHER_WORDS.search(text))
        return Question(kind, self._type(text), answer, tuple(about), other, doubtful)

    def _type(self, text: str) -> str:
        """Now and then in lower case, without its mark, or with two letters in each other's place."""
        if self.rng.random() < 0.15:
            text = text.lower()
        if self.rng.random() < 0.08:
            text = text.rstrip("?.")
        if self.rng.random() < 0.06:
            at = int(self.rng.integers(1, len(text) - 2))
            text = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
        return text

    def _word(self, name: str) -> str:
        """What a question calls a thing."""
        words = HELD_OUT_SYNONYMS if self.held_out else SYNONYMS
        return words[name] if name in words and self.rng.random() < (0.5 if self.held_out else 0.3) else name

    def _absentee(self) -> str:
        """Something that is not there; every other time of a kind that is."""
        near = {kind for name in self.shown for kind in ALL_KINDS[name][:1]}
        others = [name for name in self.names if name not in self.shown]
        alike = [name for name in others if set(ALL_KINDS[name][:1]) & near]
        return str(self._pick(alike if alike and self.rng.random() < 0.5 else others))

    def _present(self, kind: str = "present", answers: Sequence[str] = ("No", "Yes")) -> Question | None:
        is_there = bool(self.things) and self.rng.random() < 0.5
        name = self._pick(self.things).name if is_there else self._absentee()
        word = self._word(name)
        words = {"a": article(word), "n": word, "t": f"the {word}"}
        about, missing = ([name], []) if is_there else ([], [name])
        return self._say(kind, answers[is_there], about, missing, **words)

    def _absent(self) -> Question | None:
        return self._present("absent", ("Yes", "No"))

    def _kind(self) -> Question | None:
        kinds = HELD_OUT_KINDS if self.held_out and self.rng.random() < 0.5 else ASKED_KINDS
        single = [k for k in kinds if sum(k in ALL_KINDS[thing.name] for thing in self.things) == 1]
        if not single:
            return None
        kind = self._pick(single)
        (name,) = (thing.name for thing in self.things if kind in ALL_KINDS[thing.name])
        return self._say("kind", f"The {name}", [name], [kind], k=kind)

    def _some(self) -> Question | None:
        kinds = HELD_OUT_KINDS if self.held_out and self.rng.random() < 0.5 else ASKED_KINDS
        there = [k for k in kinds if any(k in ALL_KINDS[thing.name] for thing in self.things)]
        others = [k for k in kinds if k not in there]
        yes = bool(there) and self.rng.random() < 0.5
        kind = self._pick(there if yes else others)
        if kind is None:
            return None
        words = article(kind)
        if kind in CONTENT and self.rng.random() < 0.4 and (self.held_out or kind not in ("animal", "clothing")):
            words = CONTENT[kind]
        about = [thing.name for thing in self.things if kind in ALL_KINDS[thing.name]]
        return self._say("some", "Yes" if yes else "No", about, [] if yes else [kind, words], k=words)

    def _two(self, kind: str, answer: str, other: str, about: Sequence[str], missing: Sequence[str]) -> Question:
        pair = [f"the {answer}", f"the {other}"]
        self.rng.shuffle(pair)
        return self._say(kind, f"The {answer}", about, missing, A=pair[0], B=pair[1])

    def _which(self) -> Question | None:
        thing = self._pick(self.things)
        other = self._absentee() if thing else ""
        return thing and self._two("which", thing.name, other, [thing.name], [other])

    def _first(self) -> Question | None:
        pairs = [(a, b) for a in self.things for b in self.things if a.start < b.start]
        if not pairs:
            return None
        one, two = self._pick(pairs)
        return self._two("first", one.name, two.name, [one.name, two.name], [one.name, two.name])

    def _list(self) -> Question | None:
        names = [thing.name for thing in self.things]
        return self._say("list", join_things(names), names) if names else None


def middle(thing: Thing, scene: Scene) -> tuple[float, float]:
    """Where the middle of a thing is on average, from 0 to 1 along x and along y."""
    half = (thing.start + thing.stop - 1) / 2 - thing.start
    return tuple(
        (corner + speed * half + thing.side / 2) / along
        for corner, speed, along in zip(thing.corner, thing.speed, scene.size, strict=True)
    )  # type: ignore[return-value]


def ask_scene(
    scene: Scene,
    count: int,
    seed: int,
    held_out: bool = False,
    names: Sequence[str] = NAMES,
    kinds: Sequence[str] = tuple(WORDINGS),
    further: bool = False,
) -> list[Question]:
    """Up to `count` different questions about a scene; the same arguments give the same ones."""
    rng = np.random.default_rng([scene.seed, seed, 3])
    asker, asked = Asker(scene, rng, held_out, names, further), dict[str, Question]()
    for kind in [str(kind) for _ in range(4) for kind in rng.permutation(kinds)]:
        question = asker.ask(kind)
        if question is not None and len(asked) < count:
            asked[question.question] = question
    return list(asked.values())
