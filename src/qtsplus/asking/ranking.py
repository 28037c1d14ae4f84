"""
How relevant tokens are for a question, where the selector cannot look at all of them at once: those of the videos of a
library (library.py), and those of a stream (stream.py).
"""

import math
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..common.tensors import digest_of, in_place
from ..model.encoding_qtsplus import device_of
from ..model.relevance_qtsplus import QTSplusLayer
from ..video.encoded import EncodedVideo
from ..video.storage import KeyedVideo
from .question import check_question

CHUNK = 512  # tokens that are scored at a time, few enough for a processor's cache
PIECE = 16384  # tokens; a longer video competes in pieces of this size

Tokens = Tensor | KeyedVideo  # of a video: features `[M, token_width]`, or the selector's keys in 8 bits


@dataclass(frozen=True, order=True)
class Piece:
    """A video that competes with others, or some of the steps of a long one."""

    name: str  # the video's
    first: int  # the first of its steps in time
    last: int  # the step behind its last one
    peak: float = 0.0  # the highest log-relevance of its tokens

    def cut(self, video: EncodedVideo) -> EncodedVideo:
        """The piece as a video of its own, at its place in time."""
        steps = video.count
        if self.first == 0 and self.last == steps:
            return video
        begin = video.steps[self.first]
        end = video.steps[self.last]
        frames_per_step = math.ceil(video.frames / steps)
        frames = slice(self.first * frames_per_step, self.last * frames_per_step)
        metadata = copy(video.about.metadata)
        metadata.frames_indices = metadata.frames_indices[frames]
        seconds = end - begin
        metadata.total_num_frames = max(1, round(seconds * metadata.fps))
        metadata.duration = seconds
        grid = video.video_grid_thw.clone()
        grid[0, 0] = self.last - self.first
        return replace(
            video,
            features=video.features.unflatten(0, (steps, -1))[self.first : self.last].flatten(0, 1),
            video_grid_thw=grid,
            about=replace(video.about, metadata=metadata, start=video.about.start + begin),
        )

    def tokens(self, video: EncodedVideo | KeyedVideo) -> Tokens:
        """The tokens of the piece."""
        if isinstance(video, KeyedVideo):
            return replace(video, video=self.cut(video.video))
        return self.cut(video).features


def scoring_layer(model) -> QTSplusLayer:
    """
    The layer whose attention is the relevance. A `ValueError` for a selector with several: the keys of the last one
    depend on the question, and on all tokens at once.
    """
    layers = model.model.qtsplus.scoring_layers
    if len(layers) > 1:
        raise ValueError(
            f"The selector has {len(layers)} scoring layers; a library and a standing question need one that has a "
            "single layer."
        )
    return layers[0]


def keys_fingerprint(model) -> str:
    """A hash of the weights behind a selector's keys."""
    layer = scoring_layer(model)
    with in_place(model.model.qtsplus.modules()):
        weights = {
            "norm": layer.kv_norm.weight,
            "weight": layer.k_proj.weight,
            "bias": layer.k_proj.bias,
        }
        return digest_of(weights, layer.kv_norm.eps)


@torch.no_grad()
def token_keys(layer: QTSplusLayer, features: Tensor) -> Tensor:
    """`[M, key_width]` float32 on the CPU, the keys of tokens `[M, token_width]`."""
    tokens = features[:, : layer.k_proj.in_features].to(device_of(layer))
    keys = layer.keys(tokens).transpose(0, 1).flatten(1)
    return keys.float().cpu()


class StandingQuestion:
    """
    How much tokens matter for a question. Each token is scored once, when it comes.

    A token's scores are the products of its key with the queries: one for each head and word, or a single one with the
    reduction `"sum"`. They are compared with the log-sum-exp of all scores so far, which includes the scores of tokens
    that were dropped since.
    """

    @torch.no_grad()
    def __init__(self, model, processor, question: str):
        check_question(model, processor, question)
        selector = model.model.qtsplus
        layer = scoring_layer(model)
        ids = torch.tensor(processor.text_ids(question), device=model.device)
        states = selector.contextualise(model.get_input_embeddings()(ids))
        queries = layer.queries(states).float().cpu()
        queries = queries / layer.head_dim**0.5
        self.reduction = selector.config.reduction
        if self.reduction == "sum":  # the sum of the scores is the score of the sum
            queries = queries.sum(1, keepdim=True)
        self.layer = layer
        self.queries = queries.reshape(layer.k_proj.out_features // layer.head_dim, -1, layer.head_dim)
        self.total = torch.tensor(-torch.inf, device="cpu")  # then [rows], the log-sum-exp of all scores so far
        for null in selector.null_states():
            self.add(null)

    @torch.no_grad()
    def add(self, features: Tensor) -> Tensor:
        """`[k, rows]`: the scores of new tokens `[k, token_width]`."""
        scores = self._scores(token_keys(self.layer, features))
        self._count(scores)
        return scores

    def log_relevance(self, scores: Tensor) -> Tensor:
        """`[k]` log-relevance of tokens with these scores `[k, rows]`, among all tokens so far."""
        log_attention = scores - self.total
        if self.reduction == "mean":
            return log_attention.logsumexp(1) - math.log(scores.shape[1])
        return log_attention.amax(1)

    def _scores(self, keys: Tensor) -> Tensor:
        """`[k, rows]` of keys `[k, key_width]`."""
        products = self.queries @ keys.unflatten(1, (len(self.queries), -1)).permute(1, 2, 0)
        scores = products.flatten(0, 1).T
        if self.reduction == "sum":
            return scores.logsumexp(1, keepdim=True)
        return scores

    def _count(self, scores: Tensor) -> None:
        self.total = self.total.logaddexp(scores.logsumexp(0))


class Scorer(StandingQuestion):
    """
    The relevance of every token of many videos for one question, in a softmax over all tokens of the videos.

    The relevance equals that of the selector over all videos together; with keys in 8 bits it comes close to that.
    Memory does not grow with the number of videos. Each is read twice: for the sums of the softmax, and for its
    relevance.

    Args:
        videos: the tokens of all videos.
    """

    @torch.no_grad()
    def __init__(
        self,
        model,
        processor,
        question: str,
        videos: Iterable[Tokens],
    ):
        super().__init__(model, processor, question)
        for tokens in videos:
            for scores in self._chunks(tokens):
                self._count(scores)

    @torch.no_grad()
    def relevance(self, tokens: Tokens) -> Tensor:
        """`[M]` float32, the log-relevance of the tokens of one video."""
        return torch.cat([self.log_relevance(scores) for scores in self._chunks(tokens)])

    def peaks(self, whole: Piece, tokens: Tokens) -> list[Piece]:
        """Cuts a piece into pieces of at most [`PIECE`] tokens, each with the log-relevance of its best token."""
        relevance = self.relevance(tokens)
        count = whole.last - whole.first
        relevance_by_step = relevance.unflatten(0, (count, -1))
        size = max(1, PIECE * count // len(relevance))
        pieces = []
        for begin in range(0, count, size):
            end = min(begin + size, count)
            peak = float(relevance_by_step[begin:end].max())
            pieces.append(Piece(whole.name, whole.first + begin, whole.first + end, peak))
        return pieces

    def _chunks(self, tokens: Tokens) -> Iterator[Tensor]:
        """The scores `[k, rows]` of the tokens, chunk by chunk."""
        if isinstance(tokens, KeyedVideo):
            for codes in tokens.video.features.split(CHUNK):
                keys = tokens.low + tokens.step * codes.float()
                yield self._scores(keys)
        else:
            for features in tokens.split(CHUNK):
                keys = token_keys(self.layer, features)
                yield self._scores(keys)
