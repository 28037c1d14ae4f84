"""Relevance on a GPU: `chunked_log_relevance`'s two passes and their gradient as Triton kernels.

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
    kv_heads, _, head_dim = key_states.shape
    dtype = torch.promote_types(query_states.dtype, key_states.dtype)
    rows = query_states.reshape(kv_heads, -1, head_dim)
    # Tokens first, as the projection leaves them in memory: no copy.
    by_maximum = reduction == "max"
    reduced = _TritonLogRelevance.apply(rows.to(dtype), key_states.transpose(0, 1).to(dtype), by_maximum)
    return reduced if by_maximum else reduced - math.log(rows.shape[0] * rows.shape[1])


class _TritonLogRelevance(torch.autograd.Function):
    """The gradient is derived at `_ChunkedReduction` in relevance_qtsplus.py."""

    @staticmethod
    def forward(ctx, queries, keys, by_maximum):
        queries, keys = queries.contiguous(), keys.contiguous()
        problem = _Problem(queries, keys)
        partial = problem.partial_rows()
        problem.launch(_logsumexp_kernel, problem.row_grid, partial, problem.split_size)
        normaliser = partial.logsumexp(0)

        log_r = queries.new_empty(len(keys), dtype=torch.float32)
        if by_maximum:
            winners = queries.new_empty(len(keys), dtype=torch.int32)
            problem.launch(_max_kernel, (problem.token_blocks,), normaliser, log_r, winners)
        else:
            problem.launch(_sum_kernel, (problem.token_blocks,), normaliser, log_r)
        ctx.save_for_backward(queries, keys, normaliser, winners if by_maximum else log_r)
        ctx.by_maximum = by_maximum
        return log_r

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        queries, keys, normaliser, reduced = ctx.saved_tensors
        gradient = gradient.float().contiguous()
        problem = _Problem(queries, keys)
        if ctx.by_maximum:
            row_sums = torch.zeros_like(normaliser)
            row_sums.view(-1).index_add_(0, reduced.long(), gradient)
        else:
            partial = problem.partial_rows()
            problem.launch(
                _row_sums_kernel, problem.row_grid, normaliser, reduced, gradient, partial, problem.split_size
            )
            row_sums = partial.sum(0)
        about_tokens = (normaliser, reduced, gradient, row_sums)

        grad_keys = torch.empty_like(keys)
        tokens = (problem.token_blocks, problem.kv_heads)
        problem.launch(_grad_keys_kernel, tokens, *about_tokens, grad_keys, BY_MAXIMUM=ctx.by_maximum)
        partial = queries.new_empty(problem.splits, *queries.shape, dtype=torch.float32)
        queries_at = (*about_tokens, partial, problem.split_size)
        problem.launch(_grad_queries_kernel, problem.row_grid, *queries_at, BY_MAXIMUM=ctx.by_maximum)
        return partial.sum(0).to(queries.dtype), grad_keys, None


class _Problem:
    """What all kernels take: the states, their sizes and how they are cut."""

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor):
        self.queries, self.keys = queries, keys
        _, self.num_rows, self.head_dim = queries.shape
        self.num_tokens, self.kv_heads, _ = keys.shape
        self.row_blocks = triton.cdiv(self.num_rows, BLOCK_R)
        # With these and 8 warps, heads of up to 128 numbers stay in registers and fit the smallest shared memory.
        self.block_m = 32 if keys.dtype == torch.float32 else 64
        self.token_blocks = triton.cdiv(self.num_tokens, self.block_m)
        blocks_per_split = max(LEAST_SPLIT // self.block_m, triton.cdiv(self.token_blocks, MOST_SPLITS))
        self.split_size = blocks_per_split * self.block_m
        self.splits = max(1, triton.cdiv(self.num_tokens, self.split_size))
        self.row_grid = (self.row_blocks, self.kv_heads, self.splits)

    def partial_rows(self) -> torch.Tensor:
        """A number for each row and split, `[splits, kv_heads, num_rows]`."""
        return self.queries.new_empty(self.splits, self.kv_heads, self.num_rows, dtype=torch.float32)

    def launch(self, kernel, grid: tuple[int, ...], *arguments, **constants):
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
                **constants,
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
def _shares(scores, log_sum, reduced, gradient, tokens, num_tokens):
    """`g_i exp(s - z - y_i)`, `[BLOCK_R, BLOCK_M]` float32: the shares that rows have in the sums of some tokens."""
    log_r = tl.load(reduced + tokens, mask=tokens < num_tokens, other=0.0)
    incoming = tl.load(gradient + tokens, mask=tokens < num_tokens, other=0.0)
    return tl.exp(scores - log_sum[:, None] - log_r[None, :]) * incoming[None, :]


@triton.jit
def _grad_scores(
    scores,
    normaliser,
    reduced,
    gradient,
    row_sums,
    head,
    rows,
    tokens,
    num_rows,
    num_tokens,
    BY_MAXIMUM: tl.constexpr,
):
    """`g_i w - exp(s - z) G[row]`, `[BLOCK_R, BLOCK_M]` float32; `w` is 1 in the row of the maximum, or a share."""
    indices = head * num_rows + rows
    inside = rows < num_rows
    log_sum = tl.load(normaliser + indices, mask=inside, other=float("inf"))
    row_sum = tl.load(row_sums + indices, mask=inside, other=0.0)
    if BY_MAXIMUM:
        winner = tl.load(reduced + tokens, mask=tokens < num_tokens, other=-1)
        incoming = tl.load(gradient + tokens, mask=tokens < num_tokens, other=0.0)
        direct = tl.where((winner[None, :] == indices[:, None]) & inside[:, None], incoming[None, :], 0.0)
    else:
        direct = _shares(scores, log_sum, reduced, gradient, tokens, num_tokens)
    return direct - tl.exp(scores - log_sum[:, None]) * row_sum[:, None]


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
def _max_kernel(
    queries,
    keys,
    num_rows,
    num_tokens,
    kv_heads,
    scale,
    normaliser,
    log_r,
    winners,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Log-relevance of some tokens, and the row (counted through all heads) that gives it; the first of equal ones."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    winner = tl.zeros([BLOCK_M], tl.int32)
    for head in range(0, kv_heads):
        key = _load_keys(keys, head, tokens, num_tokens, kv_heads, HEAD_DIM, BLOCK_D)
        for first in range(0, num_rows, BLOCK_R):
            rows = first + tl.arange(0, BLOCK_R)
            query = _load_queries(queries, head, rows, num_rows, HEAD_DIM, BLOCK_D)
            scores = _scores(query, key, tokens, num_tokens, scale, PRECISION)
            log_sum = tl.load(normaliser + head * num_rows + rows, mask=rows < num_rows, other=float("inf"))
            value, place = tl.max(scores - log_sum[:, None], 0, return_indices=True)
            winner = tl.where(value > best, head * num_rows + first + place, winner)
            best = tl.maximum(best, value)
    tl.store(log_r + tokens, best, mask=tokens < num_tokens)
    tl.store(winners + tokens, winner, mask=tokens < num_tokens)


@triton.jit
def _sum_kernel(
    queries,
    keys,
    num_rows,
    num_tokens,
    kv_heads,
    scale,
    normaliser,
    log_r,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Log of what all rows of all heads sum to, for some tokens."""
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
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(highest - shift) + tl.sum(tl.exp(scores - shift[None, :]), 0)
            highest = higher
    log_total = highest + tl.log(tl.where(total > 0.0, total, 1.0))
    tl.store(log_r + tokens, log_total, mask=tokens < num_tokens)


@triton.jit
def _row_sums_kernel(
    queries,
    keys,
    num_rows,
    num_tokens,
    kv_heads,
    scale,
    normaliser,
    reduced,
    gradient,
    partial,
    split_size,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """What the shares of some rows sum to over one split of the tokens: `partial[split, head, row]`."""
    head, split = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    query = _load_queries(queries, head, rows, num_rows, HEAD_DIM, BLOCK_D)
    log_sum = tl.load(normaliser + head * num_rows + rows, mask=rows < num_rows, other=float("inf"))
    total = tl.zeros([BLOCK_R], tl.float32)
    start = split * split_size
    for first in range(start, tl.minimum(start + split_size, num_tokens), BLOCK_M):
        tokens = first + tl.arange(0, BLOCK_M)
        key = _load_keys(keys, head, tokens, num_tokens, kv_heads, HEAD_DIM, BLOCK_D)
        scores = _scores(query, key, tokens, num_tokens, scale, PRECISION)
        total += tl.sum(_shares(scores, log_sum, reduced, gradient, tokens, num_tokens), 1)
    places = (split * kv_heads + head) * num_rows + rows
    tl.store(partial + places, total, mask=rows < num_rows)


@triton.jit
def _grad_keys_kernel(
    queries,
    keys,
    num_rows,
    num_tokens,
    kv_heads,
    scale,
    normaliser,
    reduced,
    gradient,
    row_sums,
    grad_keys,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BY_MAXIMUM: tl.constexpr,
):
    """`ds^T q` for some tokens and one key/value head."""
    head = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    key = _load_keys(keys, head, tokens, num_tokens, kv_heads, HEAD_DIM, BLOCK_D)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, num_rows, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        query = _load_queries(queries, head, rows, num_rows, HEAD_DIM, BLOCK_D)
        scores = _scores(query, key, tokens, num_tokens, scale, PRECISION)
        grad_scores = _grad_scores(
            scores, normaliser, reduced, gradient, row_sums, head, rows, tokens, num_rows, num_tokens, BY_MAXIMUM
        )
        total += tl.dot(tl.trans(grad_scores), query, input_precision="tf32x3")
    columns = tl.arange(0, BLOCK_D)
    places = (tokens.to(tl.int64) * kv_heads + head)[:, None] * HEAD_DIM + columns[None, :]
    inside = (tokens < num_tokens)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(grad_keys + places, (total * scale).to(grad_keys.dtype.element_ty), mask=inside)


@triton.jit
def _grad_queries_kernel(
    queries,
    keys,
    num_rows,
    num_tokens,
    kv_heads,
    scale,
    normaliser,
    reduced,
    gradient,
    row_sums,
    partial,
    split_size,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BY_MAXIMUM: tl.constexpr,
):
    """`ds k` for some rows over one split of the tokens: `partial[split, head, row]`."""
    head, split = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    query = _load_queries(queries, head, rows, num_rows, HEAD_DIM, BLOCK_D)
    total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    start = split * split_size
    for first in range(start, tl.minimum(start + split_size, num_tokens), BLOCK_M):
        tokens = first + tl.arange(0, BLOCK_M)
        key = _load_keys(keys, head, tokens, num_tokens, kv_heads, HEAD_DIM, BLOCK_D)
        scores = _scores(query, key, tokens, num_tokens, scale, PRECISION)
        grad_scores = _grad_scores(
            scores, normaliser, reduced, gradient, row_sums, head, rows, tokens, num_rows, num_tokens, BY_MAXIMUM
        )
        total += tl.dot(grad_scores, key, input_precision="tf32x3")
    columns = tl.arange(0, BLOCK_D)
    places = ((split * kv_heads + head) * num_rows + rows)[:, None] * HEAD_DIM + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(partial + places, total * scale, mask=inside)
