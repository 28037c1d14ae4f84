"""Relevance on a GPU: `chunked_log_relevance`'s two passes as Triton kernels.

No scores leave the chip. A program holds `BLOCK_R` queries (of the `heads / kv_heads * L` that share a key/value
head) against some visual tokens. Where the rows are too few programs to fill a GPU, the visual tokens are split among
several, whose partial results PyTorch adds up. All arithmetic has float32's precision.

`TRITON_INTERPRET=1`, set before the import, runs the kernels on a CPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ..relevance_qtsplus import chunked_log_relevance

BLOCK_R = 32
LEAST_SPLIT = 2048  # visual tokens of a program that walks along them
MOST_SPLITS = 64


def triton_log_relevance(query_states: torch.Tensor, key_states: torch.Tensor, reduction: str = "max") -> torch.Tensor:
    """
    Log-relevance of one sample; as `chunked_log_relevance`, its gradient convention included.

    Args:
        query_states: `[heads, L, head_dim]`, float16, bfloat16 or float32.
        key_states: `[kv_heads, M, head_dim]`.
        reduction: `"max"` or `"mean"`, over heads and query tokens.

    Returns:
        `[M]` float32.
    """
    dtype = torch.promote_types(query_states.dtype, key_states.dtype)
    return _TritonLogRelevance.apply(query_states.to(dtype), key_states.to(dtype), reduction)


class _TritonLogRelevance(torch.autograd.Function):
    """The way back is PyTorch's in blocks, which a training step hardly notices."""

    @staticmethod
    def forward(ctx, query_states, key_states, reduction):
        ctx.save_for_backward(query_states, key_states)
        ctx.reduction = reduction
        queries = query_states.reshape(len(key_states), -1, key_states.shape[-1]).contiguous()
        keys = key_states.transpose(0, 1).contiguous()  # as the projection leaves them in memory: no copy
        problem = _Problem(queries, keys)
        sums = queries.new_empty(problem.splits, *queries.shape[:2], dtype=torch.float32)
        problem.launch(_logsumexp_kernel, problem.row_grid, sums, problem.split_size)
        log_r = queries.new_empty(len(keys), dtype=torch.float32)
        problem.launch(_reduce_kernel, (problem.token_blocks,), sums.logsumexp(0), log_r, reduction == "max")
        return log_r if reduction == "max" else log_r - math.log(queries.shape[0] * queries.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        states = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        queries, keys = states
        with torch.enable_grad():
            log_r = chunked_log_relevance(queries, keys, reduction=ctx.reduction)
        return *torch.autograd.grad(log_r, states, gradient), None


class _Problem:
    """What all kernels take: the states, their sizes and how they are cut."""

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor):
        self.queries, self.keys = queries, keys
        _, self.num_rows, self.head_dim = queries.shape
        self.num_tokens, self.kv_heads, _ = keys.shape
        # With these and 8 warps, heads of up to 128 numbers stay in registers and fit the smallest shared memory.
        self.block_m = 32 if keys.dtype == torch.float32 else 64
        self.token_blocks = triton.cdiv(self.num_tokens, self.block_m)
        blocks_per_split = max(LEAST_SPLIT // self.block_m, triton.cdiv(self.token_blocks, MOST_SPLITS))
        self.split_size = blocks_per_split * self.block_m
        self.splits = max(1, triton.cdiv(self.num_tokens, self.split_size))
        self.row_grid = (triton.cdiv(self.num_rows, BLOCK_R), self.kv_heads, self.splits)

    def launch(self, kernel, grid: tuple[int, ...], *arguments):
        with torch.cuda.device_of(self.keys):
            kernel[grid](
                self.queries,
                self.keys,
                self.num_rows,
                self.num_tokens,
                self.kv_heads,
                1 / math.sqrt(self.head_dim),
                *arguments,
                # TF32 holds every 16-bit number; float32 takes three products of it.
                PRECISION="tf32x3" if self.keys.dtype == torch.float32 else "tf32",
                HEAD_DIM=self.head_dim,
                BLOCK_D=max(16, triton.next_power_of_2(self.head_dim)),
                BLOCK_R=BLOCK_R,
                BLOCK_M=self.block_m,
                num_warps=8,
                num_stages=1,
            )


@triton.jit
def _load_queries(queries, head, rows, num_rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[BLOCK_R, BLOCK_D]` float32, zeros outside."""
    columns = tl.arange(0, BLOCK_D)
    places = (head * num_rows + rows)[:, None] * HEAD_DIM + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(queries + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_keys(keys, head, tokens, num_tokens, kv_heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[BLOCK_M, BLOCK_D]` float32, zeros outside."""
    columns = tl.arange(0, BLOCK_D)
    places = (tokens.to(tl.int64) * kv_heads + head)[:, None] * HEAD_DIM + columns[None, :]
    inside = (tokens < num_tokens)[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(keys + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scores(queries, keys, tokens, num_tokens, scale, PRECISION: tl.constexpr):
    """`[BLOCK_R, BLOCK_M]` float32; minus infinity behind the last token."""
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    return tl.where((tokens < num_tokens)[None, :], scores, -float("inf"))


@triton.jit
def _logsumexp_kernel(
    queries,
    keys,
    num_rows,
    num_tokens,
    kv_heads,
    scale,
    log_sums,
    split_size,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Log-sum-exp of some rows over one split of the tokens: `log_sums[split, head, row]`."""
    head, split = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    query = _load_queries(queries, head, rows, num_rows, HEAD_DIM, BLOCK_D)
    highest = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    start = split * split_size
    for first in range(start, tl.minimum(start + split_size, num_tokens), BLOCK_M):
        tokens = first + tl.arange(0, BLOCK_M)
        key = _load_keys(keys, head, tokens, num_tokens, kv_heads, HEAD_DIM, BLOCK_D)
        scores = _scores(query, key, tokens, num_tokens, scale, PRECISION)
        higher = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(scores - shift[:, None]), 1)
        highest = higher
    # Without a token: minus infinity + log 1.
    log_sum = highest + tl.log(tl.where(total > 0.0, total, 1.0))
    places = (split * kv_heads + head) * num_rows + rows
    tl.store(log_sums + places, log_sum, mask=rows < num_rows)


@triton.jit
def _reduce_kernel(
    queries,
    keys,
    num_rows,
    num_tokens,
    kv_heads,
    scale,
    normaliser,
    log_r,
    BY_MAXIMUM: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """For some tokens, the most that a row of any head gives, or the log of what all rows sum to."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for head in range(0, kv_heads):
        key = _load_keys(keys, head, tokens, num_tokens, kv_heads, HEAD_DIM, BLOCK_D)
        for first in range(0, num_rows, BLOCK_R):
            rows = first + tl.arange(0, BLOCK_R)
            query = _load_queries(queries, head, rows, num_rows, HEAD_DIM, BLOCK_D)
            scores = _scores(query, key, tokens, num_tokens, scale, PRECISION)
            log_sum = tl.load(normaliser + head * num_rows + rows, mask=rows < num_rows, other=float("inf"))
            scores = scores - log_sum[:, None]
            higher = tl.maximum(highest, tl.max(scores, 0))
            if not BY_MAXIMUM:
                shift = tl.where(higher == -float("inf"), 0.0, higher)
                total = total * tl.exp(highest - shift) + tl.sum(tl.exp(scores - shift[None, :]), 0)
            highest = higher
    if not BY_MAXIMUM:
        highest += tl.log(tl.where(total > 0.0, total, 1.0))
    tl.store(log_r + tokens, highest, mask=tokens < num_tokens)
