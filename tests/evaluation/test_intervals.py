"""Intervals, paired tests and correlations of questions that are independent between videos only."""

import numpy as np
import pytest

from qtsplus.evaluation.intervals import correlation, paired_test


def test_a_paired_test_counts_signs_of_videos_not_of_questions():
    # Two of the eight ways to draw three signs are as extreme as all alike, however many questions a video has.
    for copies in (1, 50):
        differences, videos = np.ones(3 * copies), np.repeat(["a", "b", "c"], copies)
        assert paired_test(differences, videos) == pytest.approx(2 / 8)
    assert paired_test(np.zeros(6), np.arange(6)) == 1.0
    assert paired_test(np.array([1.0, -1.0]), np.array([0, 1])) == 1.0


def test_with_many_videos_signs_are_drawn_and_p_is_that_of_all_signs():
    rng = np.random.default_rng(0)
    differences, videos = rng.normal(0.1, 1, 13), np.arange(13)
    exact = paired_test(differences, videos, draws=2**13)
    assert paired_test(differences, videos, draws=8000) == pytest.approx(exact, abs=0.02)
    assert 0 < paired_test(np.ones(40), np.arange(40)) < 0.001


def test_a_correlation_is_pearsons_with_its_line_and_an_interval_over_videos():
    rng = np.random.default_rng(1)
    videos = np.repeat(np.arange(30), 4)
    x = 1e6 + rng.normal(size=120)
    y = 3 * (x - 1e6) + rng.normal(size=120)
    found = correlation(x, y, videos)
    assert found["r"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    slope, intercept = np.polyfit(x - 1e6, y, 1)
    assert found["slope"] == pytest.approx(slope)
    assert found["intercept"] + found["slope"] * 1e6 == pytest.approx(intercept, abs=1e-6)
    assert found["low"] < found["r"] < found["high"] < 1
    # The same questions four times over, in the same videos, say no more.
    again = correlation(*(np.tile(values, 4) for values in (x, y, videos)))
    assert again["high"] - again["low"] == pytest.approx(found["high"] - found["low"], rel=1e-6)


def test_what_never_varies_correlates_with_nothing():
    assert correlation(np.full(6, 5.66), np.arange(6.0), np.arange(6)) == {}
    assert correlation(np.arange(6.0), np.full(6, 0.1), np.arange(6)) == {}
    assert correlation(np.arange(6.0), np.arange(6.0), np.zeros(6)) == {}
