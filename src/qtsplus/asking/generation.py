"""Options of `generate` for one answer to each question, and the time that answers take."""

import inspect
import time
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.streamers import BaseStreamer

from ..model.numbers_qtsplus import require_count

MAX_NEW_TOKENS = 128  # of an answer, where nobody says; the help of commands and docstrings name it too
_OF_GENERATE = list(inspect.signature(GenerationMixin.generate).parameters)[2:-1]  # not self, inputs and kwargs
_KNOWN = {*_OF_GENERATE, *vars(GenerationConfig()), "tokenizer", "assistant_tokenizer"}
# The keywords of the functions that pass others on to `generate`; misspelt ones come with those.
_OURS = {
    "question",
    "queries",
    "turns",
    "retention",
    "max_visual_tokens",
    "selection",
    "subtitles",
    "videos",
    "names",
    "window",
    "pieces",
    "chapter_seconds",
}
_KINDS = {
    "generation_config": GenerationConfig,
    "logits_processor": list,
    "stopping_criteria": list,
    "streamer": BaseStreamer,
}


class TokenClock(BaseStreamer):
    """Notes when the first new token comes, and hands every token on; `generate` puts the prompt before it."""

    def __init__(self, streamer: BaseStreamer | None) -> None:
        self.streamer = streamer
        self.puts = 0
        self.started = float("nan")
        self.first_token = float("nan")

    def start(self) -> None:
        self.started = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_token = time.perf_counter()
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    def timings(self) -> dict[str, float]:
        """Seconds to the first token, and until now."""
        return {"first_token": self.first_token - self.started, "generate": time.perf_counter() - self.started}


def generation_options(model, options: Mapping[str, Any], max_new_tokens: int | None) -> dict[str, Any]:
    """The options of `generate` for one answer to each question; a `ValueError` for several, and for beams."""
    for name in options.keys() - _KNOWN:
        (nearest,) = get_close_matches(name, (_KNOWN | _OURS) - {name}, n=1, cutoff=0)
        raise ValueError(
            f"There is no keyword {name!r} here; the nearest is {nearest!r}. `encode` and `add` choose frames "
            "(`start=`, `end=`), `window=(start, end)` is about a library, and `model.generate` takes prepared inputs."
        )
    for name, kind in _KINDS.items():
        if not isinstance(options.get(name), kind | None):
            raise ValueError(f"{name}={options[name]!r}; expected a {kind.__name__}.")
    config = options.get("generation_config")
    for name in ("num_return_sequences", "num_beams"):
        value = options.get(name) or getattr(config or model.generation_config, name, None) or 1
        if value != 1:
            raise ValueError(f"{name}={value}: a question has one answer, written in one go; call `generate`.")
    if max_new_tokens is None:
        max_new_tokens = getattr(config, "max_new_tokens", None)
    max_length = options.get("max_length")
    if max_new_tokens is None:
        max_length = max_length or getattr(config, "max_length", None)
        max_new_tokens = model.generation_config.max_new_tokens or MAX_NEW_TOKENS
    if max_length:
        raise ValueError(f"max_length={max_length} counts the prompt, which is made for you: set max_new_tokens.")
    return dict(
        options,
        max_new_tokens=require_count("max_new_tokens", max_new_tokens),
        return_dict_in_generate=True,
        streamer=TokenClock(options.get("streamer")),
    )
