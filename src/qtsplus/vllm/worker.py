"""
Calls to the engine beside its answers. Before a request runs, it is asked to keep the features of the videos, whose
frames then travel once and not with every question, and for the model's own budget, since vLLM has to count tokens
first. Afterwards it is asked what an answer rests on.

`qtsplus serve` connects the two: [`Worker`] is vLLM's `--worker-extension-cls`.
"""

import logging
from collections.abc import Callable
from threading import Lock
from typing import Any

from safetensors.torch import load, save

logger = logging.getLogger(__name__)

PIXELS = "pixel_values_videos"
Budget = tuple[int, float]  # the tokens that a request keeps, and the fraction that it aims at
FRAMES = "frames"  # in place of a budget: the engine needs the frames
REFUSED = "refused: "  # in place of a budget, with the reason behind it
AGAIN = "again"  # in place of a budget: the engine has done a part, and is to be asked again


class Worker:
    """What a worker of vLLM can be asked beside its own methods."""

    get_model: Callable[[], Any]

    def qtsplus_prepare(self, item: bytes, hold: bool) -> Budget | str:
        """As the model's `prepare`, for an item of [`prepare`]; an error comes back as [`REFUSED`] with its message."""
        data: dict = load(item)
        pixels = [data.pop(name) for name in sorted(data) if name.isdigit()]
        if pixels:
            data[PIXELS] = pixels
        try:
            return self.get_model().prepare(data, hold)
        except Exception as error:  # a method of the operator's own may raise anything, and the engine goes on
            logger.exception("The tokens of a request could not be chosen.")
            return f"{REFUSED}{type(error).__name__}: {error}"

    def qtsplus_release(self, videos: list[str]) -> None:
        """As the model's `release`."""
        self.get_model().release(videos)

    def qtsplus_basis(self, key: str) -> dict | None:
        """What the answers to a request rest on, by the hash of its video item; `None` from a worker without it."""
        return self.get_model().bases.get(key)


def prepare(call_engine: Callable[..., Any], item, hold: bool, turn: Lock) -> Budget:
    """
    Has the engine choose a request's tokens. Frames travel if the engine does not have their features, with one
    question about them at a time, which has the `turn`.

    Args:
        item: what [`processing.merged_item`] has made.
        hold: the engine keeps the features until it is told to release them.
    """
    data = item.get_data()
    pixels = data.pop(PIXELS)
    data = {name: value.contiguous() for name, value in data.items()}
    without_frames = save(data)

    def ask(content: bytes) -> Any:
        answer = call_engine("qtsplus_prepare", (content, hold))[0]
        while answer == AGAIN:  # decoding steps of other requests come between
            answer = call_engine("qtsplus_prepare", (without_frames, hold))[0]
        if isinstance(answer, str) and answer.startswith(REFUSED):
            raise ValueError(f"The request's tokens could not be chosen: {answer.removeprefix(REFUSED)}")
        return answer

    answer = ask(without_frames)
    while answer == FRAMES and not turn.acquire(blocking=False):
        with turn:  # another question sends the frames
            pass
        answer = ask(without_frames)
    if answer != FRAMES:
        return answer
    try:
        for index, of_video in enumerate(pixels):
            data[f"{index:03}"] = of_video.clone()  # a video may come twice
        return ask(save(data))
    finally:
        turn.release()
