"""The query-aware token selector: Algorithm 1 of the paper, from relevance to the re-encoded tokens.

Independent of any backbone. Pure functions over one sample come first, in the paper's order; the modules and
[`QTSplusSelector`], which runs them over a ragged batch, follow. Symbols are the paper's, as words: visual (X,
`[M, d]`), query (Q, `[L, d]`), relevance (r), rho, budget n, threshold t, tau_s, kept indices (I).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput, logging

logger = logging.get_logger(__name__)

EPSILON = 1e-8  # inside the normalisation and the logarithm of the entropy

# --------------------------------------------------------------------------------------------------------------------
# The query Q: which tokens of a prompt are the question
# --------------------------------------------------------------------------------------------------------------------


def find_query_mask(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    user_turn_token_ids: list[int],
    turn_end_token_id: int,
    special_token_ids: list[int],
    video_token_id: int | None = None,
    frame_text_token_ids: list[int] | tuple[int, ...] = (),
) -> torch.Tensor:
    """
    Marks the question in a chat prompt: the text of the last user turn, without its header, special and vision tokens.

    Args:
        input_ids: `[B, S]` token ids of prompts made with the chat template.
        attention_mask: `[B, S]`, 1 on real tokens, or `None`.
        user_turn_token_ids: the ids that open a user's turn; the one token after them (the line break) is skipped.
        turn_end_token_id: the id that closes a turn.
        special_token_ids: ids that are never part of a question.
        video_token_id, frame_text_token_ids: the placeholder of a video, and the ids that open the text which some
            backbones write in front of every frame ("Frame1: ", "<0.5 seconds>"); it is no part of a question either.

    Returns:
        `[B, S]` int64, 1 on the question's tokens. A row without a user turn is all 0.
    """
    special = torch.tensor(special_token_ids, device=input_ids.device)
    eligible = ~torch.isin(input_ids, special)
    if attention_mask is not None:
        eligible &= attention_mask.bool()

    header = torch.tensor(user_turn_token_ids, device=input_ids.device)
    mask = torch.zeros_like(input_ids)
    if input_ids.shape[1] < len(header):
        return mask
    opens = (input_ids.unfold(1, len(header), 1) == header).all(-1)
    for row in range(input_ids.shape[0]):
        starts = opens[row].nonzero()
        if len(starts) == 0:
            continue
        start = int(starts[-1]) + len(header) + 1
        ends = (input_ids[row, start:] == turn_end_token_id).nonzero()
        stop = start + int(ends[0]) if len(ends) else input_ids.shape[1]
        mask[row, start:stop] = eligible[row, start:stop].long()
        if frame_text_token_ids:
            ids = input_ids[row, start:stop].tolist()
            for first, last in _frame_texts(ids, video_token_id, frame_text_token_ids):
                mask[row, start + first : start + last] = 0
    return mask


def _frame_texts(ids: list[int], video_token_id: int | None, openers, longest: int = 16):
    """(start, stop) of the text in front of every frame; it ends with the one token that opens the frame's tokens."""
    frames = [i for i in range(1, len(ids)) if ids[i] == video_token_id != ids[i - 1]]
    for frame in frames:
        start = next((i for i in range(frame - 1, max(frame - longest, 0) - 1, -1) if ids[i] in openers), frame)
        if start < frame and video_token_id in ids[max(start - 3, 0) : start]:
            start -= 1  # the line break behind the frame before, or the token that closes it
        yield start, frame


# --------------------------------------------------------------------------------------------------------------------
# Lines 1-2: relevance
# --------------------------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------------------------
# Lines 3-4: budget
# --------------------------------------------------------------------------------------------------------------------


def budget_features(query: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
    """
    What the budget head sees: `[s_q, log M, max r, H(p)]`, float32 `[d + 3]`, with `p = r / sum r` and `H` its entropy.

    Args:
        query: `[L, d]` embeddings of the question.
        relevance: `[M]` float32.
    """
    p = relevance / (relevance.sum() + EPSILON)
    entropy = -(p * (p + EPSILON).log()).sum()
    log_m = torch.full_like(entropy, math.log(len(relevance)))
    return torch.cat([query.float().mean(0), torch.stack([log_m, relevance.max(), entropy])])


def kept_count(rho: float, num_tokens: int, n_max: int) -> int:
    """`n = min(ceil(rho M), n_max)`, at least 1."""
    # A product such as 0.07 * 100 = 7.000000000000001 must not cost a token more.
    return max(1, min(math.ceil(round(rho * num_tokens, 6)), n_max))


# --------------------------------------------------------------------------------------------------------------------
# Algorithm 2: threshold
# --------------------------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------------------------
# Lines 5-14: gate
# --------------------------------------------------------------------------------------------------------------------


def top_n(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Indices of the n largest scores, ascending: `[n]` int64."""
    return scores.topk(n, sorted=False).indices.sort().values


def gumbel_noise(num_tokens: int, device: torch.device) -> torch.Tensor:
    """
    Standard Gumbel noise for (keep, drop), from torch's global generator: `[M, 2]` float32.

    The selector draws it row by row: however a batch is cut into micro-batches, its rows see the same noise. The
    processes of a distributed run draw their own, so with them only the expectation is that of one big batch.
    """
    return -torch.empty(num_tokens, 2, device=device).exponential_().log()


def gumbel_gate(
    relevance: torch.Tensor, target: torch.Tensor, tau_s: float, n_max: int, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The paper's training gate: hard Gumbel-softmax over `[r - t, 0]` with a straight-through gradient.

    Args:
        relevance: `[M]` float32.
        target: scalar tensor, the tokens that the threshold aims at.
        n_max: cap on the kept tokens; the sampled count itself is free below it.
        noise: `[M, 2]`, drawn if `None`.

    Returns:
        kept indices `[n]` ascending, their gates `[n]` (value 1, soft gradient), threshold t (scalar).
    """
    noise = gumbel_noise(len(relevance), relevance.device) if noise is None else noise
    threshold = find_threshold(relevance, target, tau_s)
    margin = relevance - threshold + noise[:, 0] - noise[:, 1]
    kept = (margin.detach() >= 0).nonzero()[:, 0]
    if len(kept) == 0:
        kept = relevance.detach().argmax()[None]
    elif len(kept) > n_max:
        kept = top_n(margin.detach(), n_max)
    soft = torch.sigmoid(margin[kept] / tau_s)
    return kept, 1 + (soft - soft.detach()), threshold


def straight_through_gate(
    log_r: torch.Tensor, target: torch.Tensor, tau_s: float, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Keeps in training exactly what inference keeps; the gradient is that of `sigmoid((log r - t) / tau_s)`.

    Args:
        log_r: `[M]` float32, log-relevance.
        target: scalar tensor, the soft count that fixes t; differentiable in rho.
        n: the hard count.

    Returns:
        kept indices `[n]` ascending, their gates `[n]` (value 1, soft gradient), threshold t on log-relevance (scalar).
    """
    kept = top_n(log_r.detach(), n)
    threshold = find_threshold(log_r, target, tau_s)
    soft = torch.sigmoid((log_r[kept] - threshold) / tau_s)
    return kept, 1 + (soft - soft.detach()), threshold


def uniform_indices(num_tokens: int, n: int, device: torch.device) -> torch.Tensor:
    """n evenly spaced indices, the middle of each of n equal parts: the paper's UNIF."""
    return ((torch.arange(n, device=device) * 2 + 1) * num_tokens) // (2 * n)


def random_indices(num_tokens: int, n: int, device: torch.device) -> torch.Tensor:
    """n different indices drawn with torch's global generator, ascending."""
    return torch.randperm(num_tokens, device=device)[:n].sort().values


# --------------------------------------------------------------------------------------------------------------------
# Lines 15-16: re-encoding
# --------------------------------------------------------------------------------------------------------------------


def rotary_tables(
    positions: torch.Tensor, head_dim: int, rope_theta: float, mrope_section: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Cosines and sines of multimodal rotary positions, as Qwen2.5-VL lays them out.

    Args:
        positions: `[3, n]`, (time, height, width) of each token.
        mrope_section: how many of the `head_dim / 2` frequencies each axis takes, in turn.

    Returns:
        two float32 `[n, head_dim]`.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * rope_theta**-exponents
    sections = [part[i % 3] for i, part in enumerate(angles.split(list(mrope_section), dim=-1))]
    angles = torch.cat(sections * 2, dim=-1)
    return angles.cos(), angles.sin()


def rotate(states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates `[heads, n, head_dim]` by the tables of [`rotary_tables`]."""
    cos, sin = rotary
    first, second = states.float().chunk(2, dim=-1)
    return (states.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(states.dtype)


def grouped_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """
    Attention of `[heads, L, head_dim]` queries to `[kv_heads, M, head_dim]` keys and values, without a mask.

    The query heads that share a key/value head become further rows of it: every fused kernel of PyTorch then takes
    grouped heads, no key is copied, and no `[L, M]` weights are held.
    """
    kv_heads, _, head_dim = keys.shape
    rows = queries.reshape(1, kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(rows, keys[None], values[None]).reshape(queries.shape)


def in_blocks(
    function: Callable, states: torch.Tensor | Sequence[torch.Tensor], block_size: int = 4096
) -> torch.Tensor:
    """
    A function of each row of `[n, d]`, for `block_size` rows at a time, so that nothing between input and result holds
    all of them; gradients compute each block again. The rows may lie in several tensors, joined for gradients alone.
    """
    parts = [states] if isinstance(states, torch.Tensor) else states
    if len(parts) > 1 and torch.is_grad_enabled():
        parts = [torch.cat(list(parts))]  # one checkpoint for many short videos
    total = sum(len(part) for part in parts)
    if len(parts) == 1 and total <= block_size:
        return function(parts[0])
    blocks = [block for part in parts for block in part.split(block_size)]
    if torch.is_grad_enabled():
        return torch.cat(
            [checkpoint(function, block, use_reentrant=False, preserve_rng_state=False) for block in blocks]
        )
    first = function(blocks[0])
    result = first.new_empty(total, *first.shape[1:])
    filled = 0
    for index, block in enumerate(blocks):
        result[filled : filled + len(block)] = function(block) if index else first
        filled += len(block)
    return result


def take_rows(parts: Sequence[torch.Tensor], indices: torch.Tensor) -> torch.Tensor:
    """`[n, d]`, the rows that ascending indices name among those of `parts`, as if they were one tensor."""
    if len(parts) == 1:
        return parts[0][indices]
    starts = torch.tensor([0, *(len(part) for part in parts)], device=indices.device).cumsum(0)
    bounds = torch.searchsorted(indices, starts).tolist()
    return torch.cat(
        [
            part[indices[low:high] - start]
            for part, start, low, high in zip(parts, starts, bounds, bounds[1:], strict=False)
        ]
    )


# --------------------------------------------------------------------------------------------------------------------
# Modules
# --------------------------------------------------------------------------------------------------------------------


class QTSplusRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * x).to(hidden_states.dtype)


class QTSplusLayer(nn.Module):
    """Pre-norm attention from `query` to `context`, then a feed-forward block; both scoring and re-encoding use it."""

    def __init__(self, hidden_size: int, num_heads: int, num_key_value_heads: int, eps: float, dropout: float):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.dropout = dropout
        key_value_size = num_key_value_heads * self.head_dim
        self.q_norm = QTSplusRMSNorm(hidden_size, eps)
        self.kv_norm = QTSplusRMSNorm(hidden_size, eps)
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, key_value_size)
        self.v_proj = nn.Linear(hidden_size, key_value_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.ffn_norm = QTSplusRMSNorm(hidden_size, eps)
        self.ffn = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def forward(
        self,
        query: torch.Tensor,
        context: torch.Tensor | Sequence[torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        only_relevance: bool = False,
    ) -> torch.Tensor:
        """
        Args:
            query: `[L, d]`.
            context: `[M, d]`, in one tensor or several; the same tensor as `query` for self-attention.
            rotary: tables for self-attention.
            only_relevance: return the `[M]` log-relevance of this layer's attention instead of the `[L, d]` output.
        """
        query_states = self._heads(self.q_proj(self.q_norm(query)))
        key_states = self._heads(in_blocks(self._keys, context))
        if only_relevance:
            return log_relevance(query_states, key_states)
        value_states = self._heads(in_blocks(self._values, context))
        if rotary is not None:
            query_states, key_states = rotate(query_states, rotary), rotate(key_states, rotary)
        attention = grouped_attention(query_states, key_states, value_states)
        query = query + self._drop(self.o_proj(attention.transpose(0, 1).flatten(1)))
        return query + self._drop(in_blocks(self._feed_forward, query))

    def _keys(self, context: torch.Tensor) -> torch.Tensor:
        return self.k_proj(self.kv_norm(context))

    def _values(self, context: torch.Tensor) -> torch.Tensor:
        return self.v_proj(self.kv_norm(context))

    def _feed_forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.ffn_norm(states))

    def _drop(self, states: torch.Tensor) -> torch.Tensor:
        return F.dropout(states, self.dropout, self.training)


class Float32Linear(nn.Linear):
    """Computes in float32 whatever its parameters' dtype; a module of its own, so that offloading finds its weights."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states.float(), self.weight.float(), self.bias.float())


class QTSplusBudgetHead(nn.Module):
    """`rho = rho_min + (rho_max - rho_min) sigmoid(MLP(features))`, in float32 whatever the parameters' dtype."""

    def __init__(self, hidden_size: int, budget_hidden_size: int):
        super().__init__()
        self.mlp = nn.Sequential(
            Float32Linear(hidden_size + 3, budget_hidden_size), nn.GELU(), Float32Linear(budget_hidden_size, 1)
        )

    def forward(self, features: torch.Tensor, rho_min: float, rho_max: float) -> torch.Tensor:
        logit = self.mlp(features)
        return rho_min + (rho_max - rho_min) * torch.sigmoid(logit[0])


@dataclass
class QTSplusOutput(ModelOutput):
    """
    What the selector decided, one entry per row of the batch.

    Args:
        relevance: tuple of `[M_b]` float32; empty where relevance was not needed.
        rho: `[B]` float32, the fraction aimed at; 0 in rows without visual tokens.
        num_tokens: `[B]` int64, the visual tokens that compete (M).
        n: `[B]` int64, kept tokens.
        kept_indices: tuple of `[n_b]` int64, ascending, into the row's visual tokens.
        threshold: `[B]` float32, the training gate's t (on r for "gumbel", on log r for "straight_through"); 0 where
            there was none. `None` at inference.
        loss_t, loss_m, loss_s: scalars, the weighted compute-aware penalties.
        columns: `[B, S']` int64, the column of the caller's prompt behind each column that the language model saw;
            -1 on padding.
    """

    relevance: tuple[torch.Tensor, ...] | None = None
    rho: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    n: torch.Tensor | None = None
    kept_indices: tuple[torch.Tensor, ...] | None = None
    threshold: torch.Tensor | None = None
    loss_t: torch.Tensor | None = None
    loss_m: torch.Tensor | None = None
    loss_s: torch.Tensor | None = None
    columns: torch.Tensor | None = None


class QTSplusSelector(nn.Module):
    """
    Selects and re-encodes the visual tokens that matter for a question (Algorithm 1).

    Args:
        config: [`QTSplusConfig`]; read at every call, so schedules may change tau_s, n_max, the rho bounds and lambdas.
        hidden_size, num_attention_heads, num_key_value_heads, rms_norm_eps, rope_theta, mrope_section: as in the
            language model.
    """

    def __init__(
        self,
        config,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1e6,
        mrope_section: list[int] | tuple[int, ...] = (16, 24, 24),
    ):
        super().__init__()
        self.config = config
        self.hidden_size = hidden_size
        self.head_dim = hidden_size // num_attention_heads
        self.rope_theta = rope_theta
        self.mrope_section = list(mrope_section)
        shape = (hidden_size, num_attention_heads, num_key_value_heads, rms_norm_eps, config.dropout)
        self.scoring_layers = nn.ModuleList(QTSplusLayer(*shape) for _ in range(config.scoring_layers))
        self.budget = QTSplusBudgetHead(hidden_size, config.budget_hidden_size)
        self.reencode_layers = nn.ModuleList(QTSplusLayer(*shape) for _ in range(config.reencode_layers))
        # Sum of rho in units of 2^-32, and count: integers survive a cast of the model to bfloat16.
        self.register_buffer("rho_history", torch.zeros(2, dtype=torch.int64))
        self.freeze_unused()

    def unused_parameters(self) -> list[nn.Parameter]:
        """Those of the last scoring layer that its attention weights do not need; checkpoints carry them."""
        last = self.scoring_layers[-1]
        return [p for module in (last.v_proj, last.o_proj, last.ffn_norm, last.ffn) for p in module.parameters()]

    def freeze_unused(self):
        """Freezes what can never receive a gradient. Loading makes new, trainable parameters, so again after it."""
        for parameter in self.unused_parameters():
            parameter.requires_grad_(False)

    def forward(
        self,
        visual: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        query: list[torch.Tensor],
        positions: list[torch.Tensor],
        retention: float | Sequence[float] | None = None,
        max_visual_tokens: int | None = None,
        sample_gate: bool | None = None,
    ) -> tuple[list[torch.Tensor], QTSplusOutput]:
        """
        Args:
            visual: per row `[M_b, d]`, all visual tokens that compete for the row's budget; `[0, d]` for none. In one
                tensor or several, such as those of several videos, which inference never joins.
            query: per row `[L_b, d]`, embeddings of the question.
            positions: per row `[3, M_b]`, absolute (time, height, width) of the visual tokens.
            retention: fixes rho, in (0, 1]; one for all rows or one for each.
            max_visual_tokens: caps n for this call, below `n_max`.
            sample_gate: use the training gate; `self.training` if `None`.

        Returns:
            per row `[n_b, d]` tokens for the language model, in their original order, and a [`QTSplusOutput`].

        Raises:
            ValueError: `retention` or `max_visual_tokens` out of range, or a row with visual tokens but no question.
        """
        visual = [[row] if isinstance(row, torch.Tensor) else row for row in visual]
        retentions = list(retention) if isinstance(retention, Sequence) else [retention] * len(visual)
        self._check_call(retentions, len(visual), max_visual_tokens)
        sample_gate = self.training if sample_gate is None else sample_gate
        cap = min(self.config.n_max, max_visual_tokens or self.config.n_max)
        rows = [
            self._select_row(row, visual[row], query[row], retentions[row], cap, sample_gate)
            for row in range(len(visual))
        ]
        kept_indices, relevance, rho, threshold, features = (list(field) for field in zip(*rows, strict=True))
        for row, kept in enumerate(kept_indices):
            if len(kept):
                features[row] = self._reencode(features[row], positions[row][:, kept])

        if self.training and torch.is_grad_enabled():
            # A batch without visual tokens must still reach every parameter, or distributed training waits for ever.
            trained = [p.sum().float() for p in self.parameters() if p.requires_grad]
            if trained:
                anchor = torch.stack(trained).sum() * 0.0
                features = [row + anchor.to(row.dtype) for row in features]

        num_tokens = torch.tensor([sum(map(len, parts)) for parts in visual], device=visual[0][0].device)
        rho = torch.stack(rho)
        loss_t, loss_m, loss_s = self._penalties(rho, num_tokens, cap, sample_gate)
        return features, QTSplusOutput(
            relevance=tuple(relevance),
            rho=rho,
            num_tokens=num_tokens,
            n=torch.tensor([len(kept) for kept in kept_indices], device=rho.device),
            kept_indices=tuple(kept_indices),
            threshold=torch.stack(threshold) if sample_gate else None,
            loss_t=loss_t,
            loss_m=loss_m,
            loss_s=loss_s,
        )

    def _check_call(self, retentions: list[float | None], rows: int, max_visual_tokens: int | None):
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
        if self.config.selection == "all" and (fixed or max_visual_tokens is not None):
            raise ValueError(
                'selection="all" keeps every visual token: set another selection in qtsplus_config, or leave retention '
                "and max_visual_tokens out."
            )

    def _select_row(self, row, visual, query, retention, cap, sample_gate):
        """Relevance, budget and gate of one sample: (kept indices, relevance, rho, threshold, kept tokens)."""
        config, num_tokens, device = self.config, sum(map(len, visual)), visual[0].device
        nothing = torch.zeros((), device=device)
        empty = torch.empty(0, device=device)
        if num_tokens == 0:
            return empty.long(), empty, nothing, nothing, visual[0]
        if config.selection == "all":
            every = torch.arange(num_tokens, device=device)
            return every, empty, nothing + 1, nothing, visual[0] if len(visual) == 1 else torch.cat(list(visual))

        relevance = log_r = empty
        if config.selection == "qtsplus" or retention is None:
            if len(query) == 0:
                raise ValueError(
                    f"Row {row} has {num_tokens} visual tokens but no question to select them by. Format the prompt "
                    "with the processor's chat template, or pass query_mask= or query_input_ids=."
                )
            log_r = self._log_relevance(visual, query)
            relevance = log_r.exp()
        if retention is None:
            rho = self.budget(budget_features(query, relevance), config.rho_min, config.rho_max)
            n = kept_count(float(rho.detach()), num_tokens, cap)
        else:
            rho = nothing + retention
            n = kept_count(retention, num_tokens, cap)

        if config.selection == "uniform":
            kept = uniform_indices(num_tokens, n, device)
        elif config.selection == "random":
            kept = random_indices(num_tokens, n, device)
        elif not sample_gate:
            kept = top_n(log_r, n)
        else:
            target = (rho * num_tokens).clamp(max=cap)
            if config.gate == "gumbel":
                kept, gate, threshold = gumbel_gate(relevance, target, config.tau_s, cap)
            else:
                kept, gate, threshold = straight_through_gate(log_r, target, config.tau_s, n)
            tokens = take_rows(visual, kept)
            return kept, relevance, rho, threshold.detach(), tokens * gate[:, None].to(tokens.dtype)
        return kept, relevance, rho, nothing, take_rows(visual, kept)

    def _log_relevance(self, visual: Sequence[torch.Tensor], query: torch.Tensor) -> torch.Tensor:
        for layer in self.scoring_layers[:-1]:
            query = layer(query, visual)
        return self.scoring_layers[-1](query, visual, only_relevance=True)

    def _reencode(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rotary = None
        if self.config.reencode_rope and len(self.reencode_layers):
            rotary = rotary_tables(positions, self.head_dim, self.rope_theta, self.mrope_section)
        for layer in self.reencode_layers:
            tokens = layer(tokens, tokens, rotary)
        return tokens

    def _penalties(self, rho: torch.Tensor, num_tokens: torch.Tensor, cap: int, training: bool):
        """Equation 5 without the supervised term: means over the rows that have visual tokens, times their lambdas."""
        config = self.config
        rho, num_tokens = rho[num_tokens > 0], num_tokens[num_tokens > 0]
        if len(rho) == 0:
            zero = torch.zeros((), device=rho.device)
            return zero, zero, zero
        soft_n = rho * num_tokens
        # Charged is what the gate keeps, at most the cap; the gradient still pulls rho down from above it.
        soft_n = soft_n - (soft_n - cap).clamp(min=0).detach()
        prior = self._prior_mean(rho.detach(), training)
        return (
            config.lambda_t * (soft_n / config.n_max).pow(2).mean(),
            config.lambda_m * (soft_n / config.n_max).mean(),
            config.lambda_s * (rho - prior).pow(2).mean(),
        )

    def _prior_mean(self, rho: torch.Tensor, training: bool) -> float | torch.Tensor:
        """`rho_prior`, or the running mean of rho, this batch included; only training moves it."""
        if self.config.rho_prior is not None:
            return self.config.rho_prior
        history = self.rho_history + torch.stack([(rho * 2.0**32).sum().long(), torch.tensor(len(rho)).to(rho.device)])
        if training:
            self.rho_history.copy_(history)
        return (history[0] / history[1] / 2.0**32).float()
