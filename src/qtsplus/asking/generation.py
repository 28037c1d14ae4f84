"""Options of `generate` for one answer to each question, and the time that answers take."""

import time
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ..model.numbers_qtsplus import require_count
from ..model.prompt_qtsplus import NAMES
from ..model.sampling_qtsplus import SamplingOptions

MAX_NEW_TOKENS = 128  # of an answer, where nobody says; the help of commands and docstrings name it too
_PREPARED = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "mm_encoder_outputs") + NAMES


class TokenClock(BaseStreamer):
    """Notes when the first new token comes, and hands every token on; `generate` puts the prompt before it."""

    def __init__(self, streamer: BaseStreamer | None = None) -> None:
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
    done = [name for name in (*_PREPARED, *SamplingOptions.__annotations__) if name in options]
    if done:
        raise ValueError(
            f"Got {', '.join(done)}, which a question does not take. `encode` or `add` chooses frames (`start=`, "
            "`end=`), a library is searched within `window=(start, end)`, and `model.generate` takes prepared inputs."
        )
    known = [*NAMES, *vars(GenerationConfig()), "subtitles", "turns"]
    for name in options:
        nearest = get_close_matches(name, known, n=1, cutoff=0.8)  # `generate` refuses what is like none
        if nearest not in ([], [name]):
            raise ValueError(f"ask() has no keyword {name!r}; the nearest is {nearest[0]!r}.")
    config = options.get("generation_config")
    if not isinstance(config, GenerationConfig | None):
        raise ValueError(f"generation_config={config!r}; expected a GenerationConfig.")
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
