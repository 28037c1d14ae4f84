"""The objective's terms in rho, with what they remember from step to step."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..model.selector_qtsplus import kept_count
from .arguments import QTSplusTrainingArguments

LOST = 4.0  # nats: an answer that has lost so many is wrong, and may lose any number more
CHEAPEST = 1e-5  # nats a token: the largest budget costs less than a wrong word


class RunningMeans:
    """Sums and weights by name, kept on the device. The names are fixed: every process reduces the same tensor."""

    def __init__(self, names: tuple[str, ...], device: torch.device):
        self.names = names
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.totals = torch.zeros(len(names), 2, dtype=dtype, device=device)

    def add(self, name: str, total: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Adds a sum over `weight` things."""
        row = self.totals[self.names.index(name)]
        row[0] += total.detach()
        row[1] += weight

    def pop(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The means of all names that anything was added to, over all processes; starts afresh."""
        totals = reduce(self.totals).tolist()
        self.totals.zero_()
        return {name: total / weight for name, (total, weight) in zip(self.names, totals, strict=True) if weight > 0}


class RhoControl:
    """
    The penalties on rho, the running mean of rho and the dual variable; see [`QTSplusTrainer`]. `running` is what is
    logged, in evaluation (`False`) and in training (`True`).
    """

    def __init__(self, selector: Any, args: QTSplusTrainingArguments, running: Mapping[bool, RunningMeans]):
        self.selector, self.args, self.running = selector, args, running
        self.alpha, self.excess = 0.0, 0.0
        # Sums over the current step: rho (in the units of rho_history), samples, and tokens asked for
        self._step = torch.zeros(3, dtype=torch.int64, device=args.device)
        self.start_step()

    def start_step(self) -> None:
        """Takes the mean of rho over all steps so far, which this step's prior is."""
        self._rho_history = self.selector.rho_history.clone()

    def price(self) -> dict[str, float]:
        """By its name what holds the mean count at `target_n`."""
        config = self.selector.config
        return {"token_price": config.token_price} if config.budget == "loss" else {"alpha": self.alpha}

    def set_price(self, state: Mapping[str, Any]) -> None:
        """As [`RhoControl.price`] gave it."""
        for name in self.price():
            setattr(self if name == "alpha" else self.selector.config, name, state[name])

    def loss(self, qtsplus: Any, samples: torch.Tensor, training: bool, asked: bool = True) -> torch.Tensor | float:
        """
        This micro-batch's part of the terms; without `training` they are only logged.

        Args:
            qtsplus: the selector's output; `None` in batches of text.
            samples: `[]`, those of the whole step with visual tokens.
            asked: whether the model chose its budget, and not the call.
        """
        if qtsplus is None:
            return 0.0
        config = self.selector.config
        num_tokens = qtsplus.num_tokens
        with_vision = num_tokens > 0
        count = with_vision.sum()
        rho, kept, num_tokens = qtsplus.rho[with_vision], qtsplus.n[with_vision], num_tokens[with_vision]
        soft_n = rho * num_tokens
        soft_n = soft_n - (soft_n - config.n_max).clamp(min=0).detach()  # the count of the gate, the gradient of rho M
        pairs = zip(rho.tolist(), num_tokens.tolist(), strict=True)
        counts = rho.new_tensor([kept_count(share, m, config.n_max) for share, m in pairs], dtype=torch.long)
        running = self.running[training]
        logged = {"rho": rho, "n": kept, "n_soft": soft_n, "visual_tokens": num_tokens}
        logged |= {"kept_fraction": kept / num_tokens, "hard_over_soft": kept / soft_n}
        for name, values in logged.items():
            running.add(name, values.sum(), count)
        asked &= rho.requires_grad or (config.budget != "rho" and config.selection == "qtsplus")
        if not training or asked:
            running.add("n_asked", counts.sum(), count)  # by the model itself
        if training and asked:
            self._step += torch.stack([(rho.detach().double() * 2.0**32).round().long().sum(), count, counts.sum()])
        if not training or not rho.requires_grad:
            return 0.0  # there is no rho to learn where everything is kept

        prior, (total, seen) = config.rho_prior, self._rho_history  # fixed, or the running mean over all earlier steps
        if prior is None:
            prior = (total / seen / 2.0**32).float() if seen > 0 else rho.detach()
        loss_s = (config.lambda_s * (rho - prior).pow(2)).sum()
        terms = {"loss_t": qtsplus.loss_t * count, "loss_m": qtsplus.loss_m * count, "loss_s": loss_s}
        for name, term in {**terms, "threshold": qtsplus.threshold[with_vision].sum()}.items():
            running.add(name, term, count)
        total = sum(terms.values())
        if config.target_n is not None:
            damping = self.args.dual_damping * self.excess / config.target_n
            total = total + (self.alpha + damping) * (soft_n - config.target_n).sum()
        return total / samples.clamp(min=1)

    def finish_step(self, sum_over_processes: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Moves the running mean of rho and the dual variable by what all processes saw in this optimizer step."""
        config = self.selector.config
        step = sum_over_processes(self._step)
        _, samples, n = step
        if config.rho_prior is None:
            self.selector.rho_history.copy_(self._rho_history + step[:2])
        target = config.target_n
        if target is not None and samples > 0:
            # A start far above the target must not wind alpha up further than one far below could unwind it.
            self.excess = min(float(n / samples) / target - 1, 1.0)
            move = self.args.dual_learning_rate * self.excess
            if config.budget == "loss":
                # Where the bounds forbid the target it would run away; no token is worth more than an answer can lose.
                config.token_price = min(max(config.token_price * math.exp(move), CHEAPEST), LOST)
            else:
                self.alpha = max(0.0, self.alpha + move / target)
        self._step.zero_()


def most_tokens(totals: Sequence[int], config: Any) -> torch.Tensor:
    """`[B]` int64, of each row's visual tokens the most that `rho_max` and `n_max` allow; 1 where there are none."""
    return torch.tensor([kept_count(config.rho_max, total, config.n_max) for total in totals])


def loss_differences(predicted: torch.Tensor, measured: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """
    How far off losses `[B, K]` are that a `QTSplusLossHead` predicts, of each row the mean over its counts: `[rows with
    visual tokens]` (smooth L1). `measured` `[B, K]` is the cross-entropy of the answer with 1, 2, 4, ... tokens. What
    is lost is lost against the largest count that the row allows, by `most` `[B]`, and counts up to [`LOST`].
    """
    within = 2 ** torch.arange(measured.shape[1], device=most.device) <= most[:, None]
    excess = measured - measured.gather(1, within.sum(1, keepdim=True) - 1)
    off = F.smooth_l1_loss(predicted, excess.clamp(0, LOST), reduction="none")
    return ((off * within).sum(1) / within.sum(1))[most > 1]
