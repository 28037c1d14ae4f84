"""The query-aware token selector: Algorithm 1 of the paper, from relevance to the re-encoded tokens.

Independent of any backbone. [`QTSplusSelector`], at the end, runs it over a ragged batch; before it come the pieces in
the paper's order, but for lines 1 and 2 (relevance_qtsplus.py) and lines 5 to 14 (the gates of selection_qtsplus.py).
Symbols are the paper's, as words: visual (X, `[M, d]`), query (Q, `[L, d]`), relevance (r), rho, budget n, threshold t,
tau_s, kept indices (I).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from .relevance_qtsplus import log_relevance
from .selection_qtsplus import GATES, LM_ATTENTION, METHODS, Candidates, check_call, tokens_for_mass

EPSILON = 1e-8  # inside the normalisation and the logarithm of the entropy

# --------------------------------------------------------------------------------------------------------------------
# Lines 3-4: budget
# --------------------------------------------------------------------------------------------------------------------


def budget_features(query: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
    """
    What the budget head sees: `[s_q, log M, max r, H(p)]`, float32 `[d + 3]`, with `p = r / sum r` and `H` its entropy.

    With the reduction `"max"`, `max r` is the most that any word of the question, in any head, gives to one token. With
    `"mean"` and `"sum"` r sums to 1 and is p itself, so `max r` is the share of the first token, and smaller.

    Args:
        query: `[L, d]`, the states of the question's words.
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
        relevance_reduction: str | None = None,
    ) -> torch.Tensor:
        """
        Args:
            query: `[L, d]`.
            context: `[M, d]`, in one tensor or several; the same tensor as `query` for self-attention.
            rotary: tables for self-attention.
            relevance_reduction: return the `[M]` log-relevance of this layer's attention, with this reduction, instead
                of the `[L, d]` output.
        """
        query_states = self._heads(self.q_proj(self.q_norm(query)))
        key_states = self._heads(in_blocks(self._keys, context))
        if relevance_reduction is not None:
            return log_relevance(query_states, key_states, reduction=relevance_reduction)
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
        relevance: tuple of `[M_b]` float32, empty in rows where nothing had to be scored; `None` where that is so of
            every row.
        log_relevance: its logarithm, which does not run out of numbers; in training with its gradient.
        rho: `[B]` float32, the fraction aimed at; 0 in rows without visual tokens.
        num_tokens: `[B]` int64, the visual tokens that compete (M).
        n: `[B]` int64, kept tokens.
        kept_indices: tuple of `[n_b]` int64, ascending, into the row's visual tokens.
        threshold: `[B]` float32, the training gate's t (on r for "gumbel", on log r for "straight_through", on log r in
            units of its spread for "soft"); 0 where there was none, as for "detached". `None` at inference.
        loss_t, loss_m, loss_s: scalars, the weighted compute-aware penalties.
        columns: `[B, S']` int64, the column of the caller's prompt behind each column that the language model saw;
            -1 on padding.
    """

    relevance: tuple[torch.Tensor, ...] | None = None
    log_relevance: tuple[torch.Tensor, ...] | None = None
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

    rho_history: torch.Tensor  # the sum of rho in units of 2^-32, and the count: integers survive a cast to bfloat16

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
        self.question_layers = nn.ModuleList(QTSplusLayer(*shape) for _ in range(config.query_states == "layer"))
        self.register_buffer("rho_history", torch.zeros(2, dtype=torch.int64))
        self.freeze_unused()

    def unused_parameters(self) -> list[nn.Parameter]:
        """Those of the last scoring layer that its attention weights do not need; checkpoints carry them."""
        last: Any = self.scoring_layers[-1]
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
        grids: Sequence[Sequence[tuple[int, int, int]]] | None = None,
        retention: float | Sequence[float] | None = None,
        max_visual_tokens: int | None = None,
        selection: str | None = None,
        reencode: bool = True,
        sample_gate: bool | None = None,
        scores: Sequence[Callable[[], torch.Tensor]] | None = None,
    ) -> tuple[list[torch.Tensor], QTSplusOutput]:
        """
        Args:
            visual: per row `[M_b, d]`, all visual tokens that compete for the row's budget; `[0, d]` for none. In one
                tensor or several, such as those of several videos, which inference never joins.
            query: per row `[L_b, d]`, embeddings of the question.
            positions: per row `[3, M_b]`, absolute (time, height, width) of the visual tokens.
            grids: per row (time, height, width) in tokens of its videos, or of parts of them, in turn; for methods
                that look at neighbours. A tensor is one line of one frame if `None`.
            retention: fixes rho, in (0, 1]; one for all rows or one for each.
            max_visual_tokens: caps n for this call, below `n_max`.
            selection: one of `METHODS`; the configuration's if `None`.
            reencode: `False` skips lines 15 and 16.
            sample_gate: use the training gate; `self.training` if `None`.
            scores: per row what computes the `[M_b]` log-relevance, in the place of lines 1 and 2.

        Returns:
            per row `[n_b, d]` tokens for the language model, in their original order, and a [`QTSplusOutput`].

        Raises:
            ValueError: an unknown selection, `"lm_attention"` without `scores`, `retention` or `max_visual_tokens` out
                of range, or a row with visual tokens but no question.
        """
        visual = [[row] if isinstance(row, torch.Tensor) else row for row in visual]
        if grids is None:
            grids = [[(1, 1, len(part)) for part in row] for row in visual]
        retentions = list(retention) if isinstance(retention, Sequence) else [retention] * len(visual)
        selection = self.config.selection if selection is None else selection
        check_call(selection, retentions, len(visual), max_visual_tokens)
        if selection == LM_ATTENTION and scores is None:
            raise ValueError("selection='lm_attention' asks the language model: call the whole model.")
        sample_gate = self.training if sample_gate is None else sample_gate
        cap = min(self.config.n_max, max_visual_tokens or self.config.n_max)
        rows = []
        for row, retention in enumerate(retentions):
            given = None if scores is None else scores[row]
            sample = (row, visual[row], query[row], positions[row], grids[row], given)
            rows.append(self._select_row(self._candidates(*sample), selection, retention, cap, sample_gate))
        features, kept_indices, log_relevance, rhos, threshold = (list(field) for field in zip(*rows, strict=True))
        for row, kept in enumerate(kept_indices):
            if len(kept) and reencode:
                places = positions[row][:, kept] if self.config.reencode_rope else None
                features[row] = self._encode(self.reencode_layers, features[row], places)

        if self.training and torch.is_grad_enabled():
            # A batch without visual tokens must still reach every parameter, or distributed training waits for ever.
            trained = [p.sum().float() for p in self.parameters() if p.requires_grad]
            if trained:
                anchor = torch.stack(trained).sum() * 0.0
                features = [row + anchor.to(row.dtype) for row in features]

        num_tokens = torch.tensor([sum(map(len, parts)) for parts in visual], device=visual[0][0].device)
        rho = torch.stack(rhos)
        loss_t, loss_m, loss_s = self._penalties(rho, num_tokens, cap, sample_gate)
        scored = any(len(scores) for scores in log_relevance)
        return features, QTSplusOutput(
            relevance=tuple(scores.exp() for scores in log_relevance) if scored else None,
            log_relevance=tuple(log_relevance) if scored else None,
            rho=rho,
            num_tokens=num_tokens,
            n=torch.tensor([len(kept) for kept in kept_indices], device=rho.device),
            kept_indices=tuple(kept_indices),
            threshold=torch.stack(threshold) if sample_gate else None,
            loss_t=loss_t,
            loss_m=loss_m,
            loss_s=loss_s,
        )

    def _candidates(self, row, visual, query, positions, grids, given) -> Candidates:
        """One sample, with lines 1 and 2 for whoever asks for them."""
        if len(query) and given is None:
            order = torch.arange(len(query), device=query.device).expand(3, -1)
            query = self._encode(self.question_layers, query, order)

        def score() -> torch.Tensor:
            if len(query) == 0:
                raise ValueError(
                    f"Row {row} has {sum(map(len, visual))} visual tokens but no question to select them by. Format "
                    "the prompt with the processor's chat template, or pass query_mask= or query_input_ids=."
                )
            if given is not None:
                return given()
            states = query
            for layer in self.scoring_layers[:-1]:
                states = layer(states, visual)
            return self.scoring_layers[-1](states, visual, relevance_reduction=self.config.reduction)

        return Candidates(visual, query, positions, grids, score)

    def _select_row(self, candidates: Candidates, selection: str, retention: float | None, cap: int, sample_gate: bool):
        """Budget and gate of one sample: (kept tokens, kept indices, log-relevance, rho, threshold)."""
        config, num_tokens, visual = self.config, candidates.num_tokens, candidates.visual
        nothing = torch.zeros((), device=candidates.device)
        unscored = torch.empty(0, device=candidates.device)
        if num_tokens == 0:
            return visual[0], unscored.long(), unscored, nothing, nothing
        if selection == "all":
            rho, n = nothing + 1, num_tokens
        elif retention is None and selection == LM_ATTENTION:
            share = tokens_for_mass(candidates.log_relevance, config.attention_mass) / num_tokens
            rho = (nothing + share).clamp(config.rho_min, config.rho_max)
            n = kept_count(float(rho), num_tokens, cap)
        elif retention is None:
            relevance = candidates.log_relevance.exp()
            if config.gate == "detached":  # the scores are taught, by nothing else
                relevance = relevance.detach()
            rho = self.budget(budget_features(candidates.query, relevance), config.rho_min, config.rho_max)
            n = kept_count(float(rho.detach()), num_tokens, cap)
        else:
            rho, n = nothing + retention, kept_count(retention, num_tokens, cap)

        if sample_gate and selection == "qtsplus":
            target = (rho * num_tokens).clamp(max=cap)
            kept, gates, threshold = GATES[config.gate](candidates.log_relevance, target, config.tau_s, n, cap)
            tokens, gates = take_rows(visual, kept), gates[:, None].to(visual[0].dtype)
            if config.gate == "soft":
                total = torch.stack([part.detach().sum(0, dtype=torch.float32) for part in visual]).sum(0)
                tokens = torch.lerp((total / num_tokens).to(tokens.dtype), tokens, gates)
            else:
                tokens = tokens * gates
        else:
            kept, threshold = METHODS[selection](candidates, n), nothing
            if kept.shape != (n,) or bool((kept.diff() < 1).any()):
                raise ValueError(
                    f"selection={selection!r} kept indices of shape {tuple(kept.shape)}: expected {n}, ascending."
                )
            tokens = visual[0] if n == len(visual[0]) == num_tokens else take_rows(visual, kept)
        scored = "log_relevance" in vars(candidates)
        return tokens, kept, candidates.log_relevance if scored else unscored, rho, threshold.detach()

    def _encode(self, layers: nn.ModuleList, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """`[n, d]` tokens that have seen each other, where `[3, n]` says they stand; none stands anywhere if `None`."""
        rotary = None
        if positions is not None and len(layers):
            rotary = rotary_tables(positions, self.head_dim, self.rope_theta, self.mrope_section)
        for layer in layers:
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


__all__ = ["QTSplusOutput", "QTSplusSelector", "kept_count"]
