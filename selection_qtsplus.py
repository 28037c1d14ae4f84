"""Which visual tokens stay: methods that choose at inference, and gates that let training pass through the choice.

A method is a function `select(candidates, n) -> kept indices` and its name in [`METHODS`]; whoever adds one adds both,
and `selection="its_name"` works in the configuration and in every call. Of tokens that are as good as each other the
earliest stay: [`top_n`] says what that means. A gate does in training what the method
`"qtsplus"` does at inference, or nearly so, with a gradient or detached from it; all share the signature of
[`straight_through_gate`] and stand in [`GATES`]. What each was measured to teach the scores is in docs/learned.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

LM_ATTENTION = "lm_attention"  # lm_attention_qtsplus.py has its scores
# Scores that differ by no more are a tie. Equal frames that are encoded in batches of other sizes differ by 1e-6 in
# their features, in float32, and hardly more in log-relevance, where this is a ten-thousandth of a token's relevance.
TIE = 1e-4


@dataclass
class Candidates:
    """
    The `M` visual tokens of one sample that compete for its budget.

    Args:
        visual: `[k, d]` of each video (or image) in turn; `k` sum to `M`.
        query: `[L, d]`, the states of the question's words; empty where a prompt has none.
        positions: `[3, M]`, absolute (time, height, width) in the prompt.
        grids: (time, height, width) of each video in tokens; row by row, frame by frame, they are its `k` tokens. A
            video of which a part is there has several in turn.
        score: computes the log-relevance, once and only for a method that looks at it.
    """

    visual: Sequence[torch.Tensor]
    query: torch.Tensor
    positions: torch.Tensor
    grids: Sequence[tuple[int, int, int]]
    score: Callable[[], torch.Tensor]

    @cached_property
    def log_relevance(self) -> torch.Tensor:
        """`[M]` float32, at most 0."""
        return self.score()

    @property
    def num_tokens(self) -> int:
        """M."""
        return sum(len(part) for part in self.visual)

    @property
    def device(self) -> torch.device:
        return self.visual[0].device


# --------------------------------------------------------------------------------------------------------------------
# Methods: candidates, n -> [n] int64 indices, ascending
# --------------------------------------------------------------------------------------------------------------------


def most_relevant(candidates: Candidates, n: int) -> torch.Tensor:
    """The n tokens that matter most for the question (the paper, at inference)."""
    return top_n(candidates.log_relevance, n)


def uniform(candidates: Candidates, n: int) -> torch.Tensor:
    """n evenly spaced tokens, the middle of each of n equal parts: the paper's UNIF."""
    return ((torch.arange(n, device=candidates.device) * 2 + 1) * candidates.num_tokens) // (2 * n)


def random(candidates: Candidates, n: int) -> torch.Tensor:
    """n different tokens drawn with torch's global generator."""
    return torch.randperm(candidates.num_tokens, device=candidates.device)[:n].sort().values


def everything(candidates: Candidates, n: int) -> torch.Tensor:
    """All tokens; the selector asks for `n = M`."""
    return torch.arange(n, device=candidates.device)


def temporal_redundancy(candidates: Candidates, n: int) -> torch.Tensor:
    """
    The n tokens that differ most from the same place one step earlier, by the cosine of their features, as Efficient
    Video Sampling does (arXiv 2510.14624).

    EVS keeps the whole first frame, and so has nothing left to choose at budgets around one frame. Here the first frame
    is compared with its own mean instead.
    """
    change = []
    visual = candidates.visual[0] if len(candidates.visual) == 1 else torch.cat(list(candidates.visual))
    parts = visual.split([math.prod(grid) for grid in candidates.grids])
    for features, (time, height, width) in zip(parts, candidates.grids, strict=True):
        frames = features.unflatten(0, (time, height * width))
        mean = frames[0].float().mean(0).expand(height * width, -1)
        steps = [(mean, frames[0]), *pairwise(frames)]
        change += [1 - F.cosine_similarity(before.float(), now.float(), dim=-1) for before, now in steps]
    return top_n(torch.cat(change), n)


def diversity(candidates: Candidates, n: int) -> torch.Tensor:
    """
    n tokens that are far from each other: greedily, the one whose nearest kept token is farthest by the cosine of their
    features, as DivPrune does (arXiv 2503.02175).

    DivPrune begins with the token that is farthest from its nearest neighbour, which needs all pairs of tokens. Here
    the first is the one farthest from the mean. Time is O(n M d), memory O(M d).
    """
    features = F.normalize(torch.cat(list(candidates.visual)).float(), dim=-1)
    distance = 1 - features @ F.normalize(features.mean(0), dim=0)
    nearest = torch.full_like(distance, torch.inf)
    kept = torch.empty(n, dtype=torch.long, device=candidates.device)
    for step in range(n):
        chosen = first_largest(distance)
        kept[step] = chosen
        nearest = torch.minimum(nearest, 1 - features @ features[chosen])
        nearest[chosen] = -torch.inf
        distance = nearest
    return kept.sort().values


def top_n(scores: torch.Tensor, n: int) -> torch.Tensor:
    """
    Indices of the n largest scores, ascending: `[n]` int64.

    Scores within [`TIE`] of the n-th largest count as equal to it, and of those the earliest stay. So tokens that show
    the same, as in a video that stands still, are chosen by their place and not by rounding.
    """
    cut = scores.topk(n, sorted=False).values.amin()
    above = scores > cut + TIE
    tied = (scores >= cut - TIE) & ~above
    return (above | (tied & (tied.cumsum(0) <= n - above.sum()))).nonzero()[:, 0]


def first_largest(scores: torch.Tensor) -> torch.Tensor:
    """Index of the first score within [`TIE`] of the largest."""
    return (scores >= scores.amax() - TIE).int().argmax()


def tokens_for_mass(log_relevance: torch.Tensor, mass: float) -> int:
    """How many of the most relevant tokens hold this share of all relevance, up to [`TIE`]."""
    shares = log_relevance.softmax(0).sort(descending=True).values.cumsum(0)
    return min(int((shares < mass - TIE).sum()) + 1, len(shares))


METHODS: dict[str, Callable[[Candidates, int], torch.Tensor]] = {
    "qtsplus": most_relevant,
    LM_ATTENTION: most_relevant,  # whose log-relevance comes from the language model
    "uniform": uniform,
    "random": random,
    "all": everything,
    "temporal_redundancy": temporal_redundancy,
    "diversity": diversity,
}


def check_call(selection: str, retentions: Sequence[float | None], rows: int, max_visual_tokens: int | None) -> None:
    """Refuses what no selection can do; see `QTSplusSelector.forward`."""
    if selection not in METHODS:
        raise ValueError(f"selection={selection!r}; expected one of {tuple(METHODS)}.")
    if len(retentions) != rows:
        raise ValueError(f"{len(retentions)} retentions for {rows} rows: expected one for all, or one for each.")
    for retention in retentions:
        if retention is not None and not 0 < retention <= 1:
            raise ValueError(f"retention={retention!r}: expected a fraction of the visual tokens in (0, 1].")
    if max_visual_tokens is not None and (
        isinstance(max_visual_tokens, bool) or max_visual_tokens < 1 or max_visual_tokens != int(max_visual_tokens)
    ):
        raise ValueError(f"max_visual_tokens={max_visual_tokens!r}: expected a whole number of tokens, at least 1.")
    fixed = any(retention not in (None, 1.0) for retention in retentions)
    if selection == "all" and (fixed or max_visual_tokens is not None):
        raise ValueError(
            'selection="all" keeps every visual token: choose another selection, in this call or in qtsplus_config, or '
            "leave retention and max_visual_tokens out."
        )


# --------------------------------------------------------------------------------------------------------------------
# Gates (lines 5 to 14 of Algorithm 1) on the threshold of Algorithm 2
# --------------------------------------------------------------------------------------------------------------------


SOFT_TOKENS = 3  # times what inference keeps


class Gated(NamedTuple):
    """Kept indices `[n]` ascending, their gates `[n]` (soft, or 1 with a soft gradient or none), threshold t."""

    kept_indices: torch.Tensor
    gates: torch.Tensor
    threshold: torch.Tensor


def find_threshold(scores: torch.Tensor, target: torch.Tensor, tau_s: float) -> torch.Tensor:
    """
    Solves `sum_i sigmoid((scores_i - t) / tau_s) = target` for t.

    The sum falls strictly with t, and `t` lies between `min(scores)` and `max(scores)` shifted by
    `tau_s * logit(target / M)`: bisection between the two always arrives, where the paper's plain Newton runs away on
    peaked scores. The gradient is the implicit one, `dt = (sum_i w_i dscores_i - tau_s dtarget) / sum_i w_i` with
    `w = s (1 - s)`.

    Args:
        scores: `[M]`.
        target: scalar tensor, tokens, between 0 and M.
        tau_s: temperature.

    Returns:
        Scalar t, in the dtype of `scores`.
    """
    precise = torch.float32 if scores.device.type == "mps" else torch.float64
    x = scores.detach().to(precise)
    goal = target.detach().to(precise)
    fraction = (goal / len(x)).clamp(1e-6, 1 - 1e-6)
    goal = fraction * len(x)
    shift = tau_s * torch.logit(fraction)
    low, high = x.min() - shift, x.max() - shift
    for _ in range(60):
        t = (low + high) / 2
        too_many = torch.sigmoid((x - t) / tau_s).sum() > goal
        low, high = torch.where(too_many, t, low), torch.where(too_many, high, t)

    t = (low + high) / 2
    if not (torch.is_grad_enabled() and (scores.requires_grad or target.requires_grad)):
        return t.to(scores.dtype)
    z = (x - t) / tau_s
    weights = torch.sigmoid(z) * torch.sigmoid(-z)  # s (1 - s) without cancellation
    total = weights.sum().clamp(min=1e-30)
    residual = ((weights / total).to(scores.dtype) * scores).sum() - (tau_s / total).to(scores.dtype) * target
    return t.to(scores.dtype) + (residual - residual.detach())


def gumbel_noise(num_tokens: int, device: torch.device) -> torch.Tensor:
    """
    Standard Gumbel noise for (keep, drop), from torch's global generator: `[M, 2]` float32.

    The selector draws it row by row: however a batch is cut into micro-batches, its rows see the same noise. The
    processes of a distributed run draw their own, so with them only the expectation is that of one big batch.
    """
    return -torch.empty(num_tokens, 2, device=device).exponential_().log()


def gumbel_gate(log_relevance: torch.Tensor, target: torch.Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """
    The paper's training gate: hard Gumbel-softmax over `[r - t, 0]` with a straight-through gradient.

    Arguments as for [`straight_through_gate`]. The sampled count is its own, below `n_max`; the threshold is on r.
    """
    relevance = log_relevance.exp()
    noise = gumbel_noise(len(relevance), relevance.device)
    threshold = find_threshold(relevance, target, tau_s)
    margin = relevance - threshold + noise[:, 0] - noise[:, 1]
    kept = (margin.detach() >= 0).nonzero()[:, 0]
    if len(kept) == 0:
        kept = relevance.detach().argmax()[None]
    elif len(kept) > n_max:
        kept = top_n(margin.detach(), n_max)
    return Gated(kept, _straight_through(margin[kept] / tau_s), threshold)


def straight_through_gate(log_relevance: torch.Tensor, target: torch.Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """
    Keeps in training exactly what inference keeps; the gradient is that of `sigmoid((log r - t) / tau_s)`.

    Args:
        log_relevance: `[M]` float32.
        target: scalar tensor, the soft count that fixes t; differentiable in rho.
        tau_s: temperature.
        n: the hard count.
        n_max: cap on the kept tokens; `n` is below it already.
    """
    kept = top_n(log_relevance.detach(), n)
    threshold = find_threshold(log_relevance, target, tau_s)
    return Gated(kept, _straight_through((log_relevance[kept] - threshold) / tau_s), threshold)


def detached_gate(log_relevance: torch.Tensor, target: torch.Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """
    Keeps in training exactly what inference keeps, and lets no gradient through the choice: for scores that are taught
    by attention. Arguments as for [`straight_through_gate`]; there is no threshold.
    """
    kept = top_n(log_relevance.detach(), n)
    return Gated(kept, torch.ones(n, device=kept.device), torch.zeros((), device=kept.device))


def soft_gate(log_relevance: torch.Tensor, target: torch.Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """
    `sigmoid((s - t) / tau_s)` as it is, of scores `s = z + tau_s * Gumbel noise`, on three times the tokens that
    inference keeps: what is about to be dropped is half there, so the answers can tell whether it matters.

    z is the log-relevance in units of its own spread around its mean. Without, training makes the scores so far apart
    that every gate is 0 or 1, and has no gradient left. The selector puts the mean of all tokens in the place of what a
    gate leaves out, for a token times its gate looks like no token. As `tau_s` falls, noise and gates come closer to
    what inference does. Arguments as for [`straight_through_gate`].
    """
    centred = log_relevance - log_relevance.mean()
    scores = centred / centred.square().mean().clamp(min=1e-12).sqrt()
    scores = scores + tau_s * gumbel_noise(len(scores), scores.device)[:, 0]
    kept = top_n(scores.detach(), min(SOFT_TOKENS * n, len(scores), n_max))
    threshold = find_threshold(scores, target, tau_s)
    return Gated(kept, torch.sigmoid((scores[kept] - threshold) / tau_s), threshold)


def _straight_through(logits: torch.Tensor) -> torch.Tensor:
    """Ones, with the gradient of a sigmoid."""
    soft = torch.sigmoid(logits)
    return 1 + (soft - soft.detach())


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor, float, int, int], Gated]] = {
    "gumbel": gumbel_gate,
    "straight_through": straight_through_gate,
    "detached": detached_gate,
    "soft": soft_gate,
}

__all__ = ["GATES", "LM_ATTENTION", "METHODS", "Candidates", "Gated", "check_call", "find_threshold"]
