"""Algorithm 1 of the paper from line 1 to line 16, top to bottom: scores, budget, gates, choice, re-encoder.

[`QTSplusSelector`], at the end, runs it over a ragged batch. Its networks and numerics are in relevance_qtsplus.py,
other ways to choose in methods_qtsplus.py. Headings in the algorithm are not counted as lines. The code has the paper's
symbols as words: visual (X, `[M, d]`), query (Q, `[L, d]`), relevance (r), rho, budget n, threshold t, tau_s, and kept
indices (I).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .configuration_qtsplus import QTSplusConfig
from .methods_qtsplus import (
    TIE,
    Candidates,
    Method,
    add_method,
    check_budget,
    check_kept,
    find_method,
    no_question,
    take_rows,
    top_n,
)
from .relevance_qtsplus import (
    DOUBLINGS,
    EPSILON,
    QTSplusBudgetHead,
    QTSplusLayer,
    QTSplusLossHead,
    find_threshold,
    rotary_tables,
)

SOFT_TOKENS = 3  # the soft gate lets this many times as many tokens through as inference keeps

# --- Lines 1 and 2: the scores ---

Keys = dict[tuple[Tensor, ...], Tensor]  # the keys of the last video, for further questions about it


def score(
    selector: "QTSplusSelector",
    row: int,
    context: tuple[Tensor, ...],
    keys: Keys | None,
    words: Tensor,
) -> Tensor:
    """
    `[M]` log-relevance of a row's visual tokens.

    Args:
        context: the visual tokens, `[k, d]` of each video, and behind them the null token.
        keys: keeps the keys of the context for the next row, unless `None`.
        words: `[L, d]`, the states of the question's words.
    """
    num_tokens = sum(len(part) for part in context) - len(selector.null_tokens)
    if not len(words):
        raise no_question(row, num_tokens)
    layers: Any = list(selector.scoring_layers)
    last = layers.pop()
    for layer in layers:
        words = layer(words, context)
    known_keys = None
    if keys is not None:
        if context not in keys:
            keys.clear()
            keys[context] = last.keys(context)
        known_keys = keys[context]
    scores = last(words, context, reduction=selector.config.reduction, keys=known_keys)
    return scores[:num_tokens]


# --- Lines 3 and 4: the budget ---


def budget_features(query: Tensor, relevance: Tensor) -> Tensor:
    """
    Line 3: `[s_q, log M, max r, H(p)]`, float32 `[d + 3]`, with `p = r / sum r` and `H` its entropy.

    Args:
        query: `[L, d]`, the states of the question's words.
        relevance: `[M]` float32.
    """
    p = relevance / (relevance.sum() + EPSILON)
    log_p = (p + EPSILON).log()
    entropy = -(p * log_p).sum()
    log_m = torch.full_like(entropy, math.log(len(relevance)))
    statistics = torch.stack([log_m, relevance.max(), entropy])
    return torch.cat([query.float().mean(0), statistics])


def kept_count(rho: float, num_tokens: int, n_max: int) -> int:
    """Line 4: `n = min(ceil(rho M), n_max)`, at least 1."""
    # A product such as 0.07 * 100 = 7.000000000000001 must not cost a token more.
    wanted = math.ceil(round(rho * num_tokens, 6))
    return max(1, min(wanted, n_max))


def cheapest_count(losses: Tensor, config: QTSplusConfig, least: int, most: int) -> int:
    """
    The count, `least` to `most`, at which the loss that [`QTSplusLossHead`] predicts and the price of the tokens are
    least together: Equation 5 of one question. Predictions are interpolated linearly over the logarithm of the count.
    """
    predicted = losses.tolist()
    last = len(predicted) - 1
    highest = math.log2(most)
    counts = []
    costs = []
    for step in range(math.ceil(4 * highest) + 1):
        count = max(least, round(2 ** min(step / 4, highest)))
        doubling = math.log2(count)
        below = min(int(doubling), last)
        above = min(below + 1, last)
        slope = predicted[above] - predicted[below]
        cost = predicted[below] + slope * (doubling - below)
        share = count / config.n_max
        cost += config.token_price * count
        cost += config.lambda_m * share
        cost += config.lambda_t * share**2
        counts.append(count)
        costs.append(cost)
    return counts[costs.index(min(costs))]


def share_of_mass(log_shares: Tensor, mass: float) -> float:
    """
    The smallest fraction of the tokens that leaves at most `1 - mass` of their shares out, up to [`TIE`].

    Args:
        log_shares: `[M]`; the shares sum to 1, or to less where the null token took the rest, which counts as kept. The
            shares of the reduction `"max"` sum to more and are normalised.
    """
    shares = log_shares.exp().sort(descending=True).values
    shares = shares / shares.sum().clamp(min=1)
    rest = shares.sum() - shares.cumsum(0)
    needed = int((rest > 1 - mass + TIE).sum()) + 1
    return min(needed, len(shares)) / len(shares)


class Budget(NamedTuple):
    """The budget of one sample."""

    rho: Tensor  # scalar
    n: int
    losses: Tensor  # [K], the prediction of [`QTSplusLossHead`]; [0] without such a head


def predict_budget(
    selector: "QTSplusSelector",
    candidates: Candidates,
    selection: str | Method,
    retention: float | None,
    cap: int,
) -> Budget:
    """How many tokens stay, by the call, or by the head or the rule that the configuration names."""
    config = selector.config
    num_tokens = candidates.num_tokens
    zero = torch.zeros((), device=candidates.device)
    no_losses = zero.new_zeros(DOUBLINGS if config.budget == "loss" else 0)
    if num_tokens == 0:
        return Budget(zero, 0, no_losses)
    if selection == "all":
        return Budget(zero + 1, num_tokens, no_losses)
    if retention is not None:
        return Budget(zero + retention, kept_count(retention, num_tokens, cap), no_losses)
    if selection == "lm_attention":
        share = share_of_mass(candidates.log_attention.log_softmax(0), config.attention_mass)
        rho = (zero + share).clamp(config.rho_min, config.rho_max)
    elif config.budget == "loss":
        return predict_by_losses(selector, candidates, cap)
    elif config.budget == "rho":
        rho = predict_rho(selector, candidates)
    else:
        share = share_of_mass(candidates.log_relevance.detach(), config.relevance_mass)
        rho = (zero + share).clamp(config.rho_min, config.rho_max)
    return Budget(rho, kept_count(float(rho.detach()), num_tokens, cap), no_losses)


def predict_rho(selector: "QTSplusSelector", candidates: Candidates) -> Tensor:
    """Lines 3 and 4 as in the paper: a head predicts rho."""
    config = selector.config
    relevance = candidates.log_relevance.exp()
    if config.gate == "detached":  # then only attention teaches the scores
        relevance = relevance.detach()
    features = budget_features(candidates.query_states, relevance)
    return selector.budget(features, config.rho_min, config.rho_max)


def predict_by_losses(selector: "QTSplusSelector", candidates: Candidates, cap: int) -> Budget:
    """The count at which the predicted loss of the answer and the price of the tokens are least together."""
    config = selector.config
    num_tokens = candidates.num_tokens
    losses = selector.budget(candidates.query_states.detach(), candidates.log_relevance.detach())
    least = kept_count(config.rho_min, num_tokens, cap)
    most = kept_count(config.rho_max, num_tokens, cap)
    n = cheapest_count(losses.detach(), config, least, most)
    rho = torch.zeros((), device=candidates.device) + n / num_tokens
    return Budget(rho, n, losses)


# --- Lines 5 to 11: the gates, which replace line 13 in training ---


class Gated(NamedTuple):
    """What a gate lets through."""

    kept_indices: Tensor  # [n] int64, ascending
    gates: Tensor  # [n], soft, or 1 with a soft gradient or none
    threshold: Tensor  # t, scalar


def gumbel_noise(num_tokens: int, device: torch.device) -> Tensor:
    """
    Standard Gumbel noise for (keep, drop), from torch's global generator: `[M, 2]` float32. It is drawn row by row, so
    that the rows of a batch see the same noise however it is cut into micro-batches.
    """
    exponential = torch.empty(num_tokens, 2, device=device).exponential_()
    return -exponential.log()


def gumbel_gate(log_relevance: Tensor, target: Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """
    The paper's training gate: hard Gumbel-softmax over `[r - t, 0]` with a straight-through gradient. It samples its
    own count, at most `n_max`; the threshold is on r.

    Args:
        log_relevance: `[M]` float32.
        target: scalar tensor, the soft count that fixes t; differentiable in rho.
        n: the hard count, at most `n_max`.
    """
    relevance = log_relevance.exp()
    noise = gumbel_noise(len(relevance), relevance.device)
    threshold = find_threshold(relevance, target, tau_s)  # line 6
    margin = relevance - threshold + noise[:, 0] - noise[:, 1]  # line 7, and the noise of line 8
    is_kept = margin.detach() >= 0
    kept = is_kept.nonzero()[:, 0]  # line 9
    if len(kept) == 0:  # line 10
        kept = relevance.detach().argmax()[None]
    elif len(kept) > n_max:
        kept = top_n(margin.detach(), n_max)
    soft = torch.sigmoid(margin[kept] / tau_s)
    straight_through = 1 + (soft - soft.detach())
    return Gated(kept, straight_through, threshold)


def detached_gate(log_relevance: Tensor, target: Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """The tokens that inference keeps, without a gradient: for scores that attention teaches. It has no threshold."""
    kept = top_n(log_relevance.detach(), n)
    gates = torch.ones(n, device=kept.device)
    no_threshold = torch.zeros((), device=kept.device)
    return Gated(kept, gates, no_threshold)


def soft_gate(log_relevance: Tensor, target: Tensor, tau_s: float, n: int, n_max: int) -> Gated:
    """
    `sigmoid((s - t) / tau_s)` of scores `s = z + tau_s * Gumbel noise`, on three times the tokens that inference keeps:
    tokens at the edge of being dropped are half present, so the answers can tell whether they matter.

    z is the log-relevance in units of its own spread around its mean; otherwise training drives the scores so far apart
    that no gate has a gradient left. The selector fills the part that a gate holds back with the mean of all tokens. As
    `tau_s` falls, noise and gates come closer to inference.
    """
    centred = log_relevance - log_relevance.mean()
    spread = centred.square().mean().clamp(min=1e-12).sqrt()
    noise = gumbel_noise(len(centred), centred.device)[:, 0]
    scores = centred / spread + tau_s * noise
    count = min(SOFT_TOKENS * n, len(scores), n_max)
    kept = top_n(scores.detach(), count)
    threshold = find_threshold(scores, target, tau_s)
    gates = torch.sigmoid((scores[kept] - threshold) / tau_s)
    return Gated(kept, gates, threshold)


GATES: dict[str, Callable[[Tensor, Tensor, float, int, int], Gated]] = {
    "gumbel": gumbel_gate,
    "detached": detached_gate,
    "soft": soft_gate,
}


def gate(
    config: QTSplusConfig,
    candidates: Candidates,
    rho: Tensor,
    n: int,
    cap: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, kept indices, threshold), as training sees them."""
    visual = candidates.visual
    target = (rho * candidates.num_tokens).clamp(max=cap)
    kept, gates, threshold = GATES[config.gate](candidates.log_relevance, target, config.tau_s, n, cap)
    tokens = take_rows(visual, kept)
    gates = gates[:, None].to(tokens.dtype)
    if config.gate != "soft":
        return tokens * gates, kept, threshold  # line 11
    totals = [part.detach().sum(0, dtype=torch.float32) for part in visual]
    mean = torch.stack(totals).sum(0) / candidates.num_tokens
    mixed = torch.lerp(mean.to(tokens.dtype), tokens, gates)
    return mixed, kept, threshold


# --- Lines 12 to 14: the choice ---


def select_tokens(candidates: Candidates, selection: str | Method, n: int) -> tuple[Tensor, Tensor]:
    """(tokens, kept indices), by a method."""
    kept = find_method(selection)(candidates, n)  # line 13
    check_kept(kept, n, candidates.num_tokens, selection)
    first = candidates.visual[0]
    if n == candidates.num_tokens == len(first):
        return first, kept
    return take_rows(candidates.visual, kept), kept


# --- Lines 15 and 16: the re-encoder ---


def encode_rows(
    selector: "QTSplusSelector",
    layers: nn.ModuleList,
    rows: Sequence[Tensor],
    positions: Sequence[Tensor] | None,
) -> list[Tensor]:
    """
    Per row `[n, d]` tokens that have attended to each other, all rows in one pass.

    Args:
        positions: per row `[3, n]`, (time, height, width); `None` attends without positions.
    """
    lengths = [len(row) for row in rows if len(row)]
    if not len(layers) or not lengths:
        return list(rows)
    tokens = torch.cat(list(rows))
    rotary = None
    if positions is not None:
        joined = torch.cat(list(positions), 1)
        rotary = rotary_tables(joined, selector.head_dim, selector.rope_theta, selector.mrope_section)
    for layer in layers:
        tokens = layer(tokens, tokens, rotary, lengths=lengths)
    encoded = iter(tokens.split(lengths))
    return [next(encoded) if len(row) else row for row in rows]


# --- The whole ---


@dataclass
class QTSplusOutput(ModelOutput):
    """What the selector decided, one entry per row of the batch."""

    # [M_b] float32 each: the selector's relevance, or the language model's attention if that selected. A row is empty
    # if the method computed neither, and all is None if that holds for every row.
    relevance: tuple[Tensor, ...] | None = None
    log_relevance: tuple[Tensor, ...] | None = None  # its logarithm; in training with its gradient
    rho: Tensor | None = None  # [B] float32, the fraction aimed at; 0 in rows without visual tokens
    num_tokens: Tensor | None = None  # [B] int64, the visual tokens that compete (M)
    n: Tensor | None = None  # [B] int64, kept tokens
    kept_indices: tuple[Tensor, ...] | None = None  # [n_b] int64 each, ascending, into the row's visual tokens
    threshold: Tensor | None = None  # [B] float32, the training gate's t, or 0; None at inference
    loss_t: Tensor | None = None  # scalars, the weighted compute-aware penalties
    loss_m: Tensor | None = None
    loss_s: Tensor | None = None
    # [B] float32, the part of the relevance that the visual tokens have and the null token does not; None without a
    # null token, or if the selector scored nothing. A calibration gives it a meaning (`seen_threshold`).
    seen: Tensor | None = None
    # [B, K] float32, with budget="loss" the predicted loss of the answer with 1, 2, 4, ... tokens; 0 in rows whose
    # budget the call gives.
    predicted_losses: Tensor | None = None
    # [B, S'] int64, the column in the caller's prompt of each token that the language model saw; -1 on padding.
    columns: Tensor | None = None


@dataclass
class _ChosenRow:
    """What was chosen of one row."""

    tokens: Tensor  # [n, d]
    kept_indices: Tensor  # [n]
    log_relevance: Tensor  # [M] float32, or [0] where the method computed none
    scored_by_selector: bool
    budget: Budget
    threshold: Tensor


class QTSplusSelector(nn.Module):
    """
    Selects and re-encodes the visual tokens that matter for a question (Algorithm 1).

    Args:
        config: [`QTSplusConfig`]; read at every call, so schedules may change tau_s, n_max, the rho bounds and lambdas.
        hidden_size, num_attention_heads, num_key_value_heads, rms_norm_eps, rope_theta, mrope_section: as in the
            language model.
    """

    _no_split_modules = ["QTSplusSelector"]  # a device map keeps the selector on one device
    rho_history: Tensor  # the sum of rho in units of 2^-32, and the count: integers survive a cast to bfloat16

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
        if ":" not in config.selection:  # A stored configuration imports nothing: the call must name such a method.
            find_method(config.selection)  # raises `ValueError` for an unknown name
        self.config = config
        self.hidden_size = hidden_size
        self.head_dim = hidden_size // num_attention_heads
        self.rope_theta = rope_theta
        self.mrope_section = list(mrope_section)

        def layers(count: int) -> nn.ModuleList:
            shape = (hidden_size, num_attention_heads, num_key_value_heads)
            return nn.ModuleList(QTSplusLayer(*shape, rms_norm_eps, config.dropout) for _ in range(count))

        self.scoring_layers = layers(config.scoring_layers)
        head = QTSplusLossHead if config.budget == "loss" else QTSplusBudgetHead
        self.budget: nn.Module = head(hidden_size, config.budget_hidden_size)
        self.reencode_layers = layers(config.reencode_layers)
        self.null_tokens = nn.ModuleList(nn.Embedding(1, hidden_size) for _ in range(config.null_token))
        self.question_layers = layers(1 if config.query_states == "layer" else 0)
        self.register_buffer("rho_history", torch.zeros(2, dtype=torch.int64))
        self.freeze_unused()

    def unused_parameters(self) -> list[nn.Parameter]:
        """The parameters that never get a gradient: the last scoring layer's beyond attention, and an unused head's."""
        last: Any = self.scoring_layers[-1]
        unused = [last.v_proj, last.o_proj, last.ffn_norm, last.ffn]
        if self.config.budget == "mass":
            unused.append(self.budget)
        parameters: list[nn.Parameter] = []
        for module in unused:
            parameters.extend(module.parameters())
        return parameters

    def freeze_unused(self):
        """Freezes [`unused_parameters`]. Loading creates new, trainable ones, so it is repeated after that."""
        for parameter in self.unused_parameters():
            parameter.requires_grad_(False)

    def forward(
        self,
        visual: Sequence[Tensor | Sequence[Tensor]],
        query: list[Tensor],
        positions: list[Tensor],
        grids: Sequence[Sequence[tuple[int, int, int]]] | None = None,
        retention: float | Sequence[float] | None = None,
        max_visual_tokens: int | None = None,
        selection: str | Method | None = None,
        reencode: bool = True,
        sample_gate: bool | None = None,
        attention: Sequence[Callable[[], Tensor]] | None = None,
    ) -> tuple[list[Tensor], QTSplusOutput]:
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
            attention: per row a function that computes the `[M_b]` log-attention of the language model, for methods
                that need it.

        Returns:
            per row `[n_b, d]` tokens for the language model, in their original order, and a [`QTSplusOutput`].

        Raises:
            ValueError: an unknown selection, a budget out of range, a row with visual tokens but no question.
        """
        videos = [(row,) if isinstance(row, Tensor) else tuple(row) for row in visual]
        if grids is None:
            grids = [[(1, 1, len(part)) for part in row] for row in videos]
        retentions: Any = retention
        if not isinstance(retention, (list, tuple)):
            retentions = [retention] * len(videos)
        if selection is None:
            selection = self.config.selection
        elif isinstance(selection, str):
            add_method(selection)
        find_method(selection)  # raises `ValueError`, also for a row without visual tokens
        check_budget(selection, retentions, len(videos), max_visual_tokens)
        cap = min(self.config.n_max, max_visual_tokens or self.config.n_max)
        if sample_gate is None:
            sample_gate = self.training

        anchor = None
        if self.training and torch.is_grad_enabled():
            anchor = self._anchor()
        nulls = self.null_states()
        # Rows about the same tensors, such as questions on one video, share the keys; otherwise no keys are held.
        keys: Keys | None = {} if len(set(videos)) < len(videos) else None
        rows = []
        for row, (parts, words, places, grid) in enumerate(zip(videos, query, positions, grids, strict=True)):
            candidates = Candidates(
                visual=parts,
                query=words,
                positions=places,
                grids=grid,
                score=partial(score, self, row, (*parts, *nulls), keys),
                contextualise=partial(self.contextualise, words),
                attend=None if attention is None else attention[row],
            )
            budget = predict_budget(self, candidates, selection, retentions[row], cap)
            candidates.scores = None  # scores that only the budget has read are not reported
            rows.append(self._choose_row(candidates, budget, selection, cap, sample_gate))

        features = [chosen.tokens for chosen in rows]
        if reencode:
            kept_positions = None
            if self.config.reencode_rope:
                kept_positions = [
                    places[:, chosen.kept_indices] for places, chosen in zip(positions, rows, strict=True)
                ]
            features = encode_rows(self, self.reencode_layers, features, kept_positions)
        if anchor is not None:
            features = [tokens + anchor.to(tokens.dtype) for tokens in features]
        num_tokens = [sum(len(part) for part in parts) for parts in videos]
        return features, self._output(rows, num_tokens, cap, sample_gate)

    def _choose_row(
        self,
        candidates: Candidates,
        budget: Budget,
        selection: str | Method,
        cap: int,
        sample_gate: bool,
    ) -> _ChosenRow:
        """Chooses the tokens of one row, by the training gate or as at inference."""
        threshold = budget.rho.new_zeros(())
        if budget.n == 0:
            tokens = candidates.visual[0]
            kept = threshold.new_empty(0).long()
        elif sample_gate and selection == "qtsplus":
            tokens, kept, threshold = gate(self.config, candidates, budget.rho, budget.n, cap)
        else:
            tokens, kept = select_tokens(candidates, selection, budget.n)
        scores = candidates.scores
        if scores is None:
            scores = threshold.new_empty(0)
        return _ChosenRow(tokens, kept, scores, candidates.scored_by_selector, budget, threshold.detach())

    def _output(
        self,
        rows: Sequence[_ChosenRow],
        counts: list[int],
        cap: int,
        sample_gate: bool,
    ) -> QTSplusOutput:
        """The decisions and their penalties in training; `counts` are the visual tokens of each row."""
        rho = torch.stack([chosen.budget.rho for chosen in rows])
        num_tokens = torch.tensor(counts, device=rho.device)
        loss_t, loss_m, loss_s = self._penalties(rho, num_tokens, cap, sample_gate)
        output = QTSplusOutput(
            rho=rho,
            num_tokens=num_tokens,
            n=torch.tensor([len(chosen.kept_indices) for chosen in rows], device=rho.device),
            kept_indices=tuple(chosen.kept_indices for chosen in rows),
            loss_t=loss_t,
            loss_m=loss_m,
            loss_s=loss_s,
        )
        if any(len(chosen.log_relevance) for chosen in rows):
            output.log_relevance = tuple(chosen.log_relevance for chosen in rows)
            output.relevance = tuple(scores.exp() for scores in output.log_relevance)
        if sample_gate:
            output.threshold = torch.stack([chosen.threshold for chosen in rows])
        if self.config.budget == "loss":
            output.predicted_losses = torch.stack([chosen.budget.losses for chosen in rows])
        # The language model's attention has no null token, and maxima do not sum to a part of 1.
        has_null_token = len(self.null_tokens) > 0 and self.config.reduction != "max"
        if has_null_token and any(chosen.scored_by_selector for chosen in rows):
            output.seen = torch.stack([chosen.log_relevance.exp().sum() for chosen in rows])
        return output

    def null_states(self) -> list[Tensor]:
        """The null token, `[1, d]`, if there is one."""
        index = self.rho_history.new_zeros(1)  # int64, on the weights' device
        return [token(index) for token in self.null_tokens]

    def contextualise(self, question: Tensor) -> Tensor:
        """
        `[L, d]`, the words of a question: with `query_states="layer"` they have attended to each other. Each question
        is computed alone, so that a choice does not depend on its batch, not even in the last bit.
        """
        order = torch.arange(len(question), device=question.device).expand(3, -1)
        return encode_rows(self, self.question_layers, [question], [order])[0]

    def _anchor(self) -> Tensor | None:
        """
        0, computed from every trained parameter: a batch without visual tokens must reach all of them too, or
        distributed training hangs. It is computed before they are used, so that in the backward pass their gradients
        become complete last, in one order for every batch: DeepSpeed adds up gradients of processes in that order.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        sums = [parameter.sum().float() for parameter in trained]
        if not sums:
            return None
        return torch.stack(sums).sum() * 0.0

    def _penalties(self, rho: Tensor, num_tokens: Tensor, cap: int, training: bool):
        """Equation 5 without the supervised term: means over the rows that have visual tokens, times their lambdas."""
        config = self.config
        has_tokens = num_tokens > 0
        rho = rho[has_tokens]
        num_tokens = num_tokens[has_tokens]
        if len(rho) == 0:
            zero = torch.zeros((), device=rho.device)
            return zero, zero, zero
        soft_n = rho * num_tokens
        # The penalty is on the tokens that the gate keeps, at most the cap; above it the gradient still lowers rho.
        excess = (soft_n - cap).clamp(min=0)
        soft_n = soft_n - excess.detach()
        prior = self._prior_mean(rho.detach(), training)
        loss_t = config.lambda_t * (soft_n / config.n_max).pow(2).mean()
        loss_m = config.lambda_m * (soft_n / config.n_max).mean()
        loss_s = config.lambda_s * (rho - prior).pow(2).mean()
        return loss_t, loss_m, loss_s

    def _prior_mean(self, rho: Tensor, training: bool) -> float | Tensor:
        """`rho_prior`, or the running mean of rho with this batch included; only training updates it."""
        if self.config.rho_prior is not None:
            return self.config.rho_prior
        total = (rho * 2.0**32).sum().long()
        count = torch.tensor(len(rho)).to(rho.device)
        history = self.rho_history + torch.stack([total, count])
        if training:
            self.rho_history.copy_(history)
        return (history[0] / history[1] / 2.0**32).float()


__all__ = ["GATES", "Gated", "QTSplusOutput", "QTSplusSelector", "find_threshold", "kept_count"]
