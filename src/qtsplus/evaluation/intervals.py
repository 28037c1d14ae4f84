"""Means with intervals, for answers that are not independent."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def clustered_interval(values: np.ndarray | Sequence[float], clusters: np.ndarray | Sequence[Any]) -> dict[str, float]:
    """
    Mean with the bounds of its 95% interval, for values that are independent between clusters only.

    Args:
        values: `[questions]`.
        clusters: `[questions]`, such as the video of each.

    Returns:
        `mean`, `low` and `high`; nothing for fewer than two clusters.
    """
    values = np.asarray(values, dtype=float)
    names, index = np.unique(clusters, return_inverse=True)
    if len(names) < 2:
        return {}
    mean = float(np.mean(values))
    sums = np.bincount(index, weights=values - mean)
    error = float(np.sqrt(len(names) / (len(names) - 1) * np.sum(sums**2))) / len(values)
    return {"mean": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}


__all__ = ["clustered_interval"]
