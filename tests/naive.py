"""The readable twins of what the Hub files compute in blocks, and how a kernel is compared with its twin."""

import math
from functools import partial

import torch
from torch import Tensor


def naive_log_relevance(
    query_states: Tensor,
    key_states: Tensor,
    reduction: str = "max",
) -> Tensor:
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
    heads_per_key = len(query_states) // len(key_states)
    keys = key_states.to(precise).repeat_interleave(heads_per_key, dim=0)
    scores = query_states.to(precise) @ keys.mT
    scores /= math.sqrt(keys.shape[-1])
    if reduction == "sum":
        return scores.sum(1).logsumexp(0).log_softmax(-1)
    rows = scores.flatten(0, 1)
    if reduction == "mean":
        return rows.softmax(-1).mean(0).log()
    return rows.log_softmax(-1).max(0).values


def naive_farthest(
    distance: Tensor,
    similarity: Tensor,
    n: int,
    tie: float,
) -> list[int]:
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


def states(
    heads,
    kv_heads,
    num_queries,
    num_tokens,
    head_dim=16,
    dtype=torch.float32,
    seed=0,
    scale=1.0,
):
    """Queries `[heads, L, head_dim]` and keys `[kv_heads, M, head_dim]`, laid out as projections leave them."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_queries, heads, head_dim, generator=generator)
    queries *= scale
    keys = torch.randn(num_tokens, kv_heads, head_dim, generator=generator)
    return (
        queries.to(dtype).transpose(0, 1).requires_grad_(),
        keys.to(dtype).transpose(0, 1).requires_grad_(),
    )


def has_one_maximum(queries, keys):
    """Tokens whose best row leads clearly: where two are equal but for rounding, there is no gradient to agree on."""
    head_dim = queries.shape[-1]
    with torch.no_grad():
        scores = queries.float().reshape(len(keys), -1, head_dim) @ keys.float().mT
        scores /= head_dim**0.5
        scores -= scores.logsumexp(-1, keepdim=True)
        rows = scores.flatten(0, 1)
        is_near_maximum = rows > rows.amax(0) - 1e-4
        return is_near_maximum.sum(0) == 1


def output_and_gradients(
    function,
    dtype,
    queries,
    keys,
    weights,
):
    """The log-relevance that `function` computes in `dtype`, and the gradients of its weighted sum."""
    inputs = [
        queries.detach().to(dtype).requires_grad_(),
        keys.detach().to(dtype).requires_grad_(),
    ]
    log_r = function(*inputs)
    d_queries, d_keys = torch.autograd.grad((log_r * weights).sum(), inputs)
    assert d_queries.dtype == dtype
    assert d_keys.dtype == dtype
    return {
        "log_r": log_r.detach(),
        "d queries": d_queries,
        "d keys": d_keys,
    }


def assert_equal_to_twin(
    kernel,
    queries,
    keys,
    relative=1e-5,
    reduction="max",
):
    """
    Output and gradients of `kernel` differ by at most `relative` times the largest value, or 1, from those of the twin.
    The twin computes in float64: over 70,001 tokens its own float32 gradients are off by 2.6e-5.
    """
    weights = torch.randn(keys.shape[1], generator=torch.Generator().manual_seed(1))
    if reduction == "max":
        weights[~has_one_maximum(queries, keys)] = 0
    twin = partial(naive_log_relevance, reduction=reduction)
    results = output_and_gradients(kernel, queries.dtype, queries, keys, weights)
    expected_results = output_and_gradients(twin, torch.float64, queries, keys, weights)
    for name, expected in expected_results.items():
        result = results[name]
        assert result.shape == expected.shape
        finite = expected.isfinite()
        assert torch.equal(result.isfinite(), finite), name
        expected = expected[finite]
        largest = 1.0
        if len(expected):
            largest = max(largest, float(expected.abs().max()))
        torch.testing.assert_close(
            result[finite].double(),
            expected,
            atol=relative * largest,
            rtol=0,
            msg=lambda message, name=name: f"{name}: {message}",
        )
