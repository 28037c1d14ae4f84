"""The query-aware token selector: Algorithm 1 of the paper, from relevance to the re-encoded tokens.

[`QTSplusSelector`], at the end, runs it over a ragged batch; before it come the gates, which do in training what the
method `"qtsplus"` does at inference, or nearly so. Lines 1 and 2 are in relevance_qtsplus.py, the budget's heads, lines
3 and 4, in methods_qtsplus.py. Symbols are the paper's, as words: visual (X, `[M, d]`), query (Q, `[L, d]`), relevance
(r), rho, budget n, threshold t, tau_s, kept indices (I).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils import ModelOutput

from .methods_qtsplus import (
    DOUBLINGS,
    Budget,
    Candidates,
    Method,
    QTSplusBudgetHead,
    QTSplusLossHead,
    add_method,
    budget_features,
    cheapest_count,
    check_budget,
    check_kept,
    find_method,
    kept_count,
    share_of_mass,
    top_n,
)
from .relevance_qtsplus import QTSplusLayer, rotary_tables, take_rows

SOFT_TOKENS = 3  # times what inference keeps, through the soft gate

# --- Lines 5-14: the gates, on the threshold of Algorithm 2 ---


class Gated(NamedTuple):
    """Kept indices `[n]` ascending, their gates `[n]` (soft, or 1 with a soft gradient or none), threshold t."""

    kept_indices: torch.Tensor
    gates: torch.Tensor
    threshold: torch.Tensor


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


def gumbel_noise(num_tokens: int, device: torch.device) -> torch.Tensor:
    """
    Standard Gumbel noise for (keep, drop), from torch's global generator: `[M, 2]` float32. It is drawn row by row, so
    that the rows of a batch see the same noise however it is cut into micro-batches.
    """
    return -torch.empty(num_tokens, 2, device=device).exponential_().log()


def gumbel_gate(log_relevance: torch.Tensor, target: torch.Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """
    The paper's training gate: hard Gumbel-softmax over `[r - t, 0]` with a straight-through gradient. The sampled count
    is its own, below `n_max`; the threshold is on r.

    Args:
        log_relevance: `[M]` float32.
        target: scalar tensor, the soft count that fixes t; differentiable in rho.
        n: the hard count, at most `n_max`.
    """
    relevance = log_relevance.exp()
    noise = gumbel_noise(len(relevance), relevance.device)
    threshold = find_threshold(relevance, target, tau_s)
    margin = relevance - threshold + noise[:, 0] - noise[:, 1]
    kept = (margin.detach() >= 0).nonzero()[:, 0]
    if len(kept) == 0:
        kept = relevance.detach().argmax()[None]
    elif len(kept) > n_max:
        kept = top_n(margin.detach(), n_max)
    soft = torch.sigmoid(margin[kept] / tau_s)
    return Gated(kept, 1 + (soft - soft.detach()), threshold)


def detached_gate(log_relevance: torch.Tensor, target: torch.Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """What inference keeps, without a gradient: for scores that are taught by attention. There is no threshold."""
    kept = top_n(log_relevance.detach(), n)
    return Gated(kept, torch.ones(n, device=kept.device), torch.zeros((), device=kept.device))


def soft_gate(log_relevance: torch.Tensor, target: torch.Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """
    `sigmoid((s - t) / tau_s)` as it is, of scores `s = z + tau_s * Gumbel noise`, on three times the tokens that
    inference keeps: what is about to be dropped is half there, so the answers can tell whether it matters.

    z is the log-relevance in units of its own spread around its mean; else training drives the scores so far apart that
    no gate has a gradient left. The selector puts the mean of all tokens in place of what a gate leaves out. As `tau_s`
    falls, noise and gates come closer to what inference does.
    """
    centred = log_relevance - log_relevance.mean()
    scores = centred / centred.square().mean().clamp(min=1e-12).sqrt()
    scores = scores + tau_s * gumbel_noise(len(scores), scores.device)[:, 0]
    kept = top_n(scores.detach(), min(SOFT_TOKENS * n, len(scores), n_max))
    threshold = find_threshold(scores, target, tau_s)
    return Gated(kept, torch.sigmoid((scores[kept] - threshold) / tau_s), threshold)


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor, float, int, int], Gated]] = {
    "gumbel": gumbel_gate,
    "detached": detached_gate,
    "soft": soft_gate,
}

# --- The whole ---


@dataclass
class QTSplusOutput(ModelOutput):
    """What the selector decided, one entry per row of the batch."""

    # [M_b] float32 each: the selector's, or the language model's attention where that selected; empty where the method
    # computed neither, None if that holds for every row.
    relevance: tuple[torch.Tensor, ...] | None = None
    log_relevance: tuple[torch.Tensor, ...] | None = None  # its logarithm; in training with its gradient
    rho: torch.Tensor | None = None  # [B] float32, the fraction aimed at; 0 in rows without visual tokens
    num_tokens: torch.Tensor | None = None  # [B] int64, the visual tokens that compete (M)
    n: torch.Tensor | None = None  # [B] int64, kept tokens
    kept_indices: tuple[torch.Tensor, ...] | None = None  # [n_b] int64 each, ascending, into the row's visual tokens
    threshold: torch.Tensor | None = None  # [B] float32, the training gate's t, or 0; None at inference
    loss_t: torch.Tensor | None = None  # scalars, the weighted compute-aware penalties
    loss_m: torch.Tensor | None = None
    loss_s: torch.Tensor | None = None
    # [B] float32, the part of the relevance that the visual tokens have and the null token does not; None without one,
    # or where nothing was scored.
    seen: torch.Tensor | None = None
    # [B, K] float32, with budget="loss" what the answer would lose with 1, 2, 4, ... tokens; 0 in rows whose budget the
    # call gives.
    predicted_losses: torch.Tensor | None = None
    # [B, S'] int64, the column of the caller's prompt behind each that the language model saw; -1 on padding.
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
        find_method(config.selection)  # or a `ValueError`
        self.config = config
        self.hidden_size = hidden_size
        self.head_dim = hidden_size // num_attention_heads
        self.rope_theta = rope_theta
        self.mrope_section = list(mrope_section)
        shape = (hidden_size, num_attention_heads, num_key_value_heads, rms_norm_eps, config.dropout)
        self.scoring_layers = nn.ModuleList(QTSplusLayer(*shape) for _ in range(config.scoring_layers))
        self.budget: nn.Module
        if config.budget == "loss":
            self.budget = QTSplusLossHead(hidden_size, config.budget_hidden_size)
        else:
            self.budget = QTSplusBudgetHead(hidden_size, config.budget_hidden_size)
        self.reencode_layers = nn.ModuleList(QTSplusLayer(*shape) for _ in range(config.reencode_layers))
        self.null_tokens = nn.ModuleList(nn.Embedding(1, hidden_size) for _ in range(config.null_token))
        self.question_layers = nn.ModuleList(QTSplusLayer(*shape) for _ in range(config.query_states == "layer"))
        self.register_buffer("rho_history", torch.zeros(2, dtype=torch.int64))
        self.freeze_unused()

    def unused_parameters(self) -> list[nn.Parameter]:
        """Those of the last scoring layer that its attention does not need, and of a head that is not asked."""
        last: Any = self.scoring_layers[-1]
        unused = [last.v_proj, last.o_proj, last.ffn_norm, last.ffn, *[self.budget] * (self.config.budget == "mass")]
        return [p for module in unused for p in module.parameters()]

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
        selection: str | Method | None = None,
        reencode: bool = True,
        sample_gate: bool | None = None,
        attention: Sequence[Callable[[], torch.Tensor]] | None = None,
    ) -> tuple[list[torch.Tensor], QTSplusOutput]:
        """
        Args:
            visual: per row `[M_b, d]`, the visual tokens that compete for its budget, in one tensor or several, which
                inference never joins; `[0, d]` for none.
            query: per row `[L_b, d]`, embeddings of the question.
            positions: per row `[3, M_b]`, absolute (time, height, width) of the visual tokens.
            grids: per row (time, height, width) in tokens of its videos, or of parts of them, in turn. A tensor is one
                line of one frame if `None`.
            retention, max_visual_tokens, selection, reencode: as in `SelectionInputs` (prompt_qtsplus.py).
            sample_gate: use the training gate; `self.training` if `None`.
            attention: per row what computes the `[M_b]` log-attention of the language model, for methods that ask it.

        Returns:
            per row `[n_b, d]` tokens for the language model, in their original order, and a [`QTSplusOutput`].

        Raises:
            ValueError: an unknown selection, a budget out of range, a row with visual tokens but no question.
        """
        visual = [(row,) if isinstance(row, torch.Tensor) else tuple(row) for row in visual]
        if grids is None:
            grids = [[(1, 1, len(part)) for part in row] for row in visual]
        retentions = (
            list(retention)
            if isinstance(retention, Sequence) and not isinstance(retention, str)
            else [retention] * len(visual)
        )
        if selection is None:
            selection = self.config.selection
        elif isinstance(selection, str):
            add_method(selection)
        check_budget(selection, retentions, len(visual), max_visual_tokens)
        cap = min(self.config.n_max, max_visual_tokens or self.config.n_max)
        sample_gate = self.training if sample_gate is None else sample_gate

        anchor = self._anchor() if self.training and torch.is_grad_enabled() else None
        # Rows about the same tensors, such as questions on one video, share the keys; else none are held for others.
        shared = len(set(map(hash, visual))) < len(visual)
        last: Any = self.scoring_layers[-1]
        rows, keys, nulls = [], lru_cache(1)(last.keys) if shared else None, self.null_states()
        words = lru_cache(1)(lambda: self.contextualise(query))  # of all rows, for the first that asks
        for row, sample in enumerate(zip(visual, query, positions, grids, strict=True)):
            attend = None if attention is None else attention[row]
            candidates = self._candidates(row, *sample, nulls, keys, words, attend)
            rows.append(self._select(candidates, selection, retentions[row], cap, sample_gate))
        features, kept_indices, log_relevance, budgets, thresholds = (list(field) for field in zip(*rows, strict=True))
        if reencode:
            places = [where[:, kept] for where, kept in zip(positions, kept_indices, strict=True)]
            features = self._encode(self.reencode_layers, features, places if self.config.reencode_rope else None)
        rhos, losses = [budget.rho for budget in budgets], [budget.losses for budget in budgets]
        if anchor is not None:
            features = [tokens + anchor.to(tokens.dtype) for tokens in features]
        rho = torch.stack(rhos)
        num_tokens = torch.tensor([sum(map(len, parts)) for parts in visual], device=rho.device)
        loss_t, loss_m, loss_s = self._penalties(rho, num_tokens, cap, sample_gate)
        scored = any(map(len, log_relevance))
        return features, QTSplusOutput(
            relevance=tuple(scores.exp() for scores in log_relevance) if scored else None,
            log_relevance=tuple(log_relevance) if scored else None,
            rho=rho,
            num_tokens=num_tokens,
            n=torch.tensor([len(kept) for kept in kept_indices], device=rho.device),
            kept_indices=tuple(kept_indices),
            threshold=torch.stack(thresholds) if sample_gate else None,
            loss_t=loss_t,
            loss_m=loss_m,
            loss_s=loss_s,
            seen=torch.stack([row.exp().sum() for row in log_relevance]) if scored and self.null_tokens else None,
            predicted_losses=torch.stack(losses) if self.config.budget == "loss" else None,
        )

    def null_states(self) -> list[torch.Tensor]:
        """The null token, `[1, d]`, where there is one."""
        return [token(self.rho_history.new_zeros(1)) for token in self.null_tokens]  # an int64 where the weights are

    def contextualise(self, questions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """
        Per question `[L, d]`: with `query_states="layer"` its words, that have seen each other. What decides a choice
        does not depend on its batch, not even in the last bit.
        """
        orders = [torch.arange(len(words), device=words.device).expand(3, -1) for words in questions]
        return self._encode(self.question_layers, questions, orders, apart=True)

    def _candidates(self, row, visual, query, positions, grids, nulls, keys, words, attend) -> Candidates:
        """One sample: lines 1 and 2, for whoever asks for them."""

        def require_question() -> None:
            if len(query) == 0:
                raise ValueError(
                    f"Row {row} has {sum(map(len, visual))} visual tokens but no question to select them by. Format "
                    "the prompt with the processor's chat template, or pass query_mask= or query_input_ids=."
                )

        def score(states: torch.Tensor) -> torch.Tensor:
            require_question()
            scored = (*visual, *nulls)
            for layer in self.scoring_layers[:-1]:
                states = layer(states, scored)
            reduction = self.config.reduction
            relevance = self.scoring_layers[-1](states, scored, relevance_reduction=reduction, keys=keys)
            return relevance[: len(relevance) - len(nulls)]

        def ask() -> torch.Tensor:
            require_question()
            return attend()

        return Candidates(visual, query, positions, grids, score, lambda: words()[row], None if attend is None else ask)

    def _select(
        self,
        candidates: Candidates,
        selection: str | Method,
        retention: float | None,
        cap: int,
        sample_gate: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Budget, torch.Tensor]:
        """One sample: (tokens, kept indices, scores, budget, threshold)."""
        zero, method = torch.zeros((), device=candidates.device), find_method(selection)
        if candidates.num_tokens == 0:
            scores = candidates.scores
            return candidates.visual[0], scores.long(), scores, self._fixed(zero, 0), zero
        budget = self._budget(candidates, selection, retention, cap)
        n = budget.n
        if sample_gate and selection == "qtsplus":
            tokens, kept, threshold = self._gate(candidates, budget.rho, n, cap)
        else:
            kept, threshold = method(candidates, n), zero
            check_kept(kept, n, candidates.num_tokens, selection)
            whole = n == candidates.num_tokens == len(candidates.visual[0])
            tokens = candidates.visual[0] if whole else take_rows(candidates.visual, kept)
        return tokens, kept, candidates.scores, budget, threshold.detach()

    def _fixed(self, rho: torch.Tensor, n: int) -> Budget:
        """A budget that no head predicts."""
        return Budget(rho, n, torch.zeros(DOUBLINGS * (self.config.budget == "loss"), device=rho.device))

    def _budget(self, candidates: Candidates, selection: str | Method, retention: float | None, cap: int) -> Budget:
        """Lines 3 and 4, where the call does not fix rho itself."""
        config, num_tokens = self.config, candidates.num_tokens
        zero = torch.zeros((), device=candidates.device)
        if selection == "all":
            return self._fixed(zero + 1, num_tokens)
        if retention is not None:
            return self._fixed(zero + retention, kept_count(retention, num_tokens, cap))
        if selection != "lm_attention" and config.budget == "rho":
            relevance = candidates.log_relevance.exp()
            if config.gate == "detached":  # the scores are taught, by nothing else
                relevance = relevance.detach()
            rho = self.budget(budget_features(candidates.query_states, relevance), config.rho_min, config.rho_max)
            return Budget(rho, kept_count(float(rho.detach()), num_tokens, cap), zero[None][:0])
        if selection != "lm_attention" and config.budget == "loss":
            losses = self.budget(candidates.query_states.detach(), candidates.log_relevance.detach())
            bounds = (kept_count(bound, num_tokens, cap) for bound in (config.rho_min, config.rho_max))
            n = cheapest_count(losses.detach(), config, *bounds)
            return Budget(zero + n / num_tokens, n, losses)
        if selection == "lm_attention":
            share = share_of_mass(candidates.log_attention.log_softmax(0), config.attention_mass)
        else:
            share = share_of_mass(candidates.log_relevance.detach(), config.relevance_mass)
        rho = (zero + share).clamp(config.rho_min, config.rho_max)
        return self._fixed(rho, kept_count(float(rho), num_tokens, cap))

    def _gate(
        self, candidates: Candidates, rho: torch.Tensor, n: int, cap: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lines 5 to 14, as training sees them: (tokens, kept indices, threshold)."""
        config, visual = self.config, candidates.visual
        target = (rho * candidates.num_tokens).clamp(max=cap)
        kept, gates, threshold = GATES[config.gate](candidates.log_relevance, target, config.tau_s, n, cap)
        tokens, gates = take_rows(visual, kept), gates[:, None].to(visual[0].dtype)
        if config.gate != "soft":
            return tokens * gates, kept, threshold
        total = torch.stack([part.detach().sum(0, dtype=torch.float32) for part in visual]).sum(0)
        return torch.lerp((total / candidates.num_tokens).to(tokens.dtype), tokens, gates), kept, threshold

    def _anchor(self) -> torch.Tensor | None:
        """
        0, made of every parameter that is trained, which a batch without visual tokens must reach too, or distributed
        training waits. It is made before they are used, so that on the way back their gradients are whole after it, in
        one order for every batch: DeepSpeed adds up those of several processes in that order.
        """
        trained = [p.sum().float() for p in self.parameters() if p.requires_grad]
        return torch.stack(trained).sum() * 0.0 if trained else None

    def _encode(
        self,
        layers: nn.ModuleList,
        rows: Sequence[torch.Tensor],
        positions: Sequence[torch.Tensor] | None,
        apart: bool = False,
    ) -> list[torch.Tensor]:
        """
        Lines 15 and 16, of all rows in one pass: per row `[n, d]` tokens that have seen each other, where `[3, n]` says
        they stand. `apart` is as in the layers.
        """
        lengths = [len(row) for row in rows if len(row)]
        if not len(layers) or not lengths:
            return list(rows)
        rotary, tokens = None, torch.cat(list(rows))
        if positions is not None:
            rotary = rotary_tables(torch.cat(list(positions), 1), self.head_dim, self.rope_theta, self.mrope_section)
        for layer in layers:
            tokens = layer(tokens, tokens, rotary, lengths=lengths, apart=apart)
        encoded = iter(tokens.split(lengths))
        return [next(encoded) if len(row) else row for row in rows]

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


__all__ = ["GATES", "Gated", "QTSplusOutput", "QTSplusSelector", "find_threshold", "kept_count"]
