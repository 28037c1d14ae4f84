"""Ways to keep tokens of a film for a summary."""

from typing import Any

import numpy as np
import torch

from qtsplus.model.methods_qtsplus import Candidates, top_n

BUDGETS = (64, 256, 1024)


def spread_relevance(candidates: Candidates, n: int) -> torch.Tensor:
    """The most relevant token in each of n equal parts of the time, or several in each step."""
    ((steps, *cells),) = candidates.grids
    parts = max(1, min(n, steps))
    edges = [part * steps // parts * int(np.prod(cells)) for part in range(parts + 1)]
    kept = []
    for part in range(parts):
        share = (part + 1) * n // parts - part * n // parts
        relevance = candidates.log_relevance[edges[part] : edges[part + 1]]
        kept.append(edges[part] + top_n(relevance, share))
    return torch.cat(kept)


WAYS: dict[str, Any] = {
    "relevance": "qtsplus",
    "relevance, spread": spread_relevance,
    "uniform": "uniform",
    "diversity": "diversity",
    "coverage": "coverage",
}
