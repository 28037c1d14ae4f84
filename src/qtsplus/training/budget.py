"""The objective's terms in rho, with what they remember from step to step."""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import repeat

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.budget_qtsplus import cheapest_count, kept_count
from ..model.fields_qtsplus import QTSplusConfig
from ..model.selector_qtsplus import QTSplusSelector
from .arguments import QTSplusTrainingArguments

# The extra loss in nats at which an answer counts as wrong; more is cut off.
LOST = 4.0
# The lowest price of a token in nats: the default `n_max` tokens then cost 0.26.
CHEAPEST = 1e-5
# A token costs at most what an answer can lose.
PRICES = np.geomspace(CHEAPEST, LOST, 100).tolist()
RECENT = 256  # questions by which the price is set
# `DAMPING * excess` is added to `alpha * target_n`: by ascent alone a short training would oscillate to its end.
DAMPING = 2.0


class RunningMeans:
    """Sums and weights by name, kept on the device. The names are fixed: every process reduces the same tensor."""

    def __init__(self, names: tuple[str, ...], device: torch.device):
        self.names = names
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.totals = torch.zeros(len(names), 2, dtype=dtype, device=device)

    def add(self, name: str, values: Tensor) -> None:
        """Adds values that weigh the same."""
        row = self.totals[self.names.index(name)]
        row[0] += values.detach().sum()
        row[1] += values.numel()

    def pop(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The means of all names that anything was added to, over all processes; the sums start again from 0."""
        rows = reduce(self.totals).tolist()
        self.totals.zero_()
        means = {}
        for name, (total, weight) in zip(self.names, rows, strict=True):
            if weight > 0:
                means[name] = total / weight
        return means


class RhoControl:
    """
    The penalties on rho, the running mean of rho, the dual variable and the price of a token; see [`QTSplusTrainer`].
    `running` is what is logged, in evaluation (`False`) and in training (`True`).
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
        self.excess = 0.0  # of the last step, relative to target_n
        # Sums over the current step: rho (in the units of rho_history), samples, and tokens that were asked for.
        self._step = torch.zeros(3, dtype=torch.int64, device=args.device)
        # Of recent questions, the predicted losses and the number of visual tokens.
        self.predicted: deque = deque(maxlen=RECENT)
        self.start_step()

    @property
    def config(self) -> QTSplusConfig:
        return self.selector.config

    def start_step(self) -> None:
        """Takes the mean of rho over all steps so far, which is this step's prior."""
        self._rho_history = self.selector.rho_history.clone()

    def price(self) -> dict[str, float]:
        """What leads the mean count to `target_n`, by its name in the log."""
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
        This micro-batch's part of the terms; without `training` they are only logged.

        Args:
            qtsplus: the selector's [`QTSplusOutput`]; `None` in batches of text.
            samples: `[]`, the number of samples with visual tokens in the whole step.
            unlimited: whether no `retention` replaces the model's own budget.
        """
        if qtsplus is None:
            return 0.0
        running = self.running[training]
        with_vision = qtsplus.num_tokens > 0
        rho = qtsplus.rho[with_vision]
        num_tokens = qtsplus.num_tokens[with_vision]
        kept = qtsplus.n[with_vision]
        running.add("rho", rho)
        running.add("n", kept)
        running.add("visual_tokens", num_tokens)
        running.add("kept_fraction", kept / num_tokens)
        if not training:
            return 0.0
        predicts = rho.requires_grad or self.config.budget != "rho"
        if unlimited and predicts and self.config.selection == "qtsplus":
            self._count_asked(rho, num_tokens)
        if not rho.requires_grad:
            return 0.0  # all tokens are kept, or `budget` is "loss"
        return self._penalties(qtsplus, rho, num_tokens) / samples.clamp(min=1)

    def _penalties(self, qtsplus, rho: Tensor, num_tokens: Tensor) -> Tensor:
        """The sum of the terms over the samples with visual tokens, of their `rho` and `num_tokens` `[k]`."""
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
            penalties += (self.alpha + damping) * (rho * num_tokens - config.target_n).sum()
        return penalties

    def _count_asked(self, rho: Tensor, num_tokens: Tensor) -> None:
        """Adds the counts that the model itself asks for to the log and to the step."""
        counts = map(kept_count, rho.tolist(), num_tokens.tolist(), repeat(self.config.n_max))
        n = torch.tensor(list(counts), dtype=torch.int64, device=rho.device)
        self.running[True].add("n_asked", n)
        units = rho.detach().double() * 2.0**32
        self._step[0] += units.round().long().sum()
        self._step[1] += len(rho)
        self._step[2] += n.sum()

    def _prior(self, rho: Tensor) -> Tensor | float:
        """The fixed prior of rho, or the mean over all earlier steps; the first step is its own prior."""
        prior = self.config.rho_prior
        if prior is not None:
            return prior
        total, seen = self._rho_history
        if seen > 0:
            return (total / seen / 2.0**32).float()
        return rho.detach()

    def finish_step(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Moves the running mean of rho and the dual variable by what all processes saw in this optimizer step."""
        step = sum_over_processes(self._step)
        if self.config.rho_prior is None:
            self.selector.rho_history.copy_(self._rho_history + step[:2])
        target = self.config.target_n
        _, samples, asked = step
        if target is not None and samples > 0:
            # Below the target the excess is at least -1; the limit of 1 is its mirror.
            self.excess = min(float(asked / samples) / target - 1, 1.0)
            self.alpha = max(0.0, self.alpha + self.dual_learning_rate * self.excess / target)
        self._step.zero_()

    def set_price(self) -> None:
        """Sets the price with which the last questions keep `target_n` tokens on average."""
        config = self.config

        def miss(price: float) -> float:
            config.token_price = price
            counts = []
            for losses, num_tokens in self.predicted:
                least = kept_count(config.rho_min, num_tokens, config.n_max)
                most = kept_count(config.rho_max, num_tokens, config.n_max)
                counts.append(cheapest_count(losses, config, least, most))
            return abs(np.mean(counts) - config.target_n)

        if config.target_n is not None and self.predicted:
            config.token_price = min(PRICES, key=miss)


def loss_differences(
    predicted: Tensor,
    measured: Tensor,
    most: Tensor,
) -> Tensor:
    """
    The error (smooth L1) of the losses `[B, K]` that a `QTSplusLossHead` predicts, as the mean over the counts of each
    row that may keep 2 tokens or more: `[k]`. `measured` `[B, K]` is the cross-entropy of the answer with 1, 2, 4, ...
    tokens. The head predicts by how much it is higher than with the most tokens that a row may keep (`most` `[B]`), up
    to [`LOST`].
    """
    counts = 2 ** torch.arange(measured.shape[1], device=most.device)
    within = counts <= most[:, None]
    excess = measured - measured.gather(1, within.sum(1, keepdim=True) - 1)
    excess = excess.clamp(0, LOST)
    total = (F.smooth_l1_loss(predicted, excess, reduction="none") * within).sum(1)
    means = total / within.sum(1)
    return means[most > 1]
