"""
What is asked of the engine beside its answers. Before it runs, the model's own budget, since vLLM has to count tokens
first; the engine keeps the features, so the tower still sees a video once. And afterwards what an answer rests on.

`qtsplus serve` connects the two: [`Worker`] is vLLM's `--worker-extension-cls`.
"""

from collections.abc import Callable
from typing import Any

from safetensors.torch import load, save

PIXELS = "pixel_values_videos"


class Worker:
    """What a worker of vLLM can be asked beside its own methods."""

    get_model: Callable[[], Any]

    def qtsplus_budget(self, item: bytes) -> tuple[int, float] | None:
        """As the model's `learned_budget`, for an item of [`ask_budget`]."""
        data: dict[str, Any] = load(item)
        pixels = [data.pop(name) for name in sorted(data) if name.isdigit()]
        return self.get_model().learned_budget({**data, **({PIXELS: pixels} if pixels else {})})

    def qtsplus_basis(self, key: str) -> dict[str, Any] | None:
        """What the answers to a request rest on, by the hash of its video item; `None` from a worker without it."""
        return self.get_model().bases.get(key)


def ask_budget(call_engine: Callable[..., Any], item: Any) -> tuple[int, float]:
    """
    How many tokens the model would keep of a request, whose item [`processing.merged_item`] has made, and the fraction
    that it aims at.
    """
    data = item.get_data()
    pixels, data = data.pop(PIXELS), {name: value.contiguous() for name, value in data.items()}
    # Frames travel only where the engine does not have their features.
    known = call_engine("qtsplus_budget", (save(data),))[0]
    if known is None:
        data |= {f"{index:03}": part.clone() for index, part in enumerate(pixels)}  # one film may be there twice
        known = call_engine("qtsplus_budget", (save(data),))[0]
    n, rho = known
    return n, rho
