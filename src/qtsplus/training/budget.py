"""The objective's terms in rho, with what they remember from step to step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..selector_qtsplus import kept_count
from .arguments import QTSplusTrainingArguments


class RunningMeans:
    """
    Sums and weights by name, kept on the device until they are asked for.

    Args:
        names: of everything that may be added. Fixed, so that every process reduces the same tensor.
    """

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


class Budget:
    """
    The penalties on rho, the running mean of rho and the dual variable; see [`QTSplusTrainer`].

    Args:
        running: what is logged, in evaluation (`False`) and in training (`True`).
    """

    def __init__(self, selector: Any, args: QTSplusTrainingArguments, running: Mapping[bool, RunningMeans]):
        self.selector, self.args, self.running = selector, args, running
        self.alpha, self.excess = 0.0, 0.0
        # Sums over the current step: rho (in the units of rho_history), samples, and tokens asked for
        self._step_rho = torch.zeros(2, dtype=torch.int64, device=args.device)
        self._step_n = torch.zeros((), dtype=torch.int64, device=args.device)
        self.start_step()

    def start_step(self) -> None:
        """Takes the mean of rho over all steps so far, which this step's prior is."""
        self._rho_history = self.selector.rho_history.clone()

    def loss(self, qtsplus: Any, samples: torch.Tensor, training: bool) -> torch.Tensor | float:
        """
        This micro-batch's part of the terms.

        Args:
            qtsplus: the selector's output; `None` in batches of text.
            samples: `[]`, those of the whole step with visual tokens.
            training: whether they count, or are only logged.
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
        asked = torch.tensor([kept_count(share, m, config.n_max) for share, m in pairs], device=rho.device)
        running = self.running[training]
        for name, values in (
            ("rho", rho),
            ("n", kept),
            ("n_soft", soft_n),
            ("kept_fraction", kept / num_tokens),
            ("hard_over_soft", kept / soft_n),
            ("visual_tokens", num_tokens),
        ):
            running.add(name, values.sum(), count)
        if not training or rho.requires_grad:
            running.add("n_asked", asked.sum(), count)  # by the model itself
        if not training or not rho.requires_grad:
            return 0.0  # there is no budget to learn where everything is kept

        loss_s = (config.lambda_s * (rho - self._prior(rho)).pow(2)).sum()
        for name, total in (
            ("loss_t", qtsplus.loss_t * count),
            ("loss_m", qtsplus.loss_m * count),
            ("loss_s", loss_s),
            ("threshold", qtsplus.threshold[with_vision].sum()),
        ):
            running.add(name, total, count)
        self._step_rho += torch.stack([(rho.detach().double() * 2.0**32).round().long().sum(), count])
        self._step_n += asked.sum()
        total = (qtsplus.loss_t + qtsplus.loss_m) * count + loss_s
        if config.target_n is not None:
            damping = self.args.dual_damping * self.excess / config.target_n
            total = total + (self.alpha + damping) * (soft_n - config.target_n).sum()
        return total / samples.clamp(min=1)

    def _prior(self, rho: torch.Tensor) -> torch.Tensor | float:
        """rho_bar: fixed, or the running mean over all earlier steps; rho itself while there are none."""
        if self.selector.config.rho_prior is not None:
            return self.selector.config.rho_prior
        total, count = self._rho_history
        return (total / count / 2.0**32).float() if count > 0 else rho.detach()

    def finish_step(self, sum_over_processes: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Moves the running mean of rho and the dual variable by what all processes saw in this optimizer step."""
        config = self.selector.config
        rho, n = sum_over_processes(self._step_rho), sum_over_processes(self._step_n)
        if config.rho_prior is None:
            self.selector.rho_history.copy_(self._rho_history + rho)
        target = config.target_n
        if target is not None and rho[1] > 0:
            # A start far above the target must not wind alpha up further than one far below could unwind it.
            self.excess = min(float(n / rho[1]) / target - 1, 1.0)
            self.alpha = max(0.0, self.alpha + self.args.dual_learning_rate * self.excess / target)
        self._step_rho.zero_()
        self._step_n.zero_()
