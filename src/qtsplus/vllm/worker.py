"""
Calls to the engine beside its answers. Before a request runs, it is asked to keep the features of the videos, whose
frames then travel once and not with every question, and for the model's own budget, since vLLM has to count tokens
first. Afterwards it is asked what an answer rests on.

`qtsplus serve` connects the two: [`Worker`] is vLLM's `--worker-extension-cls`.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any

from safetensors.torch import load, save

PIXELS = "pixel_values_videos"


class Worker:
    """What a worker of vLLM can be asked beside its own methods."""

    get_model: Callable[[], Any]

    def qtsplus_prepare(self, item: bytes, hold: bool) -> tuple[int, float] | None:
        """As the model's `prepare`, for an item of [`prepare`]."""
        data: dict = load(item)
        pixels = [data.pop(name) for name in sorted(data) if name.isdigit()]
        if pixels:
            data[PIXELS] = pixels
        return self.get_model().prepare(data, hold)

    def qtsplus_release(self, key: str) -> None:
        """As the model's `release`."""
        self.get_model().release(key)

    def qtsplus_basis(self, key: str) -> dict | None:
        """What the answers to a request rest on, by the hash of its video item; `None` from a worker without it."""
        return self.get_model().bases.get(key)


def prepare(
    call_engine: Callable[..., Any],
    item,
    hold: bool,
    turn: Lock,
) -> tuple[int, float]:
    """
    How many tokens the model keeps of a request, whose item [`processing.merged_item`] has made, and the fraction that
    it aims at. Frames travel if the engine does not have their features, with one question about them at a time, which
    has the `turn`; `hold` keeps the features.
    """
    data = item.get_data()
    pixels = data.pop(PIXELS)
    data = {name: value.contiguous() for name, value in data.items()}
    while True:
        budget = call_engine("qtsplus_prepare", (save(data), hold))[0]
        if budget is not None:
            return budget
        if turn.acquire(blocking=False):
            break
        with turn:  # another question has sent the frames
            pass
    try:
        for index, of_video in enumerate(pixels):
            data[f"{index:03}"] = of_video.clone()  # a video may come twice
        return call_engine("qtsplus_prepare", (save(data), hold))[0]
    finally:
        turn.release()
