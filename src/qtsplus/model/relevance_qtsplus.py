"""The networks and numerics of the selector: its layer, the budget's heads, log-relevance in blocks, the threshold.

With `s` the scores `q k / sqrt(d_h)` of a sample, and their rows (one for each head and query token), a reduction makes
one number of a token's column:

- `"max"`, the paper's: `log r_i = max over rows of log softmax_i(s)`.
- `"mean"`: `log r_i = log of the mean over rows of softmax_i(s)`.
- `"sum"`: `log r_i = log softmax_i(logsumexp over heads of the sum over query tokens of s)`, one softmax for all.

Every softmax runs over the M visual tokens. So r sums to 1 for all but the maximum, where it sums to between 1 and the
number of rows. In the first two a token matters if any word speaks for it; in the sum, if the words do together: "the
yellow ring" is neither any ring nor anything yellow.

[`QTSplusLayer`], whose attention this is and which the re-encoder has too, is the way in, then [`log_relevance`].
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DOUBLINGS = 15  # predicted are 1, 2, 4, ... 16,384 tokens, whatever n_max is; more lose nothing
EPSILON = 1e-8  # inside the normalisation and the logarithm of the entropy
NEAR_SHARE = 0.2  # of the highest relevance

# --- The layer ---


class QTSplusRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        states = hidden_states.float()
        variance = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(variance + self.eps)
        return (self.weight.float() * states).to(hidden_states.dtype)


class QTSplusLayer(nn.Module):
    """Pre-norm attention from `query` to `context`, then a feed-forward block; both scoring and re-encoding use it."""

    def __init__(self, hidden_size: int, num_heads: int, num_key_value_heads: int, eps: float, dropout: float):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.dropout = nn.Dropout(dropout)
        key_value_size = num_key_value_heads * self.head_dim
        self.q_norm = QTSplusRMSNorm(hidden_size, eps)
        self.kv_norm = QTSplusRMSNorm(hidden_size, eps)
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, key_value_size)
        self.v_proj = nn.Linear(hidden_size, key_value_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.ffn_norm = QTSplusRMSNorm(hidden_size, eps)
        self.ffn = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.GELU(),
            nn.Linear(4 * hidden_size, hidden_size),
        )

    def forward(
        self,
        query: torch.Tensor,
        context: torch.Tensor | Sequence[torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        reduction: str | None = None,
        keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            query: `[L, d]`.
            context: `[M, d]`, in one tensor or several; the same tensor as `query` for self-attention.
            rotary: tables for self-attention.
            lengths: of the samples that lie one behind the other in `query`, which is the context too, and of which
                each attends to itself.
            reduction: return the `[M]` log-relevance of the attention, reduced so, in place of the `[L, d]` output.
            keys: what [`keys`] gives for the context, where it is known.
        """
        query_states = self._heads(self.q_proj(self.q_norm(query)))
        key_states = self.keys(context) if keys is None else keys
        if reduction is not None:
            return log_relevance(query_states, key_states, reduction=reduction)
        value_states = self._heads(in_blocks(self._value_rows, context))
        if rotary is not None:
            query_states = rotate(query_states, rotary)
            key_states = rotate(key_states, rotary)
        if lengths is None:
            attention = grouped_attention(query_states, key_states, value_states)
        else:
            attention = attention_within_samples(query_states, key_states, value_states, lengths)
        attention = attention.transpose(0, 1).flatten(1)
        query = query + self.dropout(self.o_proj(attention))
        return query + self.dropout(in_blocks(self._feed_forward_rows, query))

    def keys(self, context: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """`[kv_heads, M, head_dim]`."""
        return self._heads(in_blocks(self._key_rows, context))

    def _key_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.k_proj(self.kv_norm(rows))

    def _value_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.v_proj(self.kv_norm(rows))

    def _feed_forward_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.ffn_norm(rows))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)


def rotary_tables(
    positions: torch.Tensor, head_dim: int, rope_theta: float, mrope_section: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Cosines and sines of positions `[3, n]`, (time, height, width), as Qwen2.5-VL lays them out: two float32
    `[n, head_dim]`. Of the `head_dim / 2` frequencies each axis takes `mrope_section` in turn.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies = rope_theta**-exponents
    angles = positions[..., None].float() * frequencies
    sections = []
    for number, section in enumerate(angles.split(list(mrope_section), dim=-1)):
        axis = number % 3
        sections.append(section[axis])
    angles = torch.cat(sections * 2, dim=-1)
    return angles.cos(), angles.sin()


def rotate(states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates `[heads, n, head_dim]` by the tables of [`rotary_tables`]."""
    cos, sin = rotary
    precise = states.float()
    first, second = precise.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (precise * cos + turned * sin).to(states.dtype)


def grouped_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """
    Attention of `[heads, L, head_dim]` queries to `[kv_heads, M, head_dim]` keys and values, without a mask. The query
    heads that share a key/value head become further rows of it: every fused kernel of PyTorch takes that.
    """
    kv_heads, _, head_dim = keys.shape
    rows = queries.reshape(1, kv_heads, -1, head_dim)
    attention = F.scaled_dot_product_attention(rows, keys[None], values[None])
    return attention.reshape(queries.shape)


def attention_within_samples(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """As [`grouped_attention`] of samples that lie one behind the other: each attends to itself."""
    attended = []
    start = 0
    for length in lengths:
        sample = slice(start, start + length)
        attended.append(grouped_attention(queries[:, sample], keys[:, sample], values[:, sample]))
        start += length
    return torch.cat(attended, 1)


def in_blocks(apply: Callable, states: torch.Tensor | Sequence[torch.Tensor], block_size: int = 4096) -> torch.Tensor:
    """
    A function of each row of `[n, d]`, in one tensor or several, for `block_size` rows at a time: nothing between input
    and result holds all of them, and gradients compute each block again.
    """
    parts = [states] if isinstance(states, torch.Tensor) else states
    if len(parts) > 1 and torch.is_grad_enabled():
        parts = [torch.cat(list(parts))]  # one checkpoint for many short videos
    blocks: list[torch.Tensor] = []
    for part in parts:
        blocks.extend(part.split(block_size))
    if len(blocks) == 1:
        return apply(blocks[0])
    return torch.cat([again(apply, block) for block in blocks])


def again(function: Callable, *block: torch.Tensor) -> torch.Tensor:
    """A function of a block, which gradients compute again."""
    if not torch.is_grad_enabled():
        return function(*block)
    return checkpoint(function, *block, use_reentrant=False, preserve_rng_state=False)


# --- The budget's heads ---


class Linear(nn.Linear):
    """
    Computes in float32 whatever its parameters' dtype; a module of its own, so that offloading finds its weights.

    It has the name of its base, by which llm-compressor lists the modules that it did not quantize.
    """

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states.float(), self.weight.float(), self.bias.float())


def float32_mlp(inputs: int, hidden_size: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(Linear(inputs, hidden_size), nn.GELU(), Linear(hidden_size, outputs))


class QTSplusBudgetHead(nn.Module):
    """`rho = rho_min + (rho_max - rho_min) sigmoid(MLP(features))`, in float32 whatever the parameters' dtype."""

    def __init__(self, hidden_size: int, budget_hidden_size: int):
        super().__init__()
        self.mlp = float32_mlp(hidden_size + 3, budget_hidden_size, 1)

    def forward(self, features: torch.Tensor, rho_min: float, rho_max: float) -> torch.Tensor:
        logit = self.mlp(features).flatten()
        return rho_min + (rho_max - rho_min) * torch.sigmoid(logit[0])


class QTSplusLossHead(nn.Module):
    """
    What an answer loses with only 1, 2, 4, ... of the most relevant tokens, `[K]` nats that fall towards 0: in float32
    whatever the parameters' dtype.
    """

    def __init__(self, hidden_size: int, budget_hidden_size: int):
        super().__init__()
        self.mlp = float32_mlp(hidden_size + 7, budget_hidden_size, DOUBLINGS)

    def forward(self, query: torch.Tensor, log_relevance: torch.Tensor) -> torch.Tensor:
        """
        Args:
            query: `[L, d]`, the states of the question's words.
            log_relevance: `[M]` float32.
        """
        features = self._features(query, log_relevance)
        falls = F.softplus(self.mlp(features).flatten() - 4)  # few at first
        return falls.flip(0).cumsum(0).flip(0)

    @staticmethod
    def _features(query: torch.Tensor, log_relevance: torch.Tensor) -> torch.Tensor:
        """
        The query, what the tokens have of all relevance, and how it is spread among those with at least [`NEAR_SHARE`]
        of the highest: the thousands of weak ones that a long video adds say nothing about how many an answer needs.
        """
        relevance = log_relevance.exp()
        total = relevance.sum()
        is_near = relevance >= NEAR_SHARE * relevance.max()
        near = relevance[is_near].sort(descending=True).values
        shares = near / (near.sum() + EPSILON)
        entropy = torch.special.entr(shares).sum()
        fractions = shares.new_tensor([0.5, 0.8, 0.95])
        counts = torch.searchsorted(shares.cumsum(0), fractions) + 1
        parts = torch.stack([shares[0], total, 1 - total])
        log_parts = parts.clamp(min=1e-4).log()
        return torch.cat([query.float().mean(0), log_parts, entropy[None], counts.float().log()])


# --- Log-relevance ---


def log_relevance(
    query_states: torch.Tensor, key_states: torch.Tensor, reduction: str = "max", block_size: int | None = None
) -> torch.Tensor:
    """
    The log-relevance of each visual token of a sample, in blocks of tokens; see the head of this file.

    Memory beyond inputs, result and gradients is O(M + heads * L * block_size), since gradients compute each block's
    scores again. Of several heads or query tokens that share the maximum, the first in the order (head, query token)
    takes the whole gradient.

    Args:
        query_states: `[heads, L, head_dim]`.
        key_states: `[kv_heads, M, head_dim]`; every `heads / kv_heads` query heads share one.
        reduction: over heads and query tokens, one of `configuration_qtsplus.REDUCTIONS`.
        block_size: tokens scored at a time; by default so many that a block has about 2 million scores.

    Returns:
        `[M]` float32 (float64 for float64 states), at most 0.
    """
    kv_heads, _, head_dim = key_states.shape
    precise = torch.promote_types(key_states.dtype, torch.float32)
    if reduction == "sum":  # the sum of the scores is the score of the sum
        query_states = query_states.sum(1, keepdim=True, dtype=precise)
    queries = query_states.reshape(kv_heads, -1, head_dim).to(precise) / math.sqrt(head_dim)
    if torch.is_grad_enabled():  # both passes give the keys a gradient, and the sum of these must not be rounded
        key_states = key_states.to(precise)
    rows = kv_heads * queries.shape[1]
    block_size = block_size or max(1, 2**21 // rows)
    if reduction == "sum":
        return _over_blocks(_sum_over_rows, block_size, key_states, queries).log_softmax(0)
    block_totals = _over_blocks(_total_of_each_row, block_size, key_states, queries)
    totals = block_totals.logsumexp(-1, keepdim=True)
    if reduction == "max":
        return _over_blocks(_largest_of_rows, block_size, key_states, queries, totals)
    return _over_blocks(_sum_over_rows, block_size, key_states, queries, totals) - math.log(rows)


def _over_blocks(function: Callable, block_size: int, keys: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """A function of each block of keys and of other tensors, side by side along the last dimension."""
    blocks = keys.split(block_size, dim=1)
    return torch.cat([again(function, block, *others) for block in blocks], -1)


def _scores(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, heads / kv_heads * L, b]` of the `b` visual tokens of a block."""
    with torch.autocast(keys.device.type, enabled=False):
        return queries @ keys.to(queries.dtype).transpose(1, 2)


def _total_of_each_row(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    return _scores(keys, queries).logsumexp(-1, keepdim=True)


def _sum_over_rows(keys: torch.Tensor, queries: torch.Tensor, totals: torch.Tensor | float = 0.0) -> torch.Tensor:
    return _scores(keys, queries).sub_(totals).logsumexp((0, 1))


def _largest_of_rows(keys: torch.Tensor, queries: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    return _scores(keys, queries).sub_(totals).flatten(0, 1).max(0).values


# --- Algorithm 2 ---


def find_threshold(scores: torch.Tensor, target: torch.Tensor, tau_s: float) -> torch.Tensor:
    """
    Solves `sum_i sigmoid((scores_i - t) / tau_s) = target` for t.

    The sum falls strictly with t, which lies between `min(scores)` and `max(scores)` shifted by
    `tau_s * logit(target / M)`: bisection always arrives, where the paper's plain Newton runs away on peaked scores.
    The gradient is the implicit one, `dt = (sum_i w_i dscores_i - tau_s dtarget) / sum_i w_i` with `w = s (1 - s)`.

    Args:
        scores: `[M]`.
        target: scalar tensor, tokens, between 0 and M.
    """
    precise = torch.float32 if scores.device.type == "mps" else torch.float64
    x = scores.detach().to(precise)
    goal = target.detach().to(precise)
    fraction = (goal / len(x)).clamp(1e-6, 1 - 1e-6)
    goal = fraction * len(x)
    shift = tau_s * torch.logit(fraction)
    low = x.min() - shift
    high = x.max() - shift
    for _ in range(60):
        middle = (low + high) / 2
        too_many = torch.sigmoid((x - middle) / tau_s).sum() > goal
        low = torch.where(too_many, middle, low)
        high = torch.where(too_many, high, middle)

    threshold = (low + high) / 2
    needs_gradient = scores.requires_grad or target.requires_grad
    if not (torch.is_grad_enabled() and needs_gradient):
        return threshold.to(scores.dtype)
    z = (x - threshold) / tau_s
    weights = torch.sigmoid(z) * torch.sigmoid(-z)  # s (1 - s) without cancellation
    total = weights.sum().clamp(min=1e-30)
    from_scores = ((weights / total).to(scores.dtype) * scores).sum()
    from_target = (tau_s / total).to(scores.dtype) * target
    residual = from_scores - from_target
    return threshold.to(scores.dtype) + (residual - residual.detach())
