"""What is computed from answers: ranks, areas, intervals of chance."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def ranks(values: Any) -> np.ndarray:
    """Ranks from 0, ties sharing their mean."""
    _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts + 1) / 2)[place]


def spearman(one: Any, other: Any) -> float:
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def area_under_curve(positive: Any, negative: Any) -> float:
    """How often a positive has the larger value; ties count half."""
    difference = np.asarray(positive)[:, None] - np.asarray(negative)[None]
    return float((np.sign(difference).mean() + 1) / 2)


def overlap(one: set[int], other: set[int]) -> float:
    """Intersection over union; 0 of two empty sets."""
    return len(one & other) / max(1, len(one | other))


def constant_right(right: np.ndarray, counts: Sequence[int], wanted: float) -> np.ndarray:
    """
    Per question, whether it is right with `wanted` tokens; between counts of the ladder on a line over the logarithm.

    Args:
        right: `[questions, counts]` bool.
    """
    log_counts, log_wanted = np.log(counts), np.log(np.clip(wanted, counts[0], counts[-1]))
    above = int(np.searchsorted(log_counts, log_wanted))
    if log_counts[above] == log_wanted:
        return right[:, above].astype(float)
    part = (log_wanted - log_counts[above - 1]) / (log_counts[above] - log_counts[above - 1])
    return (1 - part) * right[:, above - 1] + part * right[:, above]


def tokens_for(right: np.ndarray, counts: Sequence[int], wanted: float) -> float:
    """The fewest tokens with which a constant budget is right as often; infinite if it never is."""
    shares = np.maximum.accumulate(right.mean(0))
    if shares[-1] < wanted:
        return float("inf")
    return float(np.exp(np.interp(wanted, shares, np.log(counts))))


def interval(differences: np.ndarray, groups: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """The middle 95% of the mean when whole groups (videos) are drawn again."""
    rng = np.random.default_rng(0)
    names, place = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(place, differences), np.bincount(place)
    drawn = rng.integers(len(names), size=(draws, len(names)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
