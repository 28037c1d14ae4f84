"""
Tokens of other videos as rivals, while a selector's scores learn: in ten minutes what was asked for has many more of
them than in the videos that a language model can teach it from. A video that may show it too is no rival.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from qtsplus.training.attention import relevance_divergences

from ..world.open_tokens import OPEN_ASPECTS
from ..world.token_words import read_token_words

Name = tuple[str | None, str | None]  # a colour and a shape, as far as they are said
COLOURS, SHAPES = (aspect[1:] for aspect in OPEN_ASPECTS[:2])


@dataclass(frozen=True)
class About:
    """
    A question and its video.

    Attributes:
        question: as it is asked.
        video: its file.
        shown: what its tokens name, see [`names_shown`].
    """

    question: str
    video: str
    shown: frozenset[Name]


@functools.cache
def names_shown(path: str) -> frozenset[Name]:
    """Of a video's `token_words` the colours and shapes that stand together in a token; `None` where one is unsure."""
    named = read_token_words(path)
    pairs = np.unique(named.labels[..., :2].reshape(-1, 2), axis=0)
    words = [tuple(named.words[index] if index > 0 else None for index in pair) for pair in pairs.tolist()]
    return frozenset((colour, shape) for colour, shape in words if colour or shape)


def name_asked(question: str) -> Name:
    """The colour and the shape that a question names. What crosses the middle is shown by every video: it has none."""
    words = re.findall("[a-z]+", question.lower())
    if "middle" in words:
        return None, None
    colour, shape = (next((word for word in words if word in aspect), None) for aspect in (COLOURS, SHAPES))
    return colour, shape


def may_show(shown: frozenset[Name], asked: Name) -> bool:
    """Whether a token could be what is asked for."""
    return any(
        all(has is None or word is None or has == word for has, word in zip(name, asked, strict=True)) for name in shown
    )


@dataclass
class Rivals:
    """
    Taken by [`watching_scores`] from a model's pass over a batch.

    Attributes:
        about: per row, `None` where nothing is known of its video.
        targets: per row the attention `[M_b]`, or `[0]` for none.
        visual, query: per row the selector's `[M_b, d]` and `[L_b, d]`.
    """

    about: Sequence[About | None]
    targets: Sequence[torch.Tensor]
    visual: list[torch.Tensor] = field(default_factory=list)
    query: list[torch.Tensor] = field(default_factory=list)

    def divergences(self, selector: nn.Module, count: int, null_token: bool) -> torch.Tensor:
        """
        `KL(target || softmax(log r))` over a row's own tokens and `count` of its rivals, drawn by chance, whose targets
        are 0: of each row that has a target and rivals, `[k]`.
        """
        videos = {about.video: row for row, about in enumerate(self.about) if about is not None}
        visual, query, targets = [], [], []
        for about, own, asked, target in zip(self.about, self.visual, self.query, self.targets, strict=True):
            name = name_asked(about.question) if about is not None else (None, None)
            if about is None or name[1] is None or not len(target):
                continue
            others = [
                self.visual[row]
                for video, row in videos.items()
                if video != about.video and not may_show(self.about[row].shown, name)  # type: ignore[union-attr]
            ]
            if others:
                rivals = torch.cat(others)
                rivals = rivals[torch.randperm(len(rivals))[:count].to(rivals.device)]
                visual.append(torch.cat([own, rivals]))
                query.append(asked)
                targets.append(torch.cat([target.float(), target.new_zeros(len(rivals), dtype=torch.float32)]))
        if not visual:
            return torch.zeros(0)
        positions = [row.new_zeros(3, len(row)) for row in visual]
        _, chosen = selector(visual, query, positions, reencode=False, max_visual_tokens=1)
        return relevance_divergences(chosen.log_relevance, targets, null_token)


@contextmanager
def watching_scores(selector: nn.Module, rivals: Rivals) -> Iterator[Rivals]:
    """Notes what a selector is given in its first pass."""

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        if not rivals.visual:
            visual, query = given[:2]
            rivals.visual = [row if isinstance(row, torch.Tensor) else torch.cat(list(row)) for row in visual]
            rivals.query = list(query)

    hook = selector.register_forward_pre_hook(note)
    try:
        yield rivals
    finally:
        hook.remove()
