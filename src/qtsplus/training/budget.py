"""The terms of the objective that depend on rho, and the state that they keep from step to step."""

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.budget_qtsplus import cheapest_count, kept_count
from ..model.fields_qtsplus import QTSplusConfig
from ..model.relevance_qtsplus import widest_float
from ..model.selector_qtsplus import RHO_UNITS, QTSplusSelector
from .arguments import QTSplusTrainingArguments

# An answer whose loss is this many nats higher counts as wrong. Larger differences are cut off here.
LOST = 4.0
# The lowest price of a token in nats. At this price the default `n_max` tokens cost 0.26 together.
CHEAPEST = 1e-5
# The prices that training tries. At the highest, one token costs as much as a wrong answer.
PRICES = np.geomspace(CHEAPEST, LOST, 100).tolist()
RECENT = 256  # how many of the last questions set the price
# `DAMPING * excess / target_n` is added to alpha. Without it, alpha would oscillate until a short training ends.
DAMPING = 2.0


class RunningMeans:
    """
    Sums and weights by name, kept on the device. The names are fixed, so that all processes reduce tensors of one
    shape.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device):
        self.names = names
        self.totals = torch.zeros(len(names), 2, dtype=widest_float(device), device=device)

    def add(self, name: str, values: Tensor) -> None:
        """Adds values that weigh the same."""
        row = self.totals[self.names.index(name)]
        row[0] += values.detach().sum()
        row[1] += values.numel()

    def pop(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The means over all processes, of the names that anything was added to; the sums start again from 0."""
        rows = reduce(self.totals).tolist()
        self.totals.zero_()
        return {name: total / weight for name, (total, weight) in zip(self.names, rows, strict=True) if weight > 0}


class RhoControl:
    """
    The penalties on rho, the running mean of rho, the dual variable and the price of a token; see [`QTSplusTrainer`].

    Args:
        running: the means for the log, of training (`True`) and of evaluation (`False`).
    """

    def __init__(
        self,
        selector: QTSplusSelector,
        args: QTSplusTrainingArguments,
        running: Mapping[bool, RunningMeans],
    ):
        self.selector = selector
        self.running = running
        self.dual_learning_rate = args.dual_learning_rate
        self.alpha = 0.0
        self.excess = 0.0  # by which share of target_n the mean count of the last step was above it
        # Three sums over the current step: rho (as in rho_history), samples, and tokens that were asked for.
        self._step = torch.zeros(3, dtype=torch.int64, device=args.device)
        # The predicted losses and the number of visual tokens of recent questions.
        self.predicted: deque = deque(maxlen=RECENT)
        self.start_step()

    @property
    def config(self) -> QTSplusConfig:
        return self.selector.config

    def start_step(self) -> None:
        """Fixes the prior of this step: the mean of rho over all steps before it."""
        self._rho_history = self.selector.rho_history.clone()

    def price(self) -> dict[str, float]:
        """The value that training adjusts to reach `target_n`, by its name in the log."""
        if self.config.budget == "loss":
            return {"token_price": self.config.token_price}
        return {"alpha": self.alpha}

    def restore(self, state: Mapping) -> None:
        """Restores the dual variable, the price, and the predictions that set it."""
        self.alpha = state["alpha"]
        self.excess = state["excess"]
        self.predicted.clear()
        for losses, num_tokens in zip(state["predicted"], state["num_tokens"], strict=True):
            self.predicted.append((torch.tensor(losses), num_tokens))
        self.config.token_price = state["token_price"]

    def loss(
        self,
        qtsplus,
        samples: Tensor,
        training: bool,
        unlimited: bool,
    ) -> Tensor | float:
        """
        What this micro-batch adds to the objective. In evaluation that is 0: rho and the counts are only logged.

        Args:
            qtsplus: the selector's [`QTSplusOutput`]; `None` in batches of text.
            samples: `[]`, the number of samples with visual tokens in the whole step.
            unlimited: whether the model's own budget applies; a `retention` would replace it.
        """
        if qtsplus is None:
            return 0.0
        with_vision = qtsplus.num_tokens > 0
        rho = qtsplus.rho[with_vision]
        num_tokens = qtsplus.num_tokens[with_vision]
        kept = qtsplus.n[with_vision]
        running = self.running[training]
        running.add("rho", rho)
        running.add("n", kept)
        running.add("visual_tokens", num_tokens)
        running.add("kept_fraction", kept / num_tokens)
        if not training:
            return 0.0
        is_predicted = rho.requires_grad or self.config.budget == "loss"
        if unlimited and is_predicted and self.config.selection == "qtsplus":
            self._count_asked(rho, num_tokens)
        if not rho.requires_grad:  # all tokens are kept, or `budget` is "loss"
            return 0.0
        return self._penalties(qtsplus, rho, num_tokens) / samples.clamp(min=1)

    def _penalties(self, qtsplus, rho: Tensor, num_tokens: Tensor) -> Tensor:
        """The terms, summed over k samples with visual tokens, whose `rho` and `num_tokens` are `[k]`."""
        config = self.config
        running = self.running[True]
        count = len(rho)
        distance = rho - self._prior(rho)
        losses_s = config.lambda_s * distance.pow(2)
        running.add("loss_t", qtsplus.loss_t.expand(count))
        running.add("loss_m", qtsplus.loss_m.expand(count))
        running.add("loss_s", losses_s)
        penalties = qtsplus.loss_t * count + qtsplus.loss_m * count + losses_s.sum()
        if config.target_n is not None:
            damping = DAMPING * self.excess / config.target_n
            tokens_above = rho * num_tokens - config.target_n
            penalties += (self.alpha + damping) * tokens_above.sum()
        return penalties

    def _count_asked(self, rho: Tensor, num_tokens: Tensor) -> None:
        """Adds the counts of the model's own budgets to the log and to the sums of the step."""
        counts = []
        total_units = 0
        for fraction, total in zip(rho.tolist(), num_tokens.tolist(), strict=True):
            counts.append(kept_count(fraction, total, self.config.n_max))
            total_units += round(fraction * RHO_UNITS)
        n = torch.tensor(counts, dtype=torch.int64, device=rho.device)
        self.running[True].add("n_asked", n)
        self._step += self._step.new_tensor([total_units, len(counts), sum(counts)])

    def _prior(self, rho: Tensor) -> Tensor | float:
        """The fixed prior of rho, or the mean over all earlier steps; the first step is its own prior."""
        prior = self.config.rho_prior
        if prior is not None:
            return prior
        total, seen = self._rho_history
        if seen > 0:
            return (total / seen / RHO_UNITS).float()
        return rho.detach()

    def finish_step(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Updates the running mean of rho and the dual variable from this optimizer step in all processes."""
        step = sum_over_processes(self._step)
        if self.config.rho_prior is None:
            self.selector.rho_history.copy_(self._rho_history + step[:2])
        target = self.config.target_n
        _, samples, asked = step
        if target is not None and samples > 0:
            mean = float(asked / samples)
            # Never below -1, and limited to 1, so that alpha rises no faster than it can fall.
            self.excess = min(mean / target - 1, 1.0)
            ascent = self.dual_learning_rate * self.excess / target
            self.alpha = max(0.0, self.alpha + ascent)
        self._step.zero_()

    def set_price(self) -> None:
        """Sets the price at which the last questions would keep `target_n` tokens on average."""
        config = self.config

        def distance_to_target(price: float) -> float:
            config.token_price = price  # which `cheapest_count` reads
            counts = []
            for losses, num_tokens in self.predicted:
                least = kept_count(config.rho_min, num_tokens, config.n_max)
                most = kept_count(config.rho_max, num_tokens, config.n_max)
                counts.append(cheapest_count(losses, config, least, most))
            return abs(np.mean(counts) - config.target_n)

        if config.target_n is not None and self.predicted:
            config.token_price = min(PRICES, key=distance_to_target)


def loss_differences(
    predicted: Tensor,
    measured: Tensor,
    most: Tensor,
) -> Tensor:
    """
    The errors (smooth L1) of the losses that a `QTSplusLossHead` predicts: `[k]`, for each row that may keep 2 tokens
    or more, the mean over the counts 1, 2, 4, ... that it may keep.

    The head predicts how much higher the loss is with a count than with the largest of these counts, up to [`LOST`].

    Args:
        predicted: `[B, K]`, the predictions for 1, 2, 4, ... tokens.
        measured: `[B, K]`, the cross-entropy of the answer with as many tokens.
        most: `[B]`, how many tokens each row may keep.
    """
    counts = 2 ** torch.arange(measured.shape[1], device=most.device)
    is_allowed = counts <= most[:, None]
    num_allowed = is_allowed.sum(1)
    with_largest_count = measured.gather(1, num_allowed[:, None] - 1)
    rise = (measured - with_largest_count).clamp(0, LOST)
    errors = F.smooth_l1_loss(predicted, rise, reduction="none")
    means = (errors * is_allowed).sum(1) / num_allowed
    return means[most > 1]
