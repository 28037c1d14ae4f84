"""How relevant tokens are for a question, where the selector cannot look at all of them at once."""

import itertools
import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .answers import check_question
from .relevance_qtsplus import QTSplusLayer
from .videos import EncodedVideo

CHUNK = 512  # tokens that are scored at a time, few enough for a processor's cache
PIECE = 16384  # tokens; a longer video competes in pieces of so many


@dataclass(frozen=True)
class Piece:
    """A video that competes with others, or some of the steps of a long one."""

    name: str  # the video's
    first: int  # steps in time; the last one is not part of it
    last: int
    peak: float  # of its tokens the highest log-relevance
    steps: tuple[int, ...] = ()  # those to look at for its best moments, counted from the video's first; all if none

    def cut(self, video: EncodedVideo) -> EncodedVideo:
        """The piece as a video of its own, at its place in time."""
        steps = int(video.video_grid_thw[0, 0])
        if (self.first, self.last) == (0, steps):
            return video
        metadata, grid, every = copy(video.metadata), video.video_grid_thw.clone(), math.ceil(video.frames / steps)
        grid[0, 0] = self.last - self.first
        begin, end = video.steps[self.first], video.steps[self.last]
        metadata.frames_indices = metadata.frames_indices[self.first * every : self.last * every]
        metadata.total_num_frames = round((end - begin) * metadata.fps)
        features = video.features.unflatten(0, (steps, -1))[self.first : self.last].flatten(0, 1)
        return replace(video, features=features, video_grid_thw=grid, metadata=metadata, start=video.start + begin)


class Ranking(NamedTuple):
    """Pieces, that with the most relevant token first, and what is to be taken from a log-relevance."""

    pieces: list[Piece]
    total: float


def question_states(model: Any, processor: Any, question: str) -> torch.Tensor:
    """`[L, d]`, the words of a question as the selector's scoring layers see them."""
    check_question(model, processor, question)
    ids, selector = torch.tensor(processor.text_ids(question), device=model.device), model.model.qtsplus
    return selector.contextualise(model.get_input_embeddings()(ids))


class Scores:
    """
    The scores of any tokens for one question, whose words have `states` `[L, d]`, in the last scoring layer: a row for
    each head and word, or with the reduction `"sum"` one for all.

    A score is the product of a query and a key, and a key is a token's norm and a matrix. Where there are fewer rows
    than a key has numbers, the matrix is taken into the queries: that leaves a fraction of the work for each token.
    """

    def __init__(self, layer: QTSplusLayer, states: torch.Tensor, reduction: str):
        queries = layer._heads(layer.q_proj(layer.q_norm(states))).float() / layer.head_dim**0.5
        if reduction == "sum":  # the sum of the scores is the score of the sum
            queries = queries.sum(1, keepdim=True)
        keys = layer.k_proj.weight.float() * layer.kv_norm.weight.float(), layer.k_proj.bias.float()[:, None]
        queries = queries.reshape(len(keys[0]) // layer.head_dim, -1, layer.head_dim)
        self.rows = torch.block_diag(*queries).cpu()  # [rows, kv_heads * head_dim], to be multiplied with whole keys
        few = queries[..., 0].numel() < len(keys[0])
        self.queries = None if few else queries
        self.weights, self.shift = (_products(queries, part) for part in keys) if few else keys
        self.eps, self.reduction = layer.kv_norm.eps, reduction

    def of(self, features: torch.Tensor) -> torch.Tensor:
        """`[rows, k]` float32 on the CPU, of tokens `[k, token_width]`."""
        tokens = features[:, : self.weights.shape[1]].to(self.weights.device, torch.float32)
        scale = torch.rsqrt(tokens.square().mean(1) + self.eps)
        scores = (self.weights @ tokens.T) * scale + self.shift
        scores = (scores if self.queries is None else _products(self.queries, scores)).cpu()
        return scores.logsumexp(0, keepdim=True) if self.reduction == "sum" else scores

    def log_relevance(self, scores: torch.Tensor, total: torch.Tensor | float) -> torch.Tensor:
        """`[k]` of tokens with these scores `[rows, k]`, among all, the log-sum-exp of whose scores is `[rows, 1]`."""
        log_attention = scores - total
        if self.reduction == "mean":
            return log_attention.logsumexp(0) - math.log(len(scores))
        return log_attention.amax(0)


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`[rows, k]` of `[kv_heads, rows / kv_heads, head_dim]` and `[kv_heads * head_dim, k]`."""
    return (queries @ keys.unflatten(0, (len(queries), -1))).flatten(0, 1)


class Scorer:
    """
    The relevance of every token of many videos for one question, for one video at a time: what the selector says of all
    of them together, whose softmax runs over all tokens.

    With the reduction `"sum"` one pass over the videos is enough: the softmax keeps the order of the tokens, and what
    it divides by is known at the end. With `"max"` and `"mean"` a first pass finds it. `features` begins a pass over
    those of the videos, `[M, token_width]` each; memory does not grow with their number.
    """

    def __init__(self, model: Any, processor: Any, question: str, features: Callable[[], Iterable[torch.Tensor]]):
        states, selector = question_states(model, processor, question), model.model.qtsplus
        *earlier, last = selector.scoring_layers
        nulls = selector.null_states()
        for layer in earlier:
            states = layer(states, [*(video[:, : states.shape[1]].to(states) for video in features()), *nulls])
        self.scores = Scores(last, states, selector.config.reduction)
        self.total: torch.Tensor | float = 0.0
        if self.scores.reduction != "sum":
            tokens = itertools.chain(features(), nulls)
            chunks = (self.scores.of(chunk) for video in tokens for chunk in video.split(CHUNK))
            self.total = reduce(torch.logaddexp, (chunk.logsumexp(1, keepdim=True) for chunk in chunks))
        self.null = torch.cat([torch.tensor([-torch.inf]), *map(self.relevance, nulls)]).logsumexp(0)

    def relevance(self, features: torch.Tensor) -> torch.Tensor:
        """`[M]` float32, the log-relevance of the tokens of one video, plus the ranking's `total`."""
        chunks = map(self.scores.of, features.split(CHUNK))
        return torch.cat([self.scores.log_relevance(chunk, self.total) for chunk in chunks])

    def rank(self, videos: Iterable[tuple[Piece, EncodedVideo]]) -> Ranking:
        """Ranks videos, of each of which a piece is asked, those of more than [`PIECE`] tokens in pieces."""
        pieces, total = [], self.null
        for one, video in videos:
            relevance = self.relevance(one.cut(video).features)
            total = total.logaddexp(relevance.logsumexp(0))
            peaks = relevance.unflatten(0, (one.last - one.first, -1)).amax(1)
            size = max(1, PIECE * len(peaks) // len(relevance))
            bounds = [one.first, *range((one.first // size + 1) * size, one.last, size), one.last]
            for first, last in pairwise(bounds):
                pieces.append(Piece(one.name, first, last, float(peaks[first - one.first : last - one.first].max())))
        pieces.sort(key=lambda piece: -piece.peak)
        return Ranking(pieces, float(total) if self.scores.reduction == "sum" else 0.0)


class StandingQuestion:
    """
    How much the tokens of a stream matter for a question. Each is scored once, when it comes.

    A token keeps its scores. They are compared with the log-sum-exp of all scores so far, to which those of new tokens
    are merged: a token's relevance is that among all that ever came, as if none had gone. A second scoring layer would
    have to look at every token again, so a selector with one is refused.
    """

    @torch.no_grad()
    def __init__(self, model: Any, processor: Any, question: str):
        states, selector = question_states(model, processor, question), model.model.qtsplus
        if len(selector.scoring_layers) != 1:
            raise ValueError(
                f"The selector has {len(selector.scoring_layers)} scoring layers; a standing question needs one that "
                "has a single layer: choose another policy."
            )
        self.scores = Scores(selector.scoring_layers[0], states, selector.config.reduction)
        self.total = torch.tensor(-torch.inf)  # then [rows, 1], the log-sum-exp of all scores so far
        for null in selector.null_states():
            self.add(null)

    def add(self, features: torch.Tensor) -> torch.Tensor:
        """`[k, rows]`: the [`Scores`] of new tokens `[k, d]`."""
        scores = self.scores.of(features)
        self.total = self.total.logaddexp(scores.logsumexp(1, keepdim=True))
        return scores.T

    def log_relevance(self, scores: torch.Tensor) -> torch.Tensor:
        """`[m]` log-relevance of tokens with these scores `[m, rows]`, among all tokens so far."""
        return self.scores.log_relevance(scores.T, self.total)
