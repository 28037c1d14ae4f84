"""Weighted means that several processes collect between two lines of the log."""

from collections.abc import Callable

import torch


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


__all__ = ["RunningMeans"]
