"""Gains and correlations of questions that are independent between videos only."""

import numpy as np
import pytest

from benchmarks.intervals import correlation, paired_gain


def test_p_and_the_interval_of_a_gain_never_contradict_each_other():
    rng = np.random.default_rng(0)
    significant = 0
    for _ in range(400):
        count = int(rng.integers(2, 12))
        differences = rng.choice([-1, 0, 1], size=3 * count, p=(0.1, 0.4, 0.5)).astype(float)
        for values in (differences, np.full(3 * count, rng.choice([-1.0, 0.0, 0.5, 1.0]))):
            found = paired_gain(values, np.repeat(np.arange(count), 3))
            assert (found["p"] < 0.05) == (found["low"] > 0 or found["high"] < 0)
            significant += found["p"] < 0.05
    assert 100 < significant < 700


def test_a_gain_counts_videos_not_questions():
    # All better in three videos: two of the eight ways to draw their signs are as extreme.
    for copies in (1, 50):
        assert paired_gain(np.ones(3 * copies), np.repeat(["a", "b", "c"], copies))["p"] == pytest.approx(2 / 8)
    assert paired_gain(np.zeros(6), np.arange(6))["p"] == 1.0
    assert paired_gain(np.array([1.0, -1.0]), np.array([0, 1]))["p"] == pytest.approx(1.0)
    assert paired_gain(np.linspace(0, 1, 11), np.arange(11))["p"] == pytest.approx(0.000537, abs=1e-6)


def test_a_correlation_is_pearsons_with_an_interval_over_videos():
    rng = np.random.default_rng(1)
    videos = np.repeat(np.arange(30), 4)
    x = 1e6 + rng.normal(size=120)
    y = 3 * (x - 1e6) + rng.normal(size=120)
    found = correlation(x, y, videos)
    assert found["r"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert found["low"] < found["r"] < found["high"] < 1
    # The same questions four times over, in the same videos, say no more.
    again = correlation(*(np.tile(values, 4) for values in (x, y, videos)))
    assert again["high"] - again["low"] == pytest.approx(found["high"] - found["low"], rel=1e-6)


def test_what_never_varies_correlates_with_nothing():
    assert correlation(np.full(6, 5.66), np.arange(6.0), np.arange(6)) == {}
    assert correlation(np.arange(6.0), np.full(6, 0.1), np.arange(6)) == {}
    assert correlation(np.arange(6.0), np.arange(6.0), np.zeros(6)) == {}
