"""Relevance problems for the kernels, and how a kernel is compared with its readable twin."""

import torch

from qtsplus.kernels.naive import naive_log_relevance


def states(heads, kv_heads, num_queries, num_tokens, head_dim=16, dtype=torch.float32, seed=0, scale=1.0):
    """Queries `[heads, L, head_dim]` and keys `[kv_heads, M, head_dim]`, laid out as projections leave them."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_queries, heads, head_dim, generator=generator) * scale
    keys = torch.randn(num_tokens, kv_heads, head_dim, generator=generator)
    return tuple(x.to(dtype).transpose(0, 1).requires_grad_() for x in (queries, keys))


def a_mask(num_tokens, seed=0):
    mask = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[-1] = True
    return mask


def has_one_maximum(queries, keys, token_mask=None):
    """Tokens whose best row leads clearly: where two are equal but for rounding, there is no gradient to agree on."""
    with torch.no_grad():
        grouped = queries.float().reshape(len(keys), -1, queries.shape[-1])
        scores = grouped @ keys.float().transpose(1, 2) / queries.shape[-1] ** 0.5
        if token_mask is not None:
            scores = scores.masked_fill(~token_mask, -torch.inf)
        rows = (scores - scores.logsumexp(-1, keepdim=True)).flatten(0, 1)
        return (rows > rows.amax(0) - 1e-4).sum(0) == 1


def assert_equal_to_twin(kernel, queries, keys, token_mask=None, relative=1e-5):
    """Output and gradients of `kernel` and its twin differ by at most `relative` times the largest value, or 1."""
    weights = torch.randn(keys.shape[1], generator=torch.Generator().manual_seed(1))
    weights = weights.masked_fill(~has_one_maximum(queries, keys, token_mask), 0)
    results = []
    for function in (kernel, naive_log_relevance):
        log_r = function(queries, keys, token_mask)
        taking_part = log_r if token_mask is None else log_r[token_mask]
        value = (taking_part * (weights if token_mask is None else weights[token_mask])).sum()
        results.append((log_r.detach(), *torch.autograd.grad(value, (queries, keys))))
    for name, mine, expected in zip(("log_r", "d queries", "d keys"), *results, strict=True):
        assert mine.dtype == expected.dtype and mine.shape == expected.shape
        finite = expected.isfinite()
        assert torch.equal(mine.isfinite(), finite), name
        largest = float(expected[finite].abs().max().clamp(min=1)) if finite.any() else 1.0
        torch.testing.assert_close(
            mine[finite], expected[finite], atol=relative * largest, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
