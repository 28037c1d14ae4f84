"""QTS-VQA: free answers of a video teacher to kept questions; what is cut off, too long or repetitive stays out."""

import re
from collections.abc import Callable
from dataclasses import dataclass
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


__all__ = ["WriteAnswers", "find_fault"]
