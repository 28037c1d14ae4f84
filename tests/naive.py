"""The readable twin of the relevance that the Hub files compute in blocks."""

import math

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
