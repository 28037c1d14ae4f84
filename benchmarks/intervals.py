"""Gains and correlations of questions that are independent between videos only, and how shares are written."""

from collections.abc import Mapping

import numpy as np

from qtsplus.evaluation.intervals import interval_and_p, share_interval


def paired_gain(differences: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """As [`share_interval`], of differences from -1 to 1; `p` is two-sided, of a mean of 0, by the same interval."""
    interval, p = interval_and_p(differences, clusters, (-1.0, 1.0))
    return {**interval, "p": p} if interval else {}


def percent(share: float) -> str:
    return f"{share:.1%}"


def percent_interval(share: float, interval: Mapping[str, float]) -> str:
    """A share with its interval, where it has one."""
    return f"{share:.1%} ({interval['low']:.1%} to {interval['high']:.1%})" if interval else percent(share)


def correlation(x: np.ndarray, y: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """
    Pearson's r with its 95% interval, by a bootstrap over clusters. Nothing where x or y has one value only, or there
    is one cluster.
    """
    names, index = np.unique(clusters, return_inverse=True)
    if len(names) < 2 or _is_constant(x) or _is_constant(y):
        return {}
    members = [np.flatnonzero(index == number) for number in range(len(names))]
    generator, redrawn = np.random.default_rng(0), []
    for _ in range(2000):
        rows = np.concatenate([members[number] for number in generator.integers(len(members), size=len(members))])
        if not _is_constant(x[rows]) and not _is_constant(y[rows]):
            redrawn.append(np.corrcoef(x[rows], y[rows])[0, 1])
    low, high = np.quantile(redrawn, (0.025, 0.975))
    return {"r": float(np.corrcoef(x, y)[0, 1]), "low": float(low), "high": float(high)}


def _is_constant(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= 1e-9 * max(1.0, float(np.abs(values).max())))


__all__ = ["correlation", "paired_gain", "percent", "percent_interval", "share_interval"]
