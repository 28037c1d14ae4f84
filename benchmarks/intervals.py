"""
95% intervals, p-values, gains and correlations of questions that are independent between videos only, and how shares
are written.
"""

import functools

import numpy as np


def share_interval(values: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """
    The mean of shares, from 0 to 1, with its 95% interval: Student's t over clusters, with their number - 1 degrees of
    freedom. Where all clusters have the same mean, such as 0 or 1, it is Clopper and Pearson's interval instead.

    Args:
        values: `[questions]`.
        clusters: `[questions]`, such as the video of each.

    Returns:
        `mean`, `low` and `high`; nothing where there is one cluster.
    """
    return interval_and_p(values, clusters, (0.0, 1.0))[0]


def interval_and_p(
    values: np.ndarray, clusters: np.ndarray, bounds: tuple[float, float]
) -> tuple[dict[str, float], float]:
    """As [`share_interval`], of values within `bounds`; and the two-sided p of a mean of 0, by the same interval."""
    names, index = np.unique(clusters, return_inverse=True)
    count = len(names)
    if count < 2:
        return {}, 1.0
    mean = float(np.mean(values))
    sums = np.bincount(index, weights=values - mean)
    error = float(np.sqrt(count / (count - 1) * np.sum(sums**2))) / len(values)
    least, most = bounds
    if error > 1e-12:
        angles, tails = _student(count - 1)
        half = np.sqrt(count - 1) * np.tan(np.interp(-0.05, -tails, angles)) * error
        low, high = max(least, mean - half), min(most, mean + half)
        p = float(np.interp(np.arctan(abs(mean) / error / np.sqrt(count - 1)), angles, tails))
    else:
        # Were more than this share of all clusters different, one would be among these with 97.5%.
        different = 1 - 0.025 ** (1 / count)
        low, high = mean - different * (mean - least), mean + different * (most - mean)
        p = min(1.0, 2 * (1 + abs(mean)) ** -count)
    return {"mean": mean, "low": float(low), "high": float(high)}, p


@functools.lru_cache
def _student(degrees: int) -> tuple[np.ndarray, np.ndarray]:
    """Angles, and the chance that |t| of Student's distribution is above sqrt(degrees) tan(angle)."""
    angles = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angles) ** (degrees - 1)
    areas = (density[1:] + density[:-1])[::-1].cumsum()[::-1]
    return angles, np.append(areas, 0.0) / areas[0]


def paired_gain(differences: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """As [`share_interval`], of differences from -1 to 1; `p` is two-sided, of a mean of 0, by the same interval."""
    interval, p = interval_and_p(differences, clusters, (-1.0, 1.0))
    return {**interval, "p": p} if interval else {}


def percent(share: float) -> str:
    return f"{share:.1%}"


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
