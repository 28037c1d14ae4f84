"""The readable twins of what the Hub files compute in blocks, and how a kernel is compared with its twin."""

import math
from functools import partial

import torch


def naive_log_relevance(query_states: torch.Tensor, key_states: torch.Tensor, reduction: str = "max") -> torch.Tensor:
    """
    Log-relevance, all scores at once: `log_softmax(q k / sqrt(d_h))` over the tokens, and over heads and query tokens
    its maximum or the log of its mean; or, for `"sum"`, first the sum over query tokens and the log-sum-exp over heads.

    Of equal maxima the first, in the order (head, query token), takes the gradient.

    Args:
        query_states: `[heads, L, head_dim]`.
        key_states: `[kv_heads, M, head_dim]`; every `heads / kv_heads` query heads share one.
        reduction: `"max"`, `"mean"` or `"sum"`.

    Returns:
        `[M]` float32 (float64 for float64 states).
    """
    precise = torch.promote_types(key_states.dtype, torch.float32)
    keys = key_states.to(precise).repeat_interleave(len(query_states) // len(key_states), dim=0)
    scores = query_states.to(precise) @ keys.transpose(1, 2) / math.sqrt(keys.shape[-1])
    if reduction == "max":
        return scores.flatten(0, 1).log_softmax(-1).max(0).values
    if reduction == "mean":
        return scores.flatten(0, 1).softmax(-1).mean(0).log()
    return scores.sum(1).logsumexp(0).log_softmax(-1)


def naive_farthest(distance: torch.Tensor, similarity: torch.Tensor, n: int, tie: float) -> list[int]:
    """
    Indices of n tokens, ascending: again and again the one with the largest distance to the kept ones.

    Args:
        distance: `[M]`, before any token is kept.
        similarity: `[M, M]`; -inf for tokens that are out of reach of each other.
        tie: of distances that differ by at most this, the earliest token counts as the largest.
    """
    distance = distance.clone()
    kept: list[int] = []
    while len(kept) < n:
        is_largest = distance >= distance.max() - tie
        token = int(is_largest.int().argmax())
        kept.append(token)
        distance = torch.minimum(distance, 1 - similarity[token])
        distance[kept] = -torch.inf
    return sorted(kept)


def states(heads, kv_heads, num_queries, num_tokens, head_dim=16, dtype=torch.float32, seed=0, scale=1.0):
    """Queries `[heads, L, head_dim]` and keys `[kv_heads, M, head_dim]`, laid out as projections leave them."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_queries, heads, head_dim, generator=generator) * scale
    keys = torch.randn(num_tokens, kv_heads, head_dim, generator=generator)
    return tuple(x.to(dtype).transpose(0, 1).requires_grad_() for x in (queries, keys))


def has_one_maximum(queries, keys):
    """Tokens whose best row leads clearly: where two are equal but for rounding, there is no gradient to agree on."""
    with torch.no_grad():
        grouped = queries.float().reshape(len(keys), -1, queries.shape[-1])
        scores = grouped @ keys.float().transpose(1, 2) / queries.shape[-1] ** 0.5
        rows = (scores - scores.logsumexp(-1, keepdim=True)).flatten(0, 1)
        return (rows > rows.amax(0) - 1e-4).sum(0) == 1


def assert_equal_to_twin(kernel, queries, keys, relative=1e-5, reduction="max"):
    """
    Output and gradients of `kernel` differ by at most `relative` times the largest value, or 1, from those of the twin.
    The twin computes in float64: over 70,001 tokens its own float32 gradients are off by 2.6e-5.
    """
    weights = torch.randn(keys.shape[1], generator=torch.Generator().manual_seed(1))
    if reduction == "max":
        weights = weights.masked_fill(~has_one_maximum(queries, keys), 0)
    results = []
    twin = partial(naive_log_relevance, reduction=reduction)
    for function, dtype in ((kernel, queries.dtype), (twin, torch.float64)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (queries, keys)]
        log_r = function(*inputs)
        gradients = torch.autograd.grad((log_r * weights).sum(), inputs)
        assert all(gradient.dtype == dtype for gradient in gradients)
        results.append((log_r.detach(), *gradients))
    for name, mine, expected in zip(("log_r", "d queries", "d keys"), *results, strict=True):
        assert mine.shape == expected.shape
        finite = expected.isfinite()
        assert torch.equal(mine.isfinite(), finite), name
        mine = mine[finite].double()
        expected = expected[finite]
        largest = max([1.0, float(expected.abs().max())]) if len(expected) else 1.0
        torch.testing.assert_close(mine, expected, atol=relative * largest, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
