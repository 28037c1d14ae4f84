"""Where the time of a call goes, seen from outside: forward hooks on modules, and a streamer that notes tokens."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import nn
from transformers.generation.streamers import BaseStreamer


def now(device: str) -> float:
    """Seconds, once the device has done all that it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def busy(device: str) -> float:
    """
    Seconds as [`now`] on a GPU; on a CPU those that all threads of this process have computed, which hardly depend on
    what else the machine does.
    """
    return time.process_time() if torch.device(device).type == "cpu" else now(device)


class StageClock:
    """
    Notes when the modules that it watches begin and end; a context, which leaves no hook behind.

    Args:
        encoder: a model whose methods that encode images and videos are watched as "vision".

    Attributes:
        spans: per name, (begin, end) in seconds of every call, in order.
        lengths: per name, the tokens of `inputs_embeds` of every call that has them.
    """

    def __init__(self, device: str, encoder: nn.Module | None = None, **modules: nn.Module):
        self.device = device
        self.encoder = encoder
        self.encoders = [name for name in ("get_image_features", "get_video_features") if hasattr(encoder, name)]
        self.modules = modules
        self.spans: dict[str, list[tuple[float, float]]] = {name: [] for name in ("vision", *modules)}
        self.lengths: dict[str, list[int]] = {name: [] for name in modules}
        self._began: dict[str, float] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "StageClock":
        for name, module in self.modules.items():
            self._handles.append(module.register_forward_pre_hook(self._begin(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end(name)))
        for name in self.encoders:
            setattr(self.encoder, name, self._timed(getattr(self.encoder, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        for name in self.encoders:
            delattr(self.encoder, name)  # and the class's own is back

    def _begin(self, name: str):
        def begin(module, arguments, keywords):
            if keywords.get("inputs_embeds") is not None:
                self.lengths[name].append(keywords["inputs_embeds"].shape[1])
            self._began[name] = now(self.device)

        return begin

    def _end(self, name: str):
        def end(module, arguments, output):
            self.spans[name].append((self._began[name], now(self.device)))

        return end

    def _timed(self, encode: Callable[..., Any]):
        @functools.wraps(encode)  # `generate` reads the signature
        def call(*arguments, **keywords):
            if "vision" in self._began:  # called by the other
                return encode(*arguments, **keywords)
            self._began["vision"] = now(self.device)
            output = encode(*arguments, **keywords)
            self.spans["vision"].append((self._began.pop("vision"), now(self.device)))
            return output

        return call

    def seconds(self, name: str) -> float:
        """Of all calls of a module together."""
        return sum(end - begin for begin, end in self.spans[name])

    def ended(self, name: str) -> float:
        """When the last call of a module ended."""
        return self.spans[name][-1][1]


@contextmanager
def timed(device: str, module: ModuleType, name: str) -> Iterator[list[float]]:
    """The seconds of every call of a module's function, in order; afterwards the module has its own again."""
    seconds = []
    function = getattr(module, name)

    def call(*arguments, **keywords):
        began = now(device)
        output = function(*arguments, **keywords)
        seconds.append(now(device) - began)
        return output

    setattr(module, name, call)
    try:
        yield seconds
    finally:
        setattr(module, name, function)


class TokenClock(BaseStreamer):
    """Notes when each new token comes; `generate` puts the prompt before them."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def first_token(self) -> float:
        return self.puts[1]

    @property
    def seconds_per_token(self) -> float:
        """Of the tokens behind the first."""
        return (self.puts[-1] - self.puts[1]) / (len(self.puts) - 2)
