"""Ways to keep tokens of a film for a summary."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from qtsplus.model.methods_qtsplus import Candidates, top_n

BUDGETS = (64, 256, 1024)
Method = Callable[[Candidates, int], torch.Tensor]


def _part(candidates: Candidates, low: int, high: int, _: torch.Tensor) -> torch.Tensor:
    return candidates.log_relevance[low:high]


def spread(choose: Method, tokens: int) -> Method:
    """A method in each of so many equal parts of the time that each keeps about `tokens`."""

    def method(candidates: Candidates, n: int) -> torch.Tensor:
        ((steps, *cells),) = candidates.grids
        parts = max(1, min(n // tokens, steps))
        edges = [part * steps // parts * int(np.prod(cells)) for part in range(parts + 1)]
        kept = []
        for part in range(parts):
            low = edges[part]
            high = edges[part + 1]
            relevance = partial(_part, candidates, low, high)
            own = Candidates([candidates.visual[0][low:high]], candidates.query, candidates.positions, [], relevance)
            share = (part + 1) * n // parts - part * n // parts
            kept.append(low + choose(own, share))
        return torch.cat(kept)

    return method


WAYS: dict[str, Any] = {
    "relevance": "qtsplus",
    "relevance, spread": spread(lambda own, n: top_n(own.log_relevance, n), 1),
    "uniform": "uniform",
    "diversity": "diversity",
    "coverage": "coverage",
}
