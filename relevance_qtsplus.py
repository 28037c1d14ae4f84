"""How much each visual token matters for a question: the log-relevance of lines 1 and 2 of the paper's Algorithm 1.

With `s` the scores `q k / sqrt(d_h)` of a sample, and their rows (one for each head and query token), a reduction makes
one number of a token's column:

- `"max"`, the paper's: `log r_i = max over rows of log softmax_i(s)`.
- `"mean"`: `log r_i = log of the mean over rows of softmax_i(s)`.
- `"sum"`: `log r_i = log softmax_i(logsumexp over heads of the sum over query tokens of s)`, one softmax for all.

Every softmax runs over the M visual tokens. So r sums to 1 for all but the maximum, where it sums to between 1 and the
number of rows. In the first two a token matters if any word speaks for it; in the sum, if the words do together: "the
yellow ring" is neither any ring nor anything yellow.

[`log_relevance`] is the way in; [`relevance_kernel`] chooses who computes it. The readable twin of all is
`qtsplus.kernels.naive`.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch.autograd.function import once_differentiable
from transformers.utils import logging

logger = logging.get_logger(__name__)

REDUCTIONS = ("max", "mean", "sum")


def log_relevance(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    query_lengths: Sequence[int] | None = None,
    token_lengths: Sequence[int] | None = None,
    token_mask: torch.Tensor | None = None,
    reduction: str = "max",
) -> torch.Tensor:
    """
    The log-relevance of each visual token; see the head of this file.

    Where several heads or query tokens share the maximum, the first of them in the order (head, query token) takes the
    whole gradient.

    Args:
        query_states: `[heads, L, head_dim]`.
        key_states: `[kv_heads, M, head_dim]`; every `heads / kv_heads` query heads share one.
        query_lengths, token_lengths: how many query and visual tokens each sample has, where several are packed one
            behind the other along L and M.
        token_mask: `[M]` bool; tokens that are `False` take no part and get minus infinity.
        reduction: over heads and query tokens, one of `REDUCTIONS`.

    Returns:
        `[M]` float32 (float64 for float64 states), at most 0.

    Raises:
        ValueError: query heads that the key/value heads do not divide, lengths that do not add up, or an unknown
            reduction.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: expected one of {REDUCTIONS}.")
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
    kernel = relevance_kernel(key_states.device, key_states.dtype, head_dim, reduction)
    samples = [
        kernel(queries, keys, mask)
        for queries, keys, mask in zip(
            query_states.split(query_lengths, dim=1), key_states.split(token_lengths, dim=1), masks, strict=True
        )
    ]
    return samples[0] if len(samples) == 1 else torch.cat(samples)


@cache
def relevance_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, reduction: str = "max"
) -> Callable[..., torch.Tensor]:
    """The function that computes the log-relevance of one sample: Triton's on a GPU that runs it, else the chunked."""
    kernel: Callable[..., torch.Tensor] = chunked_log_relevance
    if reduction != "max":
        reason = "the Triton kernel knows the maximum alone"
    elif device.type != "cuda" or torch.version.hip is not None:
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
    logger.info(f"Relevance ({reduction}) on {device}, {dtype}, heads of {head_dim}: {kernel.__name__} ({reason}).")
    return kernel if reduction == "max" else partial(kernel, reduction=reduction)


def chunked_log_relevance(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    block_size: int | None = None,
    reduction: str = "max",
) -> torch.Tensor:
    """
    [`log_relevance`] of one sample, in blocks of visual tokens: first the log-sum-exp of each row, then the reduction.
    For the sum first the reduction, then one log-sum-exp over the tokens.

    Memory beyond inputs, result and gradients is O(M + heads * L * block_size). Any block size gives the same result;
    gradients are exact, each block's scores being computed again.

    Args:
        block_size: visual tokens scored at a time; by default so many that a block has about 2 million scores.
    """
    kv_heads, _, head_dim = key_states.shape
    precise = torch.promote_types(key_states.dtype, torch.float32)
    if reduction == "sum":  # the sum of the scores is the score of the sum
        query_states = query_states.sum(1, keepdim=True, dtype=precise)
    queries = query_states.reshape(kv_heads, -1, head_dim).to(precise) / math.sqrt(head_dim)
    rows = kv_heads * queries.shape[1]
    block_size = block_size or max(1, 2**21 // rows)
    reduced = _ChunkedReduction.apply(queries, key_states, token_mask, block_size, reduction)
    if reduction == "mean":
        return reduced - math.log(rows)
    if reduction == "sum":
        # Where no token takes part there is no softmax, and all stay minus infinity.
        return reduced - torch.where((reduced > -math.inf).any(), reduced, 0.0).logsumexp(0)
    return reduced


class _ChunkedReduction(torch.autograd.Function):
    """
    With `s` the scores, and `z` the log-sum-exp of each of their rows (0 for `"sum"`): the maximum over rows of
    `s - z`, or their log-sum-exp, `y_i`.

    `w` is a token's share of each row in that: 1 in the row of the maximum, or `exp(s[row, i] - z[row] - y_i)`. Then
    `ds[row, i] = g_i w[row, i] - exp(s[row, i] - z[row]) G[row]`, where `g` is the gradient of y and `G[row]` sums
    `g_i w[row, i]` over the tokens. Without a `z` there is no second term.
    """

    @staticmethod
    def forward(ctx, queries, keys, token_mask, block_size, reduction):
        num_tokens = keys.shape[1]
        blocks = _blocks(num_tokens, block_size)
        by_maximum = reduction == "max"
        differentiable = any(ctx.needs_input_grad)
        reduced = queries.new_empty(num_tokens)
        winners = torch.empty(num_tokens if differentiable and by_maximum else 0, dtype=torch.long, device=keys.device)
        with torch.autocast(keys.device.type, enabled=False):
            normaliser = queries.new_zeros(queries.shape[:2])
            if blocks and reduction != "sum":
                normaliser = torch.stack([_scores(queries, keys, token_mask, b).logsumexp(-1) for b in blocks])
                normaliser = normaliser.logsumexp(0)
            # A row of masked tokens alone has no softmax; its scores stay minus infinity.
            normaliser = normaliser.masked_fill(normaliser == -math.inf, 0)[..., None]
            for block in blocks:
                log_attention = _scores(queries, keys, token_mask, block).sub_(normaliser).flatten(0, 1)
                if not by_maximum:
                    reduced[block] = log_attention.logsumexp(0)
                elif differentiable:  # rows last: finding the place of a maximum is five times slower across rows
                    reduced[block], winners[block] = log_attention.t().contiguous().max(-1)
                else:
                    reduced[block] = log_attention.amax(0)
        # Masked tokens have no gradient; any finite number in the place of minus infinity keeps their shares at 0.
        finite = None if by_maximum else reduced.masked_fill(reduced == -math.inf, 0)
        ctx.save_for_backward(queries, keys, token_mask, normaliser, winners, finite)
        ctx.block_size, ctx.reduction = block_size, reduction
        return reduced

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        queries, keys, token_mask, normaliser, winners, reduced = ctx.saved_tensors
        blocks = _blocks(keys.shape[1], ctx.block_size)
        if token_mask is not None:
            gradient = gradient.masked_fill(~token_mask, 0)
        grad_queries, grad_keys = torch.zeros_like(queries), torch.empty_like(keys)
        won = torch.zeros_like(normaliser)  # G
        with torch.autocast(keys.device.type, enabled=False):
            if ctx.reduction == "max":
                won.view(-1).index_add_(0, winners, gradient)
            elif ctx.reduction == "mean":
                for block in blocks:
                    log_attention = _scores(queries, keys, token_mask, block).sub_(normaliser)
                    won += log_attention.sub_(reduced[block]).exp_().mul_(gradient[block]).sum(-1, keepdim=True)
            for block in blocks:
                log_attention = _scores(queries, keys, token_mask, block).sub_(normaliser)
                if ctx.reduction == "max":
                    grad_scores = log_attention.exp_().mul_(-won)
                    rows = grad_scores.view(-1, grad_scores.shape[-1])
                    rows.scatter_add_(0, winners[None, block], gradient[None, block])
                else:
                    shares = (log_attention - reduced[block]).exp_().mul_(gradient[block])
                    grad_scores = shares.sub_(log_attention.exp_().mul_(won)) if ctx.reduction == "mean" else shares
                grad_queries += grad_scores @ keys[:, block].to(queries.dtype)
                grad_keys[:, block] = grad_scores.transpose(1, 2) @ queries
        return grad_queries, grad_keys, None, None, None


def _blocks(num_tokens: int, block_size: int) -> list[slice]:
    return [slice(start, start + block_size) for start in range(0, num_tokens, block_size)]


def _scores(queries: torch.Tensor, keys: torch.Tensor, token_mask: torch.Tensor | None, block: slice) -> torch.Tensor:
    """`[kv_heads, heads / kv_heads * L, b]` of the visual tokens in `block`."""
    scores = queries @ keys[:, block].to(queries.dtype).transpose(1, 2)
    return scores if token_mask is None else scores.masked_fill_(~token_mask[block], -math.inf)


__all__ = ["REDUCTIONS", "chunked_log_relevance", "log_relevance", "relevance_kernel"]
