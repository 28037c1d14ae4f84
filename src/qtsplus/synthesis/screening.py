"""QTS-VSCQ2: keeps the questions that a video teacher answers right, and tells apart those that need no video."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..data.records import Choice
from .engine import Item, Ledger, Result
from .video_teachers import Question, Teacher


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


__all__ = ["Screen"]
