"""What a video teacher is asked, whichever it is: to choose an option, or to answer in words."""

import math
import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..data.records import LETTERS
from .engine import Ledger
from .replies import Reply, strip_thoughts

Scoring = Literal["logprob", "letter"]

FREE_ANSWER = "Answer in one or two short sentences."

_LETTER = re.compile(
    r"^\W*(?:the\s+)?(?:(?:correct|right|best)\s+)?(?:answer|option|choice)?\W*(?:is)?\W*([A-D])(?!\w)", re.I
)
_ONLY_LETTER = re.compile(r"(?<!\w)([A-D])(?!\w)")


@dataclass(frozen=True)
class Question:
    """
    Args:
        text: what is asked, with the options where there are any.
        query: the question without its options.
        video: a file, a folder of frames or an address; `None` to have it guessed.
        fps: of a folder, the rate at which its frames were taken; of a file, frames to look at per second.
        seed: of the sampling.
    """

    text: str
    query: str
    video: str | None
    fps: float | None
    seed: int


@dataclass(frozen=True)
class Verdict:
    """
    Args:
        letter: of the option that was chosen; `None` where none can be told.
        shares: of the probability, by letter, where log-probabilities were scored.
        said: the reply, where its letter was read.
    """

    letter: str | None
    shares: Mapping[str, float]
    said: str = ""

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


def read_letter(text: str) -> str | None:
    """
    The one letter that a reply names: at its start ("B", "(b) red", "The answer is B."), or anywhere if it is the only
    one.
    """
    text = strip_thoughts(text)
    if found := _LETTER.match(text):
        # "a" before a word is an article: "A dog" names no option, "A. dog" does.
        article = found[1] in "aA" and re.match(r"\s+\w", text[found.end() :])
        if not article:
            return found[1].upper()
    letters = set(_ONLY_LETTER.findall(text)) - ({"A"} if re.search(r"\bA\s+[a-z]", text) else set())
    return letters.pop() if len(letters) == 1 else None


def share_out(logprobs: Mapping[str, float]) -> Verdict:
    """The verdict of log-probabilities by letter; letters that are missing have none."""
    if not logprobs:
        return Verdict(None, {})
    most = max(logprobs.values())
    weights = {letter: math.exp(logprobs[letter] - most) if letter in logprobs else 0.0 for letter in LETTERS}
    shares = {letter: weight / sum(weights.values()) for letter, weight in weights.items()}
    return Verdict(max(LETTERS, key=shares.__getitem__), shares)


__all__ = ["FREE_ANSWER", "Question", "Scoring", "Teacher", "Verdict", "read_letter", "share_out"]
