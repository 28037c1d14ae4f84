"""How relevant tokens are for a question, where the selector cannot look at all of them at once."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.tensors import digest_of
from ..model.relevance_qtsplus import QTSplusLayer
from ..video.encoded import EncodedVideo
from ..video.storage import KeyedVideo
from .question import check_question

CHUNK = 512  # tokens that are scored at a time, few enough for a processor's cache
PIECE = 16384  # tokens; a longer video competes in pieces of this size

Tokens = Tensor | KeyedVideo  # of a video: features `[M, token_width]`, or the selector's keys in 8 bits


@dataclass(frozen=True)
class Piece:
    """A video that competes with others, or some of the steps of a long one."""

    name: str  # the video's
    first: int  # steps in time; the last one is not part of it
    last: int
    peak: float = 0.0  # the highest log-relevance of its tokens
    error: float = 0.0  # how far the peak can be from that of the video's features

    @property
    def highest(self) -> float:
        """No peak of the video's features is above it."""
        return self.peak + self.error

    def cut(self, video: EncodedVideo) -> EncodedVideo:
        """The piece as a video of its own, at its place in time."""
        steps = int(video.video_grid_thw[0, 0])
        if self.first == 0 and self.last == steps:
            return video
        begin = video.steps[self.first]
        end = video.steps[self.last]
        frames_per_step = math.ceil(video.frames / steps)
        first_frame = self.first * frames_per_step
        last_frame = self.last * frames_per_step
        metadata = copy(video.about.metadata)
        metadata.frames_indices = metadata.frames_indices[first_frame:last_frame]
        metadata.total_num_frames = round((end - begin) * metadata.fps)
        grid = video.video_grid_thw.clone()
        grid[0, 0] = self.last - self.first
        features_of_steps = video.features.unflatten(0, (steps, -1))
        return replace(
            video,
            features=features_of_steps[self.first : self.last].flatten(0, 1),
            video_grid_thw=grid,
            about=replace(video.about, metadata=metadata, start=video.about.start + begin),
        )

    def tokens(self, video: EncodedVideo | KeyedVideo) -> Tokens:
        """The tokens of the piece."""
        if isinstance(video, KeyedVideo):
            return replace(video, video=self.cut(video.video))
        return self.cut(video).features


class Ranking(NamedTuple):
    """Pieces, the one with the most relevant token first, and a number to subtract from each log-relevance."""

    pieces: list[Piece]
    total: float


def question_states(model, processor, question: str) -> Tensor:
    """`[L, d]`, the words of a question as the selector's scoring layers see them."""
    check_question(model, processor, question)
    ids = torch.tensor(processor.text_ids(question), device=model.device)
    embed = model.get_input_embeddings()
    return model.model.qtsplus.contextualise(embed(ids))


def keys_fingerprint(model) -> str | None:
    """A hash of the weights behind a selector's keys; `None` for several scoring layers, whose keys need a question."""
    layers = model.model.qtsplus.scoring_layers
    if len(layers) > 1:
        return None
    norm = layers[0].kv_norm
    projection = layers[0].k_proj
    weights = {
        "norm": norm.weight,
        "weight": projection.weight,
        "bias": projection.bias,
    }
    return digest_of(weights, norm.eps)


def key_projection(layer: QTSplusLayer) -> tuple[Tensor, Tensor]:
    """The matrix `[key_width, d]` that makes keys of tokens whose norm is 1, and its bias `[key_width, 1]`; float32."""
    weight = layer.k_proj.weight.float() * layer.kv_norm.weight.float()
    return weight, layer.k_proj.bias.float()[:, None]


def token_keys(layer: QTSplusLayer, features: Tensor) -> Tensor:
    """`[M, key_width]` float32 on the CPU, the keys of tokens `[M, token_width]`, of whatever dtype the layer is."""
    weight, bias = key_projection(layer)
    keys = []
    for chunk in features.split(CHUNK):
        projected = _projected(chunk, weight, bias, layer.kv_norm.eps)
        keys.append(projected.T.cpu())
    return torch.cat(keys)


def _projected(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """`[rows, k]`: the matrix `[rows, d]` times the normalised tokens `[k, token_width]`, and the bias `[rows, 1]`."""
    width = weight.shape[1]
    tokens = features[:, :width].to(weight.device, torch.float32)
    mean_square = tokens.square().mean(1)
    scale = torch.rsqrt(mean_square + eps)
    return (weight @ tokens.T) * scale + bias


class Scores:
    """
    The scores of any tokens for one question, whose words have `states` `[L, d]`, in the last scoring layer: a row for
    each head and word, or with the reduction `"sum"` one for all.

    A score is the product of a query and a key, and a key is the product of a normalised token and a matrix. If there
    are fewer rows than numbers in a key, the matrix is multiplied into the queries once, which leaves a fraction of the
    work for each token.
    """

    def __init__(self, layer: QTSplusLayer, states: Tensor, reduction: str):
        projected = layer.q_proj(layer.q_norm(states))
        queries = layer._heads(projected).float() / layer.head_dim**0.5
        if reduction == "sum":  # the sum of the scores is the score of the sum
            queries = queries.sum(1, keepdim=True)
        weight, bias = key_projection(layer)
        key_width = len(weight)
        self.queries = queries.reshape(key_width // layer.head_dim, -1, layer.head_dim)
        rows = self.queries.flatten(0, 1)
        self.folded = len(rows) < key_width
        if self.folded:
            weight = _products(self.queries, weight)
            bias = _products(self.queries, bias)
        self.weight = weight
        self.bias = bias
        self.eps = layer.kv_norm.eps
        self.reduction = reduction

    def chunks(self, tokens: Tokens) -> Iterator[Tensor]:
        """The scores `[rows, k]` of the tokens, chunk by chunk."""
        if isinstance(tokens, KeyedVideo):
            yield from self._code_chunks(tokens)
        else:
            for features in tokens.split(CHUNK):
                yield self.of(features)

    def of(self, features: Tensor) -> Tensor:
        """`[rows, k]` float32 on the CPU, of tokens `[k, token_width]`."""
        scores = _projected(features, self.weight, self.bias, self.eps)
        if not self.folded:
            scores = _products(self.queries, scores)
        return self._summed(scores.cpu())

    def _code_chunks(self, keyed: KeyedVideo) -> Iterator[Tensor]:
        """The scores of a video's codes, each to within [`error`]."""
        queries = self.queries.cpu()
        shift = _products(queries, keyed.low[:, None])
        queries = queries * keyed.step.reshape(len(queries), 1, -1)
        for codes in keyed.video.features.split(CHUNK):
            yield self._summed(_products(queries, codes.float().T) + shift)

    def error(self, keyed: KeyedVideo) -> float:
        """
        How far a score by codes can be from the score by features: half a step in every number of a key, and the
        rounding of float32 in two such sums. A reduction over rows adds nothing to the largest error of a row.
        """
        high = keyed.low + 255 * keyed.step
        largest = torch.maximum(keyed.low.abs(), high.abs())
        error_of_number = keyed.step / 2 + 1e-5 * largest
        error_of_row = _products(self.queries.cpu().abs(), error_of_number[:, None])
        return float(error_of_row.max())

    def _summed(self, scores: Tensor) -> Tensor:
        if self.reduction == "sum":
            return scores.logsumexp(0, keepdim=True)
        return scores

    def log_relevance(self, scores: Tensor, total: Tensor | float) -> Tensor:
        """
        `[k]` of tokens with these scores `[rows, k]`, among all tokens.

        Args:
            total: `[rows, 1]`, the log-sum-exp of the scores of all tokens.
        """
        log_attention = scores - total
        if self.reduction == "mean":
            return log_attention.logsumexp(0) - math.log(len(scores))
        return log_attention.amax(0)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """`[rows, k]` of `[kv_heads, rows / kv_heads, head_dim]` and `[kv_heads * head_dim, k]`."""
    keys_of_heads = keys.unflatten(0, (len(queries), -1))
    return (queries @ keys_of_heads).flatten(0, 1)


class Scorer:
    """
    The relevance of every token of many videos for one question, computed for one video at a time. It equals the
    selector's relevance over all videos together, in a softmax over all tokens.

    With the reduction `"sum"` one pass over the videos is enough: the softmax keeps the order of the tokens, and the
    number that it divides by is known at the end. With `"max"` and `"mean"` a first pass finds that number for each
    row. Each call of `videos` begins a pass over their tokens; memory does not grow with their number. A selector with
    several scoring layers needs features.
    """

    def __init__(
        self,
        model,
        processor,
        question: str,
        videos: Callable[[], Iterable[Tokens]],
    ):
        states = question_states(model, processor, question)
        selector = model.model.qtsplus
        nulls = selector.null_states()
        last_layer = selector.scoring_layers[-1]
        width = states.shape[1]
        for layer in selector.scoring_layers[:-1]:
            context = []
            for tokens in videos():
                if isinstance(tokens, KeyedVideo):
                    raise ValueError("A selector with several scoring layers was given keys; it needs features.")
                context.append(tokens[:, :width].to(states))
            states = layer(states, context + list(nulls))
        self.scores = Scores(last_layer, states, selector.config.reduction)
        self.total: Tensor | float = 0.0
        if self.scores.reduction != "sum":
            self.total = torch.tensor(-torch.inf)
            for tokens in itertools.chain(videos(), nulls):
                for scores in self.scores.chunks(tokens):
                    total_of_chunk = scores.logsumexp(1, keepdim=True)
                    self.total = self.total.logaddexp(total_of_chunk)
        self.null = torch.tensor(-torch.inf)
        for null in nulls:
            relevance = self.relevance(null)
            self.null = self.null.logaddexp(relevance.logsumexp(0))

    def relevance(self, tokens: Tokens) -> Tensor:
        """`[M]` float32, the log-relevance of the tokens of one video, plus the ranking's `total`."""
        parts = []
        for scores in self.scores.chunks(tokens):
            parts.append(self.scores.log_relevance(scores, self.total))
        return torch.cat(parts)

    def rank(self, videos: Iterable[tuple[Piece, EncodedVideo | KeyedVideo]]) -> Ranking:
        """Ranks the given piece of each video, in pieces of at most [`PIECE`] tokens."""
        pieces: list[Piece] = []
        total = self.null
        for asked, video in videos:
            relevance = self.relevance(asked.tokens(video))
            total = total.logaddexp(relevance.logsumexp(0))
            error = 0.0
            if isinstance(video, KeyedVideo):
                error = self.scores.error(video)
            pieces += self._cut(asked, relevance, error)
        pieces.sort(key=lambda piece: -piece.peak)
        if self.scores.reduction != "sum":
            return Ranking(pieces, 0.0)
        return Ranking(pieces, float(total))

    def _cut(self, asked: Piece, relevance: Tensor, error: float) -> Iterator[Piece]:
        """The pieces of [`PIECE`] tokens of a piece whose tokens have this relevance `[M]`."""
        count = asked.last - asked.first
        peaks = relevance.unflatten(0, (count, -1)).amax(1)
        size = max(1, PIECE * count // len(relevance))
        first = asked.first
        while first < asked.last:
            next_cut = (first // size + 1) * size
            last = min(asked.last, next_cut)
            begin = first - asked.first
            end = last - asked.first
            peak = float(peaks[begin:end].max())
            yield Piece(asked.name, first, last, peak, error)
            first = last

    def refine(
        self,
        pieces: Iterable[Piece],
        top: int,
        read: Callable[[str], EncodedVideo],
    ) -> list[Piece]:
        """
        The `top` pieces by the features of their videos, and the others that had to be read to know them; best first.

        A piece is read unless its keys show that, whatever their error, `top` others are better.

        Args:
            read: returns the video of a name.
        """
        exact = []
        best_peaks: list[float] = []  # a heap of the `top` highest ones
        for piece in sorted(pieces, key=lambda piece: -piece.highest):
            if len(best_peaks) == top and best_peaks[0] > piece.highest:
                break
            if piece.error > 0:
                part = piece.cut(read(piece.name))
                relevance = self.relevance(part.features)
                piece = replace(piece, peak=float(relevance.max()), error=0.0)
            exact.append(piece)
            heapq.heappush(best_peaks, piece.peak)
            if len(best_peaks) > top:
                heapq.heappop(best_peaks)
        return sorted(exact, key=lambda piece: -piece.peak)


class StandingQuestion:
    """
    How much the tokens of a stream matter for a question. Each is scored once, when it comes.

    A token keeps its scores. They are compared with the log-sum-exp of all scores so far, which includes the scores of
    tokens that were dropped since. A second scoring layer would have to look at every token again, so a selector with
    two is refused.
    """

    @torch.no_grad()
    def __init__(self, model, processor, question: str):
        states = question_states(model, processor, question)
        selector = model.model.qtsplus
        if len(selector.scoring_layers) != 1:
            count = len(selector.scoring_layers)
            raise ValueError(
                f"The selector has {count} scoring layers; a standing question needs one that has a single layer: "
                "choose another policy."
            )
        layer = selector.scoring_layers[0]
        self.scores = Scores(layer, states, selector.config.reduction)
        self.total = torch.tensor(-torch.inf)  # then [rows, 1], the log-sum-exp of all scores so far
        for null in selector.null_states():
            self.add(null)

    def add(self, features: Tensor) -> Tensor:
        """`[k, rows]`: the [`Scores`] of new tokens `[k, d]`."""
        scores = self.scores.of(features)
        total_of_new = scores.logsumexp(1, keepdim=True)
        self.total = self.total.logaddexp(total_of_new)
        return scores.T

    def log_relevance(self, scores: Tensor) -> Tensor:
        """`[m]` log-relevance of tokens with these scores `[m, rows]`, among all tokens so far."""
        return self.scores.log_relevance(scores.T, self.total)
