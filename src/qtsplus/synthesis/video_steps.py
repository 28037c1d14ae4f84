"""QTS-VSCQ2 and QTS-VQA: what is asked about videos, and which of the questions and answers are kept."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..data.records import Answer, Choice
from .engine import Item, Ledger, Result
from .replies import strip_thoughts
from .video_teachers import Question, Teacher

# Chinese and Japanese put no spaces between words: there a sign is as good as a word.
_SIGNS = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_SIGNS}]|[^\W{_SIGNS}]+")
_RUN = 4  # words that stand together
_LEAST_NEW = 0.6  # of the runs of an answer


@dataclass(frozen=True)
class Screen:
    """
    The step from a [`Choice`] to one that the teacher has confirmed.

    What it answers wrong is dropped as "wrong", a reply without a letter as "no letter", and, with `drop_guessable`,
    what it answers right without the video as "guessable". By luck alone that is one question in four.

    Args:
        teacher: sees the videos.
        find: where a video lies, by its `vision_id`.
        drop_guessable: ask a second time, without the video.
    """

    teacher: Teacher
    find: Callable[[str], str]
    drop_guessable: bool = False

    def settings(self) -> dict[str, Any]:
        """All that decides the verdicts beside the questions."""
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
            guessed = await self.teacher.choose(replace(question, video=None), ledger)
            if guessed.letter == choice.answer:
                return Result(dropped=[{**dropped, "guessed": guessed.row(), "reason": "guessable"}])
        return Result(kept=[choice.row()])


@dataclass(frozen=True)
class WriteAnswers:
    """
    The step from a [`Choice`] to an [`Answer`].

    Args:
        teacher: sees the videos. It is asked without the options.
        find: where a video lies, by its `vision_id`.
        fewest_words, most_words: of an answer that is kept.
    """

    teacher: Teacher
    find: Callable[[str], str]
    fewest_words: int = 1
    most_words: int = 80

    def __post_init__(self) -> None:
        if not 1 <= self.fewest_words <= self.most_words:
            raise ValueError(
                f"Answers of {self.fewest_words} to {self.most_words} words: expected at least 1, in order."
            )

    def settings(self) -> dict[str, Any]:
        """All that decides the answers beside the questions."""
        return {**self.teacher.settings(), "words": [self.fewest_words, self.most_words]}

    async def __call__(self, item: Item, ledger: Ledger) -> Result:
        choice: Choice = item.record
        video = self.find(choice.vision_id)
        question = Question(choice.question, choice.question, video, choice.fps, item.seed)
        reply = await self.teacher.answer(question, ledger)
        text = strip_thoughts(reply.text)
        shared = choice.model_dump(
            include={"vision_id", "id", "fps", "question", "type", "difficulty"}, exclude_none=True
        )
        reason = find_fault(text, self.fewest_words, self.most_words) if reply.complete else "cut off"
        if reason is not None:
            return Result(dropped=[{**shared, "answer": text, "reason": reason}])
        return Result(kept=[Answer(**shared, answer=text).row()])


def find_fault(text: str, fewest_words: int, most_words: int) -> str | None:
    """Why an answer is not kept: a kind of fault, a colon, and what is particular. `None` for a good one."""
    words = _WORD.findall(text.casefold())
    if len(words) < fewest_words:
        return f"too short: {len(words)} words"
    if len(words) > most_words:
        return f"too long: {len(words)} words"
    runs = [tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)]
    if runs and len(set(runs)) < _LEAST_NEW * len(runs):
        return "repeats itself"
    return None


__all__ = ["Screen", "WriteAnswers", "find_fault"]
