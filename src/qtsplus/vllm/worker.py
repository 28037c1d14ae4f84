"""
What is asked of the engine beside its answers. Before a request runs: to keep the features of its videos, whose frames
so travel once and not with every question, and the model's own budget, since vLLM has to count tokens first. And
afterwards what an answer rests on.

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
        data: dict[str, Any] = load(item)
        pixels = [data.pop(name) for name in sorted(data) if name.isdigit()]
        return self.get_model().prepare({**data, **({PIXELS: pixels} if pixels else {})}, hold)

    def qtsplus_release(self, key: str) -> None:
        """As the model's `release`."""
        self.get_model().release(key)

    def qtsplus_basis(self, key: str) -> dict[str, Any] | None:
        """What the answers to a request rest on, by the hash of its video item; `None` from a worker without it."""
        return self.get_model().bases.get(key)


def prepare(call_engine: Callable[..., Any], item: Any, hold: bool, turn: Lock) -> tuple[int, float]:
    """
    Of a request, whose item [`processing.merged_item`] has made, how many tokens the model keeps, and the fraction that
    it aims at. Frames travel where the engine does not have their features, by `turn` of one question about them at a
    time; `hold` keeps those.
    """
    data = item.get_data()
    pixels, data = data.pop(PIXELS), {name: value.contiguous() for name, value in data.items()}
    while (known := call_engine("qtsplus_prepare", (save(data), hold))[0]) is None:
        if turn.acquire(blocking=False):
            try:
                data |= {f"{index:03}": part.clone() for index, part in enumerate(pixels)}  # a film may come twice
                return call_engine("qtsplus_prepare", (save(data), hold))[0]
            finally:
                turn.release()
        with turn:  # another has sent them
            pass
    return known
