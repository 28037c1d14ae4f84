"""How videos rank for a question: by their most relevant token, as the selector scores the tokens of all together."""

import itertools
import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch

from .relevance_qtsplus import QTSplusLayer
from .selector_qtsplus import QTSplusSelector
from .videos import EncodedVideo

CHUNK = 1024  # tokens that are scored at a time, few enough for a processor's cache
PIECE = 16384  # tokens; a longer video competes in pieces of so many


@dataclass(frozen=True)
class Piece:
    """
    A video that competes with others, or some of the steps of a long one.

    Args:
        name: the video's.
        first, last: steps in time; the last one is not part of it.
        peak: of its tokens the highest log-relevance.
    """

    name: str
    first: int
    last: int
    peak: float

    def cut(self, video: EncodedVideo) -> EncodedVideo:
        """The piece as a video of its own, at its place in time."""
        steps = int(video.video_grid_thw[0, 0])
        if (self.first, self.last) == (0, steps):
            return video
        (seconds,), metadata, grid = video.second_per_grid_ts, copy(video.metadata), video.video_grid_thw.clone()
        grid[0, 0] = self.last - self.first
        skipped, every = self.first * seconds, math.ceil(len(metadata.frames_indices) / steps)
        metadata.frames_indices = metadata.frames_indices[self.first * every : self.last * every]
        metadata.total_num_frames -= round(skipped * metadata.fps)
        features = video.features.unflatten(0, (steps, -1))[self.first : self.last].flatten(0, 1)
        start = video.start + skipped
        return replace(video, features=features, video_grid_thw=grid, metadata=metadata, start=start)


class Ranking(NamedTuple):
    """Pieces, that with the most relevant token first, and what is to be taken from a log-relevance."""

    pieces: list[Piece]
    total: float


def cut_into_pieces(name: str, video: EncodedVideo, relevance: torch.Tensor) -> list[Piece]:
    """The pieces of a video whose tokens have this relevance, `[M]`, none of them longer than [`PIECE`] tokens."""
    peaks = relevance.unflatten(0, (int(video.video_grid_thw[0, 0]), -1)).amax(1)
    parts = peaks.split(max(1, PIECE * len(peaks) // len(relevance)))
    ends = [0, *itertools.accumulate(map(len, parts))]
    return [
        Piece(name, *bounds, float(part.max())) for part, bounds in zip(parts, itertools.pairwise(ends), strict=True)
    ]


def question_states(selector: QTSplusSelector, embeds: torch.Tensor) -> torch.Tensor:
    """`[L, d]`, the words of a question as the selector's scoring layers see them, from their embeddings."""
    order = torch.arange(len(embeds), device=embeds.device).expand(3, -1)
    return selector._encode(selector.question_layers, embeds, order)


class Scores:
    """
    The scores of any tokens for one question, in the last scoring layer.

    A score is the product of a query and a key, and a key is a token's norm and a matrix. Where the queries are fewer
    than a key's numbers, that matrix is taken into them, which leaves a fraction of the work for each token.

    Args:
        states: `[L, d]`, of the question's words.
        reduction: with `"sum"` there is a row of scores for each head, else one for each head and word.
    """

    def __init__(self, layer: QTSplusLayer, states: torch.Tensor, reduction: str):
        queries = layer._heads(layer.q_proj(layer.q_norm(states))).float() / layer.head_dim**0.5
        if reduction == "sum":  # the sum of the scores is the score of the sum
            queries = queries.sum(1, keepdim=True)
        weights, shift = layer.k_proj.weight.float(), layer.k_proj.bias.float()[:, None]
        queries = queries.reshape(len(weights) // layer.head_dim, -1, layer.head_dim)
        self.queries: torch.Tensor | None = queries
        if len(queries.flatten(0, 1)) <= len(weights):
            heads = (part.unflatten(0, (len(queries), -1)) for part in (weights, shift))
            weights, shift = ((queries @ part).flatten(0, 1) for part in heads)
            self.queries = None
        self.weights, self.shift, self.eps = weights * layer.kv_norm.weight.float(), shift, layer.kv_norm.eps

    def of(self, features: torch.Tensor) -> torch.Tensor:
        """`[rows, k]` float32 on the CPU."""
        tokens = features[:, : self.weights.shape[1]].to(self.weights.device, torch.float32)
        scale = torch.rsqrt(tokens.square().mean(1) + self.eps)
        scores = (self.weights @ tokens.T) * scale + self.shift
        if self.queries is not None:
            scores = (self.queries @ scores.unflatten(0, (len(self.queries), -1))).flatten(0, 1)
        return scores.cpu()


class Scorer:
    """
    The relevance of every token of many videos for one question, for one video at a time: what the selector says of all
    of them together, whose softmax runs over all tokens.

    With the reduction `"sum"` one pass over the videos is enough: the softmax keeps the order of the tokens, and what
    it divides by is known at the end. With `"max"` and `"mean"` every head and word has a softmax of its own, and a
    first pass finds what they divide by. Memory does not grow with the number of videos.

    Args:
        features: begins a pass over the features of the videos, `[M, token_width]` each.

    Raises:
        ValueError: an empty question.
    """

    def __init__(self, model: Any, processor: Any, question: str, features: Callable[[], Iterable[torch.Tensor]]):
        words = processor.text_ids(question)
        if not question.strip() or not words:
            raise ValueError("The question is empty; expected some text.")
        selector, embed = model.model.qtsplus, model.get_input_embeddings()
        states = question_states(selector, embed(torch.tensor(words, device=model.device)))
        *earlier, last = selector.scoring_layers
        nulls = selector.null_states()
        for layer in earlier:
            states = layer(states, [*(video[:, : states.shape[1]].to(states) for video in features()), *nulls])
        self.reduction = selector.config.reduction
        self.scores = Scores(last, states, self.reduction)
        self.normaliser = torch.zeros(1, 1)
        if self.reduction != "sum":
            tokens = itertools.chain(features(), nulls)
            chunks = (self.scores.of(chunk) for video in tokens for chunk in video.split(CHUNK))
            self.normaliser = reduce(torch.logaddexp, (chunk.logsumexp(1, keepdim=True) for chunk in chunks))

        self.null = torch.cat([torch.tensor([-torch.inf]), *map(self.relevance, nulls)]).logsumexp(0)

    def relevance(self, features: torch.Tensor) -> torch.Tensor:
        """`[M]` float32, the log-relevance of the tokens of one video, plus the ranking's `total`."""
        return torch.cat([self._reduced(self.scores.of(chunk)) for chunk in features.split(CHUNK)])

    def rank(self, videos: Iterable[tuple[str, EncodedVideo]]) -> "Ranking":
        """Ranks the videos, each with its name."""
        pieces, total = [], self.null
        for name, video in videos:
            relevance = self.relevance(video.features)
            pieces += cut_into_pieces(name, video, relevance)
            total = total.logaddexp(relevance.logsumexp(0))
        pieces.sort(key=lambda piece: -piece.peak)
        return Ranking(pieces, float(total) if self.reduction == "sum" else 0.0)

    def _reduced(self, scores: torch.Tensor) -> torch.Tensor:
        scores = scores - self.normaliser
        if self.reduction == "max":
            return scores.amax(0)
        return scores.logsumexp(0) - (math.log(len(scores)) if self.reduction == "mean" else 0.0)


__all__ = ["Piece", "Ranking", "Scorer", "Scores"]
