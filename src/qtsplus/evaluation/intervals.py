"""95% intervals and paired tests, for questions that are independent between videos only."""

import numpy as np


def clustered_interval(values: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """Mean with the bounds of its 95% interval, for values that are independent between clusters only."""
    names, index = np.unique(clusters, return_inverse=True)
    if len(names) < 2:
        return {}
    mean = float(np.mean(values))
    sums = np.bincount(index, weights=values - mean)
    error = float(np.sqrt(len(names) / (len(names) - 1) * np.sum(sums**2))) / len(values)
    return {"mean": mean, "low": mean - 1.96 * error, "high": mean + 1.96 * error}


def paired_test(differences: np.ndarray, clusters: np.ndarray, draws: int = 10_000) -> float:
    """
    The two-sided p-value of a mean difference of 0: how often it is as large when every cluster's sign is drawn anew.

    Args:
        differences: `[questions]`, of two ways to answer the same question.
        clusters: `[questions]`, such as the video of each.
        draws: of all signs; with fewer than 13 clusters every combination is tried instead.
    """
    names, index = np.unique(clusters, return_inverse=True)
    sums = np.bincount(index, weights=differences)
    if 2 ** len(names) <= draws:
        signs = 1 - 2 * (np.arange(2 ** len(names))[:, None] >> np.arange(len(names)) & 1)
        return float(np.mean(np.abs(signs @ sums) >= abs(sums.sum()) - 1e-9))
    signs = np.random.default_rng(0).choice([-1, 1], size=(draws, len(names)))
    as_large = np.sum(np.abs(signs @ sums) >= abs(sums.sum()) - 1e-9)
    return float((as_large + 1) / (draws + 1))  # what was measured is a draw itself, so p is never 0


def correlation(x: np.ndarray, y: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """
    Pearson's r with its 95% interval, by a bootstrap over clusters, and the least-squares line `y = slope x +
    intercept`. Nothing where x or y has one value only, or there is one cluster.
    """
    names, index = np.unique(clusters, return_inverse=True)
    if len(names) < 2 or _is_constant(x) or _is_constant(y):
        return {}
    mean_x, mean_y = float(x.mean()), float(y.mean())
    x, y = x - mean_x, y - mean_y  # or the squares of large numbers drown what varies
    moments = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y])
    by_cluster = np.stack([np.bincount(index, weights=row, minlength=len(names)) for row in moments])
    drawn = np.random.default_rng(0).integers(len(names), size=(2000, len(names)))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = _pearson(by_cluster[:, drawn].sum(-1))
    low, high = np.nanquantile(found, (0.025, 0.975))
    r = float(_pearson(by_cluster.sum(-1)))
    slope = float(moments[5].sum() / moments[3].sum())
    line = {"slope": slope, "intercept": mean_y - slope * mean_x}
    return {"r": r, "low": float(low), "high": float(high), **line}


def _pearson(sums: np.ndarray) -> np.ndarray:
    """From sums of 1, x, y, x^2, y^2 and xy."""
    count, x, y, xx, yy, xy = sums
    return (xy - x * y / count) / np.sqrt((xx - x * x / count) * (yy - y * y / count))


def _is_constant(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= 1e-9 * max(1.0, float(np.abs(values).max())))


__all__ = ["clustered_interval", "correlation", "paired_test"]
