"""The readable twin of the relevance kernels."""

import math

import torch


def naive_log_relevance(
    query_states: torch.Tensor, key_states: torch.Tensor, token_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """
    `log r_i = max over heads and query tokens of log softmax_i(q k / sqrt(d_h))`, all scores at once.

    Of equal maxima the first, in the order (head, query token), takes the gradient.

    Args:
        query_states: `[heads, L, head_dim]`.
        key_states: `[kv_heads, M, head_dim]`; every `heads / kv_heads` query heads share one.
        token_mask: `[M]` bool; tokens that are `False` take no part and get minus infinity.

    Returns:
        `[M]` float32 (float64 for float64 states).
    """
    precise = torch.promote_types(key_states.dtype, torch.float32)
    keys = key_states.to(precise).repeat_interleave(len(query_states) // len(key_states), dim=0)
    scores = query_states.to(precise) @ keys.transpose(1, 2) / math.sqrt(keys.shape[-1])
    if token_mask is not None:
        scores = scores.masked_fill(~token_mask, -math.inf)
    log_r = scores.log_softmax(-1).flatten(0, 1).max(0).values
    return log_r if token_mask is None else log_r.masked_fill(~token_mask, -math.inf)
