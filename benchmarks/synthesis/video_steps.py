"""QTS-VSCQ2 and QTS-VQA: what a video teacher is asked, and which questions and answers are kept."""

import asyncio
import base64
import functools
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from qtsplus.common.files import first_line
from qtsplus.data.media import UNREADABLE
from qtsplus.data.records import Caption, Choice, FreeAnswer, VideoRecord
from qtsplus.model.frames_qtsplus import image_paths, load_frames
from qtsplus.model.sampling_qtsplus import choose_frames

from ..world.clip import read_video
from .endpoint import Endpoint, Reply
from .engine import Item, ItemFailed, Ledger

FREE_ANSWER = "Answer in one or two short sentences."
SUMMARY = "Summarise the video: what happens, in order?"
LISTED = "Write one short sentence for each event, on a line of its own, and nothing else."
LONGEST_SIDE = 640  # of a frame in pixels; larger ones are made smaller
RECENT_VIDEOS = 8  # whose frames are held
MOST_WORDS = 80  # of an answer that is kept

_NUMBER = re.compile(r"^\s*(?:[-*•]|\d{1,3}[.)])\s+")
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.S)
_LETTER = re.compile(
    r"^\W*(?:the\s+)?(?:(?:correct|right|best)\s+)?(?:answer|option|choice)?\W*(?:is)?\W*([A-D])(?!\w)", re.I
)
_ONLY_LETTER = re.compile(r"(?<!\w)([A-D])(?!\w)")
_RUN = 4  # words that stand together
_LEAST_NEW = 0.6  # of the runs of an answer

Part = dict[str, Any]


@dataclass
class VideoTeacher:
    """A model that sees, behind an endpoint, which is sent frames as images."""

    endpoint: Endpoint
    find: Callable[[str], str]  # where a video lies, by its `vision_id`
    frames: int = 16  # evenly spread over the video
    max_tokens: int = 128  # of a reply
    _recent: dict[str, asyncio.Task[list[Part]]] = field(default_factory=dict, repr=False)

    def settings(self) -> dict[str, Any]:
        """What decides the replies, as it is written down."""
        return {**self.endpoint.settings(), "frames": self.frames, "max_tokens": self.max_tokens}

    async def ask(self, video: str, text: str, item: Item, ledger: Ledger) -> Reply:
        """What it says about a video, by its `vision_id`; [`ItemFailed`] where that cannot be read."""
        try:
            parts = await self._parts(self.find(video))
        except UNREADABLE as error:
            ledger.reasons.append(f"The video cannot be read: {first_line(error)}")
            raise ItemFailed from None
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        return await self.endpoint.chat(messages, ledger, max_tokens=self.max_tokens, seed=item.seed)

    async def _parts(self, video: str) -> list[Part]:
        """What is sent of a video; questions about one video stand together, and share it."""
        if video not in self._recent:
            self._recent[video] = asyncio.create_task(asyncio.to_thread(self._read, video))
            while len(self._recent) > RECENT_VIDEOS:
                del self._recent[next(iter(self._recent))]
        return await self._recent[video]

    def _read(self, video: str) -> list[Part]:
        frames = spread_frames(video, self.frames)
        title = f"These are {len(frames)} frames of a video in their order, evenly spread over it."
        parts: list[Part] = [{"type": "text", "text": title}]
        for frame in frames:
            image, data = Image.fromarray(frame), io.BytesIO()
            image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            image.save(data, "JPEG", quality=90)
            url = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        return parts


def spread_frames(video: str, count: int) -> np.ndarray:
    """Up to `count` frames of a file, an address or a folder of frames, evenly spread, `[T, H, W, 3]` uint8 RGB."""
    choose = functools.partial(choose_frames, num_frames=count, temporal_patch_size=1)
    if os.path.isdir(video):
        paths = image_paths(video)
        return load_frames([paths[index] for index in choose(len(paths), 1.0)])
    return read_video(video, choose)[0]


async def screen(teacher: VideoTeacher, item: Item, ledger: Ledger) -> None:
    """
    The step from a [`Choice`] to one that the teacher has confirmed: what it answers wrong is dropped as "wrong", a
    reply without a letter as "no letter".
    """
    choice: Choice = item.record
    reply = await teacher.ask(choice.vision_id, choice.prompt(), item, ledger)
    letter = read_letter(reply.text)
    if letter == choice.answer:
        ledger.kept.append(choice.row())
    else:
        reason = "no letter" if letter is None else f"wrong: {letter} for {choice.answer}"
        ledger.dropped.append({**choice.row(), "said": reply.text[:200], "reason": reason})


async def write_answers(teacher: VideoTeacher, item: Item, ledger: Ledger) -> None:
    """The step from a [`Choice`], which the teacher is asked without its options, to a [`FreeAnswer`]."""
    choice: Choice = item.record
    reply = await teacher.ask(choice.vision_id, f"{choice.question}\n{FREE_ANSWER}", item, ledger)
    text = strip_thoughts(reply.text)
    shared = choice.model_dump(include={"vision_id", "id", "fps", "question", "type", "difficulty"}, exclude_none=True)
    reason = answer_fault(text, MOST_WORDS) if reply.complete else "cut off"
    if reason is None:
        ledger.kept.append(FreeAnswer(**shared, answer=text).row())
    else:
        ledger.dropped.append({**shared, "answer": text, "reason": reason})


async def write_summaries(teacher: VideoTeacher, item: Item, ledger: Ledger) -> None:
    """The step from a [`Caption`], of which only the video counts, to a record of the kind "events", a line each."""
    caption: Caption = item.record
    reply = await teacher.ask(caption.vision_id, f"{SUMMARY}\n{LISTED}", item, ledger)
    lines = [_NUMBER.sub("", line).strip() for line in strip_thoughts(reply.text).splitlines()]
    lines = [line for line in lines if line]
    faults = [fault for line in lines if (fault := answer_fault(line, MOST_WORDS))]
    reason = "cut off" if not reply.complete else "no event" if not lines else faults[0] if faults else None
    if reason is None and len(set(lines)) < len(lines):
        reason = "repeats itself"
    text = "\n".join(lines)
    if reason is None:
        record = VideoRecord(caption.vision_id, SUMMARY, text, kind="events", fps=caption.fps, id=caption.id)
        ledger.kept.append(record.row())
    else:
        ledger.dropped.append({"vision_id": caption.vision_id, "answer": text, "reason": reason})


def answer_fault(text: str, most_words: int) -> str | None:
    """Why an answer is not kept: a kind of fault, a colon, and what is particular; `None` for a good one."""
    words = re.findall(r"\w+", text.casefold())
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
