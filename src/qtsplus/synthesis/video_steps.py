"""QTS-VSCQ2 and QTS-VQA: what a video teacher is asked, and which questions and answers are kept."""

import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..data.records import LETTERS, Answer, Choice
from .engine import Item, Ledger, Result

FREE_ANSWER = "Answer in one or two short sentences."

_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.S)
_LETTER = re.compile(
    r"^\W*(?:the\s+)?(?:(?:correct|right|best)\s+)?(?:answer|option|choice)?\W*(?:is)?\W*([A-D])(?!\w)", re.I
)
_ONLY_LETTER = re.compile(r"(?<!\w)([A-D])(?!\w)")
# Chinese and Japanese put no spaces between words: there a sign is as good as a word.
_SIGNS = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_SIGNS}]|[^\W{_SIGNS}]+")
_RUN = 4  # words that stand together
_LEAST_NEW = 0.6  # of the runs of an answer


@dataclass(frozen=True)
class Question:
    """What a video teacher is asked."""

    text: str  # with the options where there are any
    query: str  # without them
    video: str | None  # a file, a folder of frames or an address; `None` to have it guessed
    fps: float | None  # of a folder, the rate at which its frames were taken; of a file, frames to look at per second
    seed: int


@dataclass(frozen=True)
class Reply:
    """What a teacher said."""

    text: str
    complete: bool  # it ended by itself, not at the most tokens that it may say


@dataclass(frozen=True)
class Verdict:
    """The option that a teacher chose."""

    letter: str | None  # `None` where none can be told
    shares: Mapping[str, float]  # of the probability, by letter, where log-probabilities were scored
    said: str = ""  # the reply, where its letter was read

    def row(self) -> dict[str, Any]:
        """As a line of a file has it."""
        shares = {letter: round(share, 4) for letter, share in self.shares.items()}
        return {"letter": self.letter, **({"shares": shares} if shares else {"said": self.said})}


class Teacher(AbstractAsyncContextManager[Any], Protocol):
    """Raises `ItemFailed` where a video cannot be read."""

    def settings(self) -> dict[str, Any]:
        """All that decides what it says."""

    async def choose(self, question: Question, ledger: Ledger) -> Verdict:
        """The option that it holds for right."""

    async def answer(self, question: Question, ledger: Ledger) -> Reply:
        """What it answers in words."""


@dataclass(frozen=True)
class Screen:
    """
    The step from a [`Choice`] to one that the teacher has confirmed.

    What it answers wrong is dropped as "wrong", a reply without a letter as "no letter", and, with `drop_guessable`,
    what it answers right without the video as "guessable". By luck alone that is one question in four.
    """

    teacher: Teacher
    find: Callable[[str], str]  # where a video lies, by its `vision_id`
    drop_guessable: bool = False  # ask a second time, without the video

    def settings(self) -> dict[str, Any]:
        return {**self.teacher.settings(), "drop_guessable": self.drop_guessable}

    async def __call__(self, item: Item, ledger: Ledger) -> Result:
        choice: Choice = item.record
        video = self.find(choice.vision_id)
        question = Question(choice.prompt(), choice.question, video, choice.fps, item.seed)
        seen = await self.teacher.choose(question, ledger)
        dropped = {**choice.row(), "seen": seen.row()}
        if seen.letter is None:
            return Result(dropped=[{**dropped, "reason": "no letter"}])
        if seen.letter != choice.answer:
            return Result(dropped=[{**dropped, "reason": f"wrong: {seen.letter} for {choice.answer}"}])
        if self.drop_guessable:
            guess = await self.teacher.choose(replace(question, video=None), ledger)
            if guess.letter == choice.answer:
                return Result(dropped=[{**dropped, "guessed": guess.row(), "reason": "guessable"}])
        return Result(kept=[choice.row()])


@dataclass(frozen=True)
class WriteAnswers:
    """The step from a [`Choice`] to an [`Answer`]."""

    teacher: Teacher  # is asked without the options
    find: Callable[[str], str]  # where a video lies, by its `vision_id`
    most_words: int = 80  # of an answer that is kept

    def settings(self) -> dict[str, Any]:
        return {**self.teacher.settings(), "most_words": self.most_words}

    async def __call__(self, item: Item, ledger: Ledger) -> Result:
        choice: Choice = item.record
        video = self.find(choice.vision_id)
        question = Question(choice.question, choice.question, video, choice.fps, item.seed)
        reply = await self.teacher.answer(question, ledger)
        text = strip_thoughts(reply.text)
        shared = choice.model_dump(
            include={"vision_id", "id", "fps", "question", "type", "difficulty"}, exclude_none=True
        )
        reason = find_fault(text, self.most_words) if reply.complete else "cut off"
        if reason is not None:
            return Result(dropped=[{**shared, "answer": text, "reason": reason}])
        return Result(kept=[Answer(**shared, answer=text).row()])


def find_fault(text: str, most_words: int) -> str | None:
    """Why an answer is not kept: a kind of fault, a colon, and what is particular. `None` for a good one."""
    words = _WORD.findall(text.casefold())
    if not 1 <= len(words) <= most_words:
        return f"too {'long' if words else 'short'}: {len(words)} words"
    runs = [tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)]
    if runs and len(set(runs)) < _LEAST_NEW * len(runs):
        return "repeats itself"
    return None


def strip_thoughts(text: str) -> str:
    """A reply without what its model thought aloud."""
    return _THOUGHT.sub("", text).strip()


def read_letter(text: str) -> str | None:
    """The one letter that a reply names: at its start ("(b) red", "The answer is B."), or the only one anywhere."""
    text = strip_thoughts(text)
    if match := _LETTER.match(text):
        # "a" before a word is an article: "A dog" names no option, "A. dog" does.
        is_article = match[1] in "aA" and re.match(r"\s+\w", text[match.end() :])
        if not is_article:
            return match[1].upper()
    letters = set(_ONLY_LETTER.findall(text)) - ({"A"} if re.search(r"\bA\s+[a-z]", text) else set())
    return letters.pop() if len(letters) == 1 else None


def share_out(logprobs: Mapping[str, float]) -> Verdict:
    """The verdict of log-probabilities by letter."""
    most = max(logprobs.values())
    weights = {letter: math.exp(logprobs[letter] - most) for letter in LETTERS}
    shares = {letter: weight / sum(weights.values()) for letter, weight in weights.items()}
    return Verdict(max(LETTERS, key=shares.__getitem__), shares)
