"""Intervals of questions that are independent between videos only."""

import numpy as np
import pytest

from benchmarks.intervals import share_interval


def test_an_interval_is_students_t_over_videos():
    # Textbook quantiles of t; every video is asked about once, so the error is the standard error of the mean.
    for count, quantile in ((2, 12.7062), (3, 4.30265), (11, 2.22814), (61, 2.00030), (5001, 1.96044)):
        values = np.linspace(0.45, 0.55, count)
        error = values.std(ddof=1) / np.sqrt(count)
        found = share_interval(values, np.arange(count))
        low, high = max(0, 0.5 - quantile * error), min(1, 0.5 + quantile * error)
        assert (found["low"], found["high"]) == (pytest.approx(low, abs=1e-5), pytest.approx(high, abs=1e-5))


@pytest.mark.parametrize(("count", "bound"), [(2, 0.841886), (10, 0.308497), (18, 0.185302)])
def test_all_wrong_and_all_right_have_clopper_and_pearsons_interval(count, bound):
    videos = np.repeat(np.arange(count), 3)
    assert share_interval(np.zeros(3 * count), videos) == {"mean": 0, "low": 0, "high": pytest.approx(bound, abs=1e-6)}
    assert share_interval(np.ones(3 * count), videos)["low"] == pytest.approx(1 - bound, abs=1e-6)
    assert share_interval(np.zeros(5), np.zeros(5)) == {}, "one video says nothing of others"


def test_an_interval_lies_in_its_range_and_holds_the_mean():
    for count in range(2, 60):
        for right in range(count + 1):
            found = share_interval(np.arange(count) < right, np.arange(count))
            assert 0 <= found["low"] <= found["mean"] <= found["high"] <= 1
            assert found["low"] < found["high"]
