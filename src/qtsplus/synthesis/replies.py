"""What a teacher says, and the JSON in it, also where something stands around that or its end is missing."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.S)
MOST_BROKEN = 1000  # objects that cannot be read, after which no more are looked for
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class Reply:
    """
    Args:
        text: what the teacher said.
        complete: it ended by itself, not at the most tokens that it may say.
        logprobs: of the first token, by its text, where they were asked for.
    """

    text: str
    complete: bool
    logprobs: Mapping[str, float] = field(default_factory=dict)


def strip_thoughts(text: str) -> str:
    """A reply without what its model thought aloud."""
    return _THOUGHT.sub("", text).strip()


def find_objects(text: str, key: str) -> list[dict[str, Any]]:
    """
    The JSON objects in a list that a reply should hold as `{key: [...]}`.

    Words and fences around it do no harm. Of a reply that is broken or that ends too early, the whole objects are read.

    Returns:
        what could be read, which may be nothing.
    """
    found: list[Any] = []
    for entry in _whole_objects(strip_thoughts(text)):
        inner = entry.get(key, entry)
        found += inner if isinstance(inner, list) else [inner]
    return [entry for entry in found if isinstance(entry, dict)]


def _whole_objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost objects that can be read; where one is broken, those inside it."""
    start = broken = 0
    while (start := text.find("{", start)) >= 0 and broken < MOST_BROKEN:
        try:
            entry, start = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            broken += 1
        else:
            yield entry


__all__ = ["Reply", "find_objects", "strip_thoughts"]
