"""Algorithm 1 of the paper from line 1 to line 16, top to bottom: scores, budget, gates, choice, re-encoder.

[`QTSplusSelector`], at the end, runs it over a ragged batch. Its layer and numerics are in relevance_qtsplus.py, the
heads of the budget in budget_qtsplus.py, other ways to choose in methods_qtsplus.py. Headings in the algorithm are not
counted as lines. The code has the paper's symbols as words: visual (X, `[M, d]`), query (Q, `[L, d]`), relevance (r),
rho, budget n, threshold t, tau_s, and kept indices (I).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from .budget_qtsplus import Budget, QTSplusBudgetHead, QTSplusLossHead, predict_budget, read_together
from .fields_qtsplus import Ids, QTSplusConfig
from .methods_qtsplus import (
    Candidates,
    Grid,
    MethodOrName,
    TensorSequence,
    add_method,
    check_budget,
    check_kept,
    find_method,
    no_question,
    take_rows,
    top_n,
    true_places,
)
from .relevance_qtsplus import QTSplusLayer, find_threshold, log_relevance, rotary_tables

SOFT_TOKENS = 3  # the soft gate lets this many times as many tokens through as inference keeps
RHO_UNITS = 2.0**32  # stored sums of rho are integers, in units of 1 / RHO_UNITS

# --- Lines 1 and 2: the scores ---

Fractions = float | Sequence[float] | None  # of the tokens, to keep: of all rows, or of each
Tensors = tuple[Tensor, ...]
Keys = dict[Tensors, Tensor]  # the keys of the last videos, for further questions about them


def score(
    selector: "QTSplusSelector",
    row: int,
    context: Tensors,
    keys: Keys,
    words: Tensor,
) -> Tensor:
    """
    `[M]` log-relevance of a row's visual tokens.

    Args:
        context: the visual tokens, `[k, d]` of each video, and behind them the null token.
        keys: a cache of the keys of one context, for further rows with the same context.
        words: `[L, d]`, the states of the question's words.
    """
    num_tokens = sum(map(len, context)) - len(selector.null_tokens)
    if not len(words):
        raise no_question(row, num_tokens)
    for layer in selector.scoring_layers[:-1]:
        words = layer(words, context)
    last: Any = selector.scoring_layers[-1]
    if context not in keys:
        keys.clear()
        keys[context] = last.keys(context)
    scores = log_relevance(last.queries(words), keys[context], selector.config.reduction)
    return scores[:num_tokens]


# --- Lines 5 to 10: the gates, which replace lines 12 and 13 in training ---


class Gated(NamedTuple):
    """What a gate lets through."""

    kept_indices: Tensor  # [n] int64, ascending
    gates: Tensor  # [n]; the soft gate's are in (0, 1), the others' are 1, with a gradient (gumbel) or none (detached)
    threshold: Tensor  # t, scalar


def gumbel_noise(num_tokens: int, device: torch.device) -> Tensor:
    """
    Standard Gumbel noise for (keep, drop), from torch's global generator: `[M, 2]` float32. Each row draws its own, so
    that it gets the same noise however a batch is divided into micro-batches.
    """
    return -torch.empty(num_tokens, 2, device=device).exponential_().log()


def gumbel_gate(
    log_relevance: Tensor,
    target: Tensor,
    tau_s: float,
    n: int,
    n_max: int,
) -> Generator[Tensor, int, Gated]:
    """
    The paper's training gate: hard Gumbel-softmax over `[r - t, 0]` with a straight-through gradient. The noise decides
    how many tokens are kept, at most `n_max`. The threshold is compared with r, not with log r. It is a generator for
    [`read_together`], which reads how many tokens the noise keeps.

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
    count = yield is_kept.sum()
    kept = true_places(is_kept, count)  # line 9
    if count == 0:  # line 10
        kept = relevance.detach().argmax()[None]
    elif count > n_max:
        kept = top_n(margin.detach(), n_max)
    soft = torch.sigmoid(margin[kept] / tau_s)
    straight_through = 1 + (soft - soft.detach())  # the value 1 with the gradient of `soft`
    return Gated(kept, straight_through, threshold)


def detached_gate(
    log_relevance: Tensor,
    target: Tensor,
    tau_s: float,
    n: int,
    n_max: int,
) -> Gated:
    """The tokens that inference keeps, without a gradient: for scores that attention teaches. It has no threshold."""
    kept = top_n(log_relevance.detach(), n)
    gates = torch.ones(n, device=kept.device)
    return Gated(kept, gates, torch.zeros((), device=kept.device))


def soft_gate(
    log_relevance: Tensor,
    target: Tensor,
    tau_s: float,
    n: int,
    n_max: int,
) -> Gated:
    """
    `sigmoid((s - t) / tau_s)` of scores `s = z + tau_s * Gumbel noise`, on three times the tokens that inference keeps.
    Tokens at the edge of being dropped are half present, so that the loss of the answers shows whether they matter.

    z is the log-relevance, scaled to mean 0 and standard deviation 1. Otherwise training would drive the scores so far
    apart that no gate has a gradient left. [`weigh_tokens`] replaces the part of a token that its gate removes by the
    mean of all tokens. As `tau_s` falls, noise and gates come closer to inference.
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


GATES = {
    "gumbel": gumbel_gate,
    "detached": detached_gate,
    "soft": soft_gate,
}


# --- Lines 12 to 14: the choice, and its tokens ---


@dataclass(frozen=True)
class Call:
    """How the tokens of a call are chosen, by its arguments or else by the configuration."""

    selection: MethodOrName
    retentions: Sequence[float | None]  # one for each row
    cap: int  # the most tokens that a row keeps
    sample_gate: bool  # choose by the training gate


@dataclass
class ChosenRow:
    """What was chosen of one row."""

    candidates: Candidates
    budget: Budget
    kept_indices: Tensor  # [n]
    gates: Tensor | None  # [n], in training
    threshold: Tensor  # scalar; 0 without a training gate

    @property
    def log_relevance(self) -> Tensor:
        """`[M]` float32, or `[0]` if the method computed no scores."""
        if self.candidates.scores is None:
            return self.budget.losses.new_empty(0)
        return self.candidates.scores


def choose(
    config: QTSplusConfig,
    candidates: Candidates,
    budget: Budget,
    call: Call,
) -> Generator[Tensor, int, ChosenRow]:
    """Chooses the tokens of a row, by the training gate or by a method: a generator for [`read_together`]."""
    candidates.scores = None  # scores that only the budget has read are not reported
    gates = None
    threshold = torch.zeros((), device=candidates.device)
    if budget.n == 0:
        kept = torch.empty(0, dtype=torch.long, device=candidates.device)
    elif call.sample_gate and call.selection == "qtsplus":
        target = (budget.rho * candidates.num_tokens).clamp(max=call.cap)
        gated: Any = GATES[config.gate](candidates.log_relevance, target, config.tau_s, budget.n, call.cap)
        if not isinstance(gated, Gated):
            gated = yield from gated
        kept, gates, threshold = gated
        budget = budget._replace(n=len(kept))
    else:
        kept = find_method(call.selection)(candidates, budget.n)
    return ChosenRow(candidates, budget, kept, gates, threshold.detach())


def weigh_tokens(
    config: QTSplusConfig,
    row: ChosenRow,
    tokens: Tensor,
) -> Tensor:
    """`[n, d]`, the chosen tokens; in training each is weighed by its gate (line 11)."""
    if row.gates is None:
        return tokens
    gates = row.gates[:, None].to(tokens.dtype)
    if config.gate != "soft":
        return tokens * gates
    totals = [part.detach().sum(0, dtype=torch.float32) for part in row.candidates.visual]
    mean = torch.stack(totals).sum(0) / row.candidates.num_tokens
    return torch.lerp(mean.to(tokens.dtype), tokens, gates)


# --- Lines 15 and 16: the re-encoder ---


def encode_rows(
    selector: "QTSplusSelector",
    layers: nn.ModuleList,
    rows: TensorSequence,
    positions: TensorSequence | None,
) -> list[Tensor]:
    """
    Per row `[n, d]` tokens that have attended to each other, all rows in one pass.

    Args:
        positions: per row `[3, n]`, (time, height, width); `None` attends without positions.
    """
    lengths = [len(row) for row in rows]
    if not len(layers) or not any(lengths):
        return list(rows)
    rotary = None
    if positions is not None:
        joined = torch.cat(list(positions), 1)
        rotary = rotary_tables(joined, selector.head_dim, selector.rope_theta, selector.mrope_section)
    tokens = torch.cat(list(rows))
    for layer in layers:
        tokens = layer(tokens, tokens, rotary, lengths=lengths if len(rows) > 1 else None)
    return list(tokens.split(lengths))


# --- The whole ---


@dataclass
class QTSplusOutput(ModelOutput):
    """What the selector decided, one entry per row of the batch."""

    # [M_b] float32 each: the selector's relevance, or the language model's attention if the method chose by that. A row
    # is empty if the method computed neither. If all rows would be empty, the field is None.
    relevance: Tensors | None = None
    log_relevance: Tensors | None = None  # its logarithm; in training with its gradient
    rho: Tensor | None = None  # [B] float32, the fraction aimed at; 0 in rows without visual tokens
    num_tokens: Tensor | None = None  # [B] int64, the visual tokens that compete (M)
    n: Tensor | None = None  # [B] int64, kept tokens
    # [n_b] int64 each, ascending, into the row's visual tokens; on the host, which shortens the prompt by them.
    kept_indices: Tensors | None = None
    threshold: Tensor | None = None  # [B] float32, the training gate's t, or 0; None at inference
    loss_t: Tensor | None = None  # scalars, the weighted compute-aware penalties
    loss_m: Tensor | None = None
    loss_s: Tensor | None = None
    # [B] float32, the sum of the visual tokens' relevance; the null token has the rest to 1. None without a null token,
    # or if the selector scored nothing. A calibration gives it a meaning (`seen_threshold`).
    seen: Tensor | None = None
    # [B, K] float32, with budget="loss" the predicted loss of the answer with 1, 2, 4, ... tokens; 0 in rows whose
    # budget the call gives.
    predicted_losses: Tensor | None = None
    # [B, S'] int64, the column in the caller's prompt of each token that the language model saw; -1 on padding.
    columns: Tensor | None = None


Selected = tuple[list[Tensor], QTSplusOutput]  # the kept tokens of each row, and how they were chosen


class QTSplusSelector(nn.Module):
    """
    Selects and re-encodes the visual tokens that matter for a question (Algorithm 1).

    Args:
        config: [`QTSplusConfig`]; read at every call, so schedules may change tau_s, n_max, the rho bounds and lambdas.
        hidden_size, num_attention_heads, num_key_value_heads, rms_norm_eps, rope_theta, mrope_section: as in the
            language model.
    """

    _no_split_modules = ["QTSplusSelector"]  # a device map keeps the selector on one device
    rho_history: Tensor  # the sum of rho, times RHO_UNITS, and the count: integers survive a cast to bfloat16

    def __init__(
        self,
        config,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1e6,
        mrope_section: Ids = (16, 24, 24),
    ):
        super().__init__()
        self.config = config
        self.hidden_size = hidden_size
        self.head_dim = hidden_size // num_attention_heads
        self.rope_theta = rope_theta
        self.mrope_section = list(mrope_section)

        def layers(count: int) -> nn.ModuleList:
            return nn.ModuleList(
                QTSplusLayer(hidden_size, num_attention_heads, num_key_value_heads, rms_norm_eps, config.dropout)
                for _ in range(count)
            )

        self.scoring_layers = layers(config.scoring_layers)
        head = QTSplusLossHead if config.budget == "loss" else QTSplusBudgetHead
        self.budget: nn.Module = head(hidden_size, config.budget_hidden_size)
        self.reencode_layers = layers(config.reencode_layers)
        self.null_tokens = nn.ModuleList()
        if config.null_token:
            self.null_tokens.append(nn.Embedding(1, hidden_size))
        self.question_layers = layers(1 if config.query_states == "layer" else 0)
        self.register_buffer("rho_history", torch.zeros(2, dtype=torch.int64))
        self.freeze_unused()

    def unused_parameters(self) -> list[nn.Parameter]:
        """The parameters that never get a gradient: the last scoring layer's beyond attention."""
        last: Any = self.scoring_layers[-1]
        return list(nn.ModuleList([last.v_proj, last.o_proj, last.ffn_norm, last.ffn]).parameters())

    def freeze_unused(self):
        """Freezes [`unused_parameters`]. Call it again after loading, which creates new, trainable parameters."""
        for parameter in self.unused_parameters():
            parameter.requires_grad_(False)

    def forward(
        self,
        visual: Sequence[Tensor | TensorSequence],
        query: list[Tensor],
        positions: list[Tensor],
        grids: Sequence[Sequence[Grid]] | None = None,
        retention: Fractions = None,
        max_visual_tokens: int | None = None,
        selection: MethodOrName | None = None,
        reencode: bool = True,
        sample_gate: bool | None = None,
        attention: Sequence[Callable[[], Tensor]] | None = None,
        unchecked: TensorSequence = (),
    ) -> Selected:
        """
        Args:
            visual: per row `[M_b, d]`, the visual tokens that compete for its budget, as one tensor or as several,
                which inference never joins. A row without visual tokens has `[0, d]`.
            query: per row `[L_b, d]`, embeddings of the question.
            positions: per row `[3, M_b]`, absolute (time, height, width) of the visual tokens.
            grids: per row the (time, height, width) in tokens of each of its videos, or of each part of one. With
                `None` each row is one line of tokens in one frame.
            retention, max_visual_tokens, selection, reencode: as in `SelectionInputs` (prompt_qtsplus.py).
            sample_gate: use the training gate; `self.training` if `None`.
            attention: per row a function that computes the `[M_b]` log-attention of the language model, for methods
                that need it.
            unchecked: features that may hold NaN or infinity.

        Returns:
            per row `[n_b, d]` tokens for the language model, in their original order, and a [`QTSplusOutput`].

        Raises:
            ValueError: an unknown selection, a budget out of range, a row with visual tokens but no question.
        """
        if grids is None:
            grids = [[(1, 1, len(row))] for row in visual]
        videos = [(row,) if isinstance(row, Tensor) else tuple(row) for row in visual]
        call = self._call(len(videos), retention, max_visual_tokens, selection, sample_gate)
        # The anchor is 0, computed from every trained parameter: a batch without visual tokens must reach all of them
        # too, or distributed training hangs. It is computed before any other use of the parameters. So the backward
        # pass comes to it last, and their gradients are complete in the same order for every batch: DeepSpeed adds up
        # the gradients of processes in that order.
        sums = []
        if self.training and torch.is_grad_enabled():
            sums = [parameter.sum().float() for parameter in self.parameters() if parameter.requires_grad]
        anchor = torch.stack(sums).sum() * 0.0 if sums else None
        nulls = self.null_states()
        keys: Keys = {}
        competing = [
            Candidates(
                visual=parts,
                query=query[index],
                positions=positions[index],
                grids=grids[index],
                score=partial(score, self, index, parts + nulls, keys),
                contextualise=partial(self.contextualise, query[index]),
                attend=None if attention is None else attention[index],
            )
            for index, parts in enumerate(videos)
        ]
        budgets = read_together(
            [predict_budget(self, *row, call) for row in zip(competing, call.retentions, strict=True)]
        )
        rows = read_together([choose(self.config, *row, call) for row in zip(competing, budgets, strict=True)])
        keys.clear()
        choices = [(row.kept_indices, row.budget.n, row.candidates.num_tokens) for row in rows]
        kept_indices = check_kept(choices, call.selection, unchecked)

        taken = [
            take_rows(parts, row.kept_indices, on_host)
            for parts, row, on_host in zip(videos, rows, kept_indices, strict=True)
        ]
        features = [weigh_tokens(self.config, row, tokens) for row, tokens in zip(rows, taken, strict=True)]
        if reencode:
            kept_positions = None
            if self.config.reencode_rope:
                kept_positions = [row.candidates.positions[:, row.kept_indices] for row in rows]
            features = encode_rows(self, self.reencode_layers, features, kept_positions)
        if anchor is not None:
            features = [tokens + anchor.to(tokens.dtype) for tokens in features]
        return features, self._output(rows, kept_indices, call)

    def _call(
        self,
        num_rows: int,
        retention: Fractions,
        max_visual_tokens: int | None,
        selection: MethodOrName | None,
        sample_gate: bool | None,
    ) -> Call:
        """What a call asks for, checked, and the configuration's values for the rest."""
        if selection is None:
            selection = self.config.selection
        else:
            add_method(selection)
        find_method(selection)  # raises `ValueError`, also for a row without visual tokens
        retentions: Any = retention
        if not isinstance(retention, (list, tuple)):
            retentions = [retention] * num_rows
        if len(retentions) != num_rows:
            raise ValueError(
                f"{len(retentions)} retentions for {num_rows} rows: expected one for all, or one for each."
            )
        retentions = check_budget(selection, retentions, max_visual_tokens)
        cap = int(min(self.config.n_max, max_visual_tokens or self.config.n_max))
        if sample_gate is None:
            sample_gate = self.training
        return Call(selection, retentions, cap, sample_gate)

    def _output(
        self,
        rows: Sequence[ChosenRow],
        kept_indices: TensorSequence,
        call: Call,
    ) -> QTSplusOutput:
        """The decisions, and the penalties of training."""
        rho = torch.stack([row.budget.rho for row in rows])
        loss_t, loss_m, loss_s = self._penalties(rows, call)
        output = QTSplusOutput(
            rho=rho,
            num_tokens=torch.tensor([row.candidates.num_tokens for row in rows], device=rho.device),
            n=torch.tensor(list(map(len, kept_indices)), device=rho.device),
            kept_indices=tuple(kept_indices),
            loss_t=loss_t,
            loss_m=loss_m,
            loss_s=loss_s,
        )
        log_relevance = tuple(row.log_relevance for row in rows)
        if any(map(len, log_relevance)):
            output.log_relevance = log_relevance
            output.relevance = tuple(scores.exp() for scores in log_relevance)
        if call.sample_gate:
            output.threshold = torch.stack([row.threshold for row in rows])
        if self.config.budget == "loss":
            output.predicted_losses = torch.stack([row.budget.losses for row in rows])
        # The language model's attention has no null token, and maxima do not sum to a part of 1.
        has_null_token = len(self.null_tokens) > 0 and self.config.reduction != "max"
        if has_null_token and any(row.candidates.scored_by_selector for row in rows):
            output.seen = torch.stack([scores.exp().sum() for scores in log_relevance])
        return output

    def null_states(self) -> Tensors:
        """The null token, `[1, d]`, if there is one."""
        index = self.rho_history.new_zeros(1)  # int64, on the weights' device
        return tuple(token(index) for token in self.null_tokens)

    def contextualise(self, question: Tensor) -> Tensor:
        """
        `[L, d]`, the words of a question: with `query_states="layer"` they have attended to each other. Each question
        is computed alone, so that a choice does not depend on its batch, not even in the last bit.
        """
        order = torch.arange(len(question), device=question.device).expand(3, -1)
        return encode_rows(self, self.question_layers, [question], [order])[0]

    def _penalties(self, rows: Sequence[ChosenRow], call: Call) -> Tensors:
        """Equation 5 without the supervised term: means over the rows that have visual tokens, times their lambdas."""
        config = self.config
        with_tokens = [row for row in rows if row.candidates.num_tokens]
        if not with_tokens:
            zero = torch.zeros_like(rows[0].budget.rho)
            return zero, zero, zero
        rho = torch.stack([row.budget.rho for row in with_tokens])
        soft_n = rho * rho.new_tensor([row.candidates.num_tokens for row in with_tokens])
        # The gate keeps at most the cap: the penalty counts no more tokens, but its gradient still lowers a larger rho.
        excess = (soft_n - call.cap).clamp(min=0)
        soft_n = soft_n - excess.detach()
        prior: float | Tensor | None = config.rho_prior
        if prior is None:  # the running mean of rho with this batch included; only training updates it
            total = (rho.detach() * RHO_UNITS).sum().long()
            history = self.rho_history + torch.stack([total, torch.full_like(total, len(rho))])
            if call.sample_gate:
                self.rho_history.copy_(history)
            prior = history[0].float() / history[1] / RHO_UNITS
        deviation = rho - prior
        share = soft_n / config.n_max
        loss_t = config.lambda_t * share.pow(2).mean()
        loss_m = config.lambda_m * share.mean()
        loss_s = config.lambda_s * deviation.pow(2).mean()
        return loss_t, loss_m, loss_s
