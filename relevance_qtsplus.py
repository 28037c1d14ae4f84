"""How much each visual token matters for a question: the log-relevance of lines 1 and 2 of the paper's Algorithm 1.

[`log_relevance`] is the way in; [`relevance_kernel`] chooses who computes it. The readable twin of all is
`qtsplus.kernels.naive`.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.autograd.function import once_differentiable
from transformers.utils import logging

logger = logging.get_logger(__name__)


def log_relevance(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    query_lengths: Sequence[int] | None = None,
    token_lengths: Sequence[int] | None = None,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    `log r_i = max over heads and query tokens of log softmax_i(q k / sqrt(d_h))`; the softmax runs over all M visual
    tokens of a sample.

    Where several heads or query tokens share the maximum, the first of them in the order (head, query token) takes the
    whole gradient.

    Args:
        query_states: `[heads, L, head_dim]`.
        key_states: `[kv_heads, M, head_dim]`; every `heads / kv_heads` query heads share one.
        query_lengths, token_lengths: how many query and visual tokens each sample has, where several are packed one
            behind the other along L and M.
        token_mask: `[M]` bool; tokens that are `False` take no part and get minus infinity.

    Returns:
        `[M]` float32 (float64 for float64 states), at most 0.

    Raises:
        ValueError: query heads that the key/value heads do not divide, or lengths that do not add up.
    """
    (heads, num_queries, head_dim), (kv_heads, num_tokens, _) = query_states.shape, key_states.shape
    query_lengths = [num_queries] if query_lengths is None else list(query_lengths)
    token_lengths = [num_tokens] if token_lengths is None else list(token_lengths)
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads: expected a multiple of the {kv_heads} key/value heads.")
    if (sum(query_lengths), sum(token_lengths)) != (num_queries, num_tokens):
        raise ValueError(
            f"query_lengths={query_lengths} and token_lengths={token_lengths}: expected sums of {num_queries} and "
            f"{num_tokens}, the packed query and visual tokens."
        )
    masks = [None] * len(token_lengths) if token_mask is None else token_mask.split(token_lengths)
    kernel = relevance_kernel(key_states.device, key_states.dtype, head_dim)
    samples = [
        kernel(queries, keys, mask)
        for queries, keys, mask in zip(
            query_states.split(query_lengths, dim=1), key_states.split(token_lengths, dim=1), masks, strict=True
        )
    ]
    return samples[0] if len(samples) == 1 else torch.cat(samples)


@cache
def relevance_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Callable[..., torch.Tensor]:
    """The function that computes the log-relevance of one sample: Triton's on a GPU that runs it, else the chunked."""
    kernel: Callable[..., torch.Tensor] = chunked_log_relevance
    if device.type != "cuda" or torch.version.hip is not None:
        reason = "the Triton kernel is for NVIDIA GPUs"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reason = "the Triton kernel needs an Ampere GPU or a newer one"
    elif dtype not in (torch.float16, torch.bfloat16, torch.float32) or head_dim > 128:
        reason = "the Triton kernel takes 16- or 32-bit states and heads of up to 128"
    else:
        try:
            from qtsplus.kernels.triton_relevance import triton_log_relevance

            kernel, reason = triton_log_relevance, "qtsplus and triton are installed"
        except ImportError as error:
            reason = f"the Triton kernel cannot be imported: {error}"
    logger.info(f"Relevance on {device}, {dtype}, heads of {head_dim}: {kernel.__name__} ({reason}).")
    return kernel


def chunked_log_relevance(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    block_size: int | None = None,
) -> torch.Tensor:
    """
    [`log_relevance`] of one sample, in blocks of visual tokens: first the log-sum-exp, then the maximum.

    Memory beyond inputs, result and gradients is O(M + heads * L * block_size). Any block size gives the same result;
    gradients are exact, each block's scores being computed again.

    Args:
        block_size: visual tokens scored at a time; by default so many that a block has about 2 million scores.
    """
    kv_heads, _, head_dim = key_states.shape
    precise = torch.promote_types(key_states.dtype, torch.float32)
    queries = query_states.reshape(kv_heads, -1, head_dim).to(precise) / math.sqrt(head_dim)
    block_size = block_size or max(1, 2**21 // (kv_heads * queries.shape[1]))
    return _ChunkedLogRelevance.apply(queries, key_states, token_mask, block_size)


class _ChunkedLogRelevance(torch.autograd.Function):
    """
    With `s` the scores, `z` the log-sum-exp of each of their rows (head, query token), and `a_i` the row of token i's
    maximum: `log r_i = s[a_i, i] - z[a_i]`, so `ds[row, i] = g_i [row = a_i] - exp(s[row, i] - z[row]) G[row]`, where
    `g` is the gradient of log r and `G[row]` sums `g_i` over the tokens that `row` won.
    """

    @staticmethod
    def forward(ctx, queries, keys, token_mask, block_size):
        num_tokens = keys.shape[1]
        blocks = [slice(start, start + block_size) for start in range(0, num_tokens, block_size)]
        differentiable = any(ctx.needs_input_grad)
        log_r = queries.new_empty(num_tokens)
        winners = torch.empty(num_tokens if differentiable else 0, dtype=torch.long, device=keys.device)
        with torch.autocast(keys.device.type, enabled=False):
            normaliser = queries.new_full(queries.shape[:2], -math.inf)
            if blocks:
                normaliser = torch.stack([_scores(queries, keys, token_mask, b).logsumexp(-1) for b in blocks])
                normaliser = normaliser.logsumexp(0)
            # A row of masked tokens alone has no softmax; its scores stay minus infinity.
            normaliser = normaliser.masked_fill(normaliser == -math.inf, 0)[..., None]
            for block in blocks:
                log_attention = _scores(queries, keys, token_mask, block).sub_(normaliser).flatten(0, 1)
                if differentiable:  # rows last: finding the place of a maximum is five times slower across rows
                    log_r[block], winners[block] = log_attention.t().contiguous().max(-1)
                else:
                    log_r[block] = log_attention.amax(0)
        ctx.save_for_backward(queries, keys, token_mask, normaliser, winners)
        ctx.block_size = block_size
        return log_r

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        queries, keys, token_mask, normaliser, winners = ctx.saved_tensors
        if token_mask is not None:
            gradient = gradient.masked_fill(~token_mask, 0)
        won = torch.zeros_like(normaliser)
        won.view(-1).index_add_(0, winners, gradient)
        grad_queries, grad_keys = torch.zeros_like(queries), torch.empty_like(keys)
        with torch.autocast(keys.device.type, enabled=False):
            for start in range(0, keys.shape[1], ctx.block_size):
                block = slice(start, start + ctx.block_size)
                grad_scores = _scores(queries, keys, token_mask, block).sub_(normaliser).exp_().mul_(-won)
                grad_scores.view(-1, grad_scores.shape[-1]).scatter_add_(0, winners[None, block], gradient[None, block])
                grad_queries += grad_scores @ keys[:, block].to(queries.dtype)
                grad_keys[:, block] = grad_scores.transpose(1, 2) @ queries
        return grad_queries, grad_keys, None, None


def _scores(queries: torch.Tensor, keys: torch.Tensor, token_mask: torch.Tensor | None, block: slice) -> torch.Tensor:
    """`[kv_heads, heads / kv_heads * L, b]` of the visual tokens in `block`."""
    scores = queries @ keys[:, block].to(queries.dtype).transpose(1, 2)
    return scores if token_mask is None else scores.masked_fill_(~token_mask[block], -math.inf)


__all__ = ["chunked_log_relevance", "log_relevance", "relevance_kernel"]
