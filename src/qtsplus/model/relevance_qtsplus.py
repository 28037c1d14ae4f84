"""The layer and the numerics of the selector: log-relevance in blocks, and the threshold of a gate.

The scores `s = q k / sqrt(d_h)` of a sample have a row for each head and query token and a column for each visual
token. A reduction makes one number of each column:

- `"max"`, the paper's: `log r_i = max over rows of log softmax_i(s)`.
- `"mean"`: `log r_i = log of the mean over rows of softmax_i(s)`.
- `"sum"`: `log r_i = log softmax_i(logsumexp over heads of the sum over query tokens of s)`, one softmax for all.

Every softmax runs over the M visual tokens. So r sums to 1 for all but the maximum, where it sums to between 1 and the
number of rows. In the first two a token matters if any word speaks for it; in the sum, if all words together do: "the
yellow ring" is neither any ring nor anything yellow.

Start with [`QTSplusLayer`], which the re-encoder uses too, and continue with [`log_relevance`].
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import rotate_half

States = Tensor | Sequence[Tensor]  # of tokens, [k, d] or [k, d] in parts
Rotary = tuple[Tensor, Tensor]  # cosines and sines, see `rotary_tables`

# --- The layer ---


class QTSplusRMSNorm(nn.RMSNorm):
    """Computes in float32 whatever its weight's dtype."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        precise = hidden_states.float()
        normed = F.rms_norm(precise, self.normalized_shape, self.weight.float(), self.eps)
        return normed.to(hidden_states.dtype)


class QTSplusLayer(nn.Module):
    """Pre-norm attention from `query` to `context`, then a feed-forward block; both scoring and re-encoding use it."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int,
        eps: float,
        dropout: float,
    ):
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
        query: Tensor,
        context: States,
        rotary: Rotary | None = None,
        *,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """
        Args:
            query: `[L, d]`.
            context: `[M, d]`, in one tensor or several; the same tensor as `query` for self-attention.
            rotary: tables for self-attention.
            lengths: for self-attention in several samples at once: their lengths in `query`, in which they follow each
                other. Each sample attends to itself.
        """
        query_states = self.queries(query)
        key_states, value_states = self.keys(context, with_values=True).chunk(2)
        if rotary is not None:
            query_states = rotate(query_states, rotary)
            key_states = rotate(key_states, rotary)
        if lengths is None:
            attention = grouped_attention(query_states, key_states, value_states)
        else:
            attention = attention_within_samples(query_states, key_states, value_states, lengths)
        attention = attention.transpose(0, 1).flatten(1)
        query = query + self.dropout(self.o_proj(attention))
        feed_forward = in_blocks(lambda rows: self.ffn(self.ffn_norm(rows).to(self.dtype)), query)
        return query + self.dropout(feed_forward)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the projections. Visual tokens and words may come in other dtypes."""
        return self.q_proj.bias.dtype

    def queries(self, query: Tensor) -> Tensor:
        """`[heads, L, head_dim]` of `[L, d]`."""
        return self._heads(self.q_proj(self.q_norm(query).to(self.dtype)))

    def keys(self, context: States, with_values: bool = False) -> Tensor:
        """`[kv_heads, M, head_dim]`, the keys of `[M, d]` in one tensor or several; behind them the values."""

        def project(rows):
            normed = self.kv_norm(rows).to(self.dtype)
            keys = self.k_proj(normed)
            return torch.cat([keys, self.v_proj(normed)], dim=-1) if with_values else keys

        return self._heads(in_blocks(project, context))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)


def rotary_tables(
    positions: Tensor,
    head_dim: int,
    rope_theta: float,
    mrope_section: list[int],
) -> Rotary:
    """
    Cosines and sines of positions `[3, n]`, (time, height, width), as Qwen2.5-VL lays them out: two float32
    `[n, head_dim]`. The `head_dim / 2` frequencies are cut into sections, `mrope_section`, which the axes take in turn.
    """
    dimensions = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    exponents = dimensions / head_dim
    frequencies = rope_theta**-exponents
    angles_of_axes = positions.float()[..., None] * frequencies
    by_section = enumerate(angles_of_axes.split(mrope_section, dim=-1))
    sections = [section[number % 3] for number, section in by_section]
    angles = torch.cat(sections * 2, dim=-1)
    return angles.cos(), angles.sin()


def rotate(states: Tensor, rotary: Rotary) -> Tensor:
    """Rotates `[heads, n, head_dim]` by the tables of [`rotary_tables`]."""
    cos, sin = rotary
    precise = states.float()
    rotated = precise * cos + rotate_half(precise) * sin
    return rotated.to(states.dtype)


def grouped_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """
    Attention of `[heads, L, head_dim]` queries to `[kv_heads, M, head_dim]` keys and values, without a mask. The query
    heads that share a key/value head become more rows of one head, which every fused kernel of PyTorch supports.
    """
    kv_heads, _, head_dim = keys.shape
    attention = F.scaled_dot_product_attention(
        queries.reshape(1, kv_heads, -1, head_dim),
        keys[None],
        values[None],
    )
    return attention.reshape(queries.shape)


def attention_within_samples(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """As [`grouped_attention`], for samples of these lengths that follow each other: each attends to itself."""
    present = [length for length in lengths if length]
    parts = [states.split(present, dim=1) for states in (queries, keys, values)]
    samples = zip(*parts, strict=True)
    return torch.cat([grouped_attention(*sample) for sample in samples], dim=1)


def in_blocks(apply: Callable[[Tensor], Tensor], states: States) -> Tensor:
    """
    A function of each row of `[n, d]`, in one tensor or several, for 4,096 rows at a time: intermediate results never
    exist for all rows at once, and the backward pass computes each block again.
    """
    parts = [states] if isinstance(states, Tensor) else states
    if len(parts) > 1 and torch.is_grad_enabled():
        parts = [torch.cat(list(parts))]  # one checkpoint for many short videos
    blocks = []
    for part in parts:
        blocks.extend(part.split(4096))
    if len(blocks) == 1:
        return apply(blocks[0])
    return torch.cat([again(apply, block) for block in blocks])


def again(function: Callable[..., Tensor], *block: Tensor) -> Tensor:
    """A function of a block; the backward pass computes it again."""
    if not torch.is_grad_enabled():
        return function(*block)
    return checkpoint(function, *block, use_reentrant=False, preserve_rng_state=False)


# --- Log-relevance ---


def log_relevance(
    query_states: Tensor,
    key_states: Tensor,
    reduction: str = "max",
    block_size: int | None = None,
) -> Tensor:
    """
    The log-relevance of each visual token of a sample, in blocks of tokens; see the top of this file.

    Memory beyond inputs, result and gradients is O(M + heads * L * block_size), since the backward pass computes each
    block's scores again. If several heads or query tokens share the maximum, the first in the order (head, query token)
    takes the whole gradient.

    Args:
        query_states: `[heads, L, head_dim]`.
        key_states: `[kv_heads, M, head_dim]`; every `heads / kv_heads` query heads share one.
        reduction: over heads and query tokens, one of `fields_qtsplus.REDUCTIONS`.
        block_size: tokens scored at a time; by default a block has about 2 million scores.

    Returns:
        `[M]` float32 (float64 for float64 states), at most 0.
    """
    kv_heads, _, head_dim = key_states.shape
    precise = torch.promote_types(key_states.dtype, torch.float32)
    if reduction == "sum":  # the sum of the scores is the score of the sum
        query_states = query_states.sum(1, keepdim=True, dtype=precise)
    queries = query_states.reshape(kv_heads, -1, head_dim).to(precise)
    queries = queries / math.sqrt(head_dim)
    if torch.is_grad_enabled():  # both passes give the keys a gradient, and the sum of these must not be rounded
        key_states = key_states.to(precise)
    num_rows = kv_heads * queries.shape[1]
    if not block_size:
        block_size = max(1, 2**21 // num_rows)
    blocks = key_states.split(block_size, dim=1)
    if reduction == "sum":
        return _over_blocks(_sum_over_rows, blocks, queries).log_softmax(0)
    totals_of_blocks = _over_blocks(_total_of_each_row, blocks, queries)
    totals = totals_of_blocks.logsumexp(-1, keepdim=True)
    if reduction == "max":
        return _over_blocks(_largest_of_rows, blocks, queries, totals)
    return _over_blocks(_sum_over_rows, blocks, queries, totals) - math.log(num_rows)


def _over_blocks(function: Callable[..., Tensor], blocks: Sequence[Tensor], *others: Tensor) -> Tensor:
    """A function of each block of keys and of other tensors; the results side by side along the last dimension."""
    return torch.cat([again(function, block, *others) for block in blocks], -1)


def _scores(keys: Tensor, queries: Tensor) -> Tensor:
    """`[kv_heads, heads / kv_heads * L, b]` of the `b` visual tokens of a block."""
    precise = keys.to(queries.dtype)
    with torch.autocast(keys.device.type, enabled=False):
        return torch.bmm(queries, precise.transpose(1, 2))


def _total_of_each_row(keys: Tensor, queries: Tensor) -> Tensor:
    return _scores(keys, queries).logsumexp(-1, keepdim=True)


def _sum_over_rows(
    keys: Tensor,
    queries: Tensor,
    totals: Tensor | float = 0.0,
) -> Tensor:
    return _scores(keys, queries).sub_(totals).logsumexp((0, 1))


def _largest_of_rows(
    keys: Tensor,
    queries: Tensor,
    totals: Tensor,
) -> Tensor:
    log_shares = _scores(keys, queries).sub_(totals)
    return log_shares.flatten(0, 1).max(0).values


# --- Algorithm 2 ---


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which do not have it."""
    if device.type == "mps":
        return torch.float32
    return torch.float64


def find_threshold(
    scores: Tensor,
    target: Tensor,
    tau_s: float,
) -> Tensor:
    """
    Solves `sum_i sigmoid((scores_i - t) / tau_s) = target` for t.

    The sum falls strictly with t, which is between `min(scores)` and `max(scores)` shifted by
    `tau_s * logit(target / M)`. Cutting that range into ever smaller parts always converges, while the paper's plain
    Newton diverges on peaked scores. A round tries 15 values together: a GPU runs a few large kernels faster than many
    small ones. The gradient is the implicit one, `dt = (sum_i w_i dscores_i - tau_s dtarget) / sum_i w_i` with
    `w = s (1 - s)`.

    Args:
        scores: `[M]`.
        target: scalar tensor, tokens, between 0 and M.
    """
    precise = widest_float(scores.device)
    x = scores.detach().to(precise) / tau_s
    fraction = target.detach().to(precise) / len(x)
    fraction = fraction.clamp(1e-6, 1 - 1e-6)
    goal = fraction * len(x)
    lowest = x.min()
    low = lowest - torch.logit(fraction)
    shares = torch.logspace(-1, -13, 13, base=16, dtype=precise, device=x.device)
    widths = (x.max() - lowest) * shares
    numbers = torch.arange(1, 16, device=x.device)[:, None]
    for width in widths:  # the solution is in one of 16 parts, which the next round cuts into 16 again
        tried = low + numbers * width
        sums = torch.sigmoid(x - tried).sum(-1)
        is_below_solution = sums > goal
        low = low + is_below_solution.sum() * width

    z = x - low
    weights = torch.sigmoid(z) * torch.sigmoid(-z)  # s (1 - s) without cancellation
    total_weight = weights.sum().clamp(min=1e-30)
    shares = (weights / total_weight).to(scores.dtype)
    slope = (tau_s / total_weight).to(scores.dtype)
    residual = (shares * scores).sum() - slope * target
    threshold = (low * tau_s).to(scores.dtype)
    return threshold + (residual - residual.detach())
