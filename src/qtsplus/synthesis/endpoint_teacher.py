"""A video teacher behind an endpoint, which is sent frames as images."""

import asyncio
import base64
import io
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from ..data.media import UNREADABLE
from ..output import first_line
from ..video_qtsplus import choose_frames, image_paths, load_frames, read_video
from .endpoint import Endpoint
from .engine import ItemFailed, Ledger
from .video_steps import FREE_ANSWER, Question, Reply, Verdict, read_letter

RECENT_VIDEOS = 8  # whose frames are held

Part = dict[str, Any]


@dataclass
class EndpointTeacher:
    """A [`Teacher`] that is sent frames, and says a letter to choose an option."""

    endpoint: Endpoint  # of a model that sees
    frames: int = 16  # evenly spread over the video
    longest_side: int = 640  # of a frame in pixels; larger ones are made smaller
    max_tokens: int = 128  # of a reply
    _recent: dict[str, asyncio.Task[list[Part]]] = field(default_factory=dict, repr=False)

    def settings(self) -> dict[str, Any]:
        sight = {"frames": self.frames, "longest_side": self.longest_side}
        return {**self.endpoint.settings.shown(), **sight, "scoring": "letter", "max_tokens": self.max_tokens}

    async def __aenter__(self) -> "EndpointTeacher":
        await self.endpoint.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.endpoint.__aexit__(*error)

    async def choose(self, question: Question, ledger: Ledger) -> Verdict:
        messages = await self._messages(question, question.text, ledger)
        reply = await self.endpoint.chat(messages, ledger, max_tokens=self.max_tokens, seed=question.seed)
        return Verdict(read_letter(reply.text), {}, reply.text[:200])

    async def answer(self, question: Question, ledger: Ledger) -> Reply:
        messages = await self._messages(question, f"{question.text}\n{FREE_ANSWER}", ledger)
        return await self.endpoint.chat(messages, ledger, max_tokens=self.max_tokens, seed=question.seed)

    async def _messages(self, question: Question, text: str, ledger: Ledger) -> list[dict[str, Any]]:
        parts: list[Part] = []
        if question.video is not None:
            try:
                parts = await self._parts(question.video)
            except UNREADABLE as error:
                ledger.reasons.append(f"The video cannot be read: {first_line(error)}")
                raise ItemFailed from None
        return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]

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
        urls = [_data_url(frame, self.longest_side) for frame in frames]
        return [{"type": "text", "text": title}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]


def spread_frames(video: str, count: int) -> np.ndarray:
    """
    Up to `count` frames of a file, an address or a folder of frames, evenly spread, `[T, H, W, 3]` uint8 RGB.

    Raises:
        ValueError: it cannot be read.
    """

    def choose(total: int, rate: float) -> np.ndarray:
        return choose_frames(total, rate, num_frames=count, temporal_patch_size=1)

    if os.path.isdir(video):
        paths = image_paths(video)
        return load_frames([paths[index] for index in choose(len(paths), 1.0)])
    return read_video(video, choose)[0]


def _data_url(frame: np.ndarray, longest_side: int) -> str:
    image = Image.fromarray(frame)
    image.thumbnail((longest_side, longest_side))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
