"""What the page of the world without a grid is computed with, and that a model can be asked for it."""

import numpy as np
import pytest

from benchmarks.open.asking import OpenTest, of_other_videos, otherwise, with_another_word
from benchmarks.open.haystack import counts_by_length
from benchmarks.open.measures import (
    area_under_curve,
    constant_right,
    interval,
    overlap,
    ranks,
    spearman,
    tokens_for,
)
from benchmarks.open.run import nothing_seen
from benchmarks.world.open_sets import build_open
from qtsplus.training.models import make_config, make_model, make_processor

OPEN = "hub_configs/qtsplus-tiny"
COUNTS = (1, 2, 4)
RIGHT = np.array([[False, False, True], [False, True, True], [True, True, True], [False, False, False]])


def test_ranks_share_ties_and_order_is_all_that_counts():
    assert ranks([3, 1, 1, 7]).tolist() == [2.0, 0.5, 0.5, 3.0]
    assert spearman([1, 2, 3, 4], [1, 4, 9, 16]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)


def test_the_area_is_how_often_a_positive_is_larger():
    assert area_under_curve([3, 4], [1, 2]) == 1
    assert area_under_curve([1, 2], [3, 4]) == 0
    assert area_under_curve([1, 2], [1, 2]) == 0.5


def test_overlap_is_of_sets():
    assert overlap({1, 2, 3}, {2, 3, 4}) == 0.5
    assert overlap(set(), set()) == 0


def test_a_constant_budget_lies_between_the_counts_of_the_ladder():
    assert constant_right(RIGHT, COUNTS, 2).tolist() == [0, 1, 1, 0]
    assert constant_right(RIGHT, COUNTS, 2**1.5).tolist() == pytest.approx([0.5, 1, 1, 0])
    assert constant_right(RIGHT, COUNTS, 100).tolist() == [1, 1, 1, 0]
    assert tokens_for(RIGHT, COUNTS, 0.5) == pytest.approx(2)
    assert tokens_for(RIGHT, COUNTS, 0.9) == float("inf")


def test_the_interval_draws_whole_videos():
    groups = np.repeat(np.arange(40), 5)
    low, high = interval(np.tile([1.0, 0.0], 100), groups)
    assert low <= 0.5 <= high
    alike = interval(np.repeat(np.tile([1.0, 0.0], 20), 5), groups)
    assert alike[1] - alike[0] > high - low, "five answers about one video are not five videos"


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("open")
    path = build_open(folder, "test", 3, 8, variant="plain")
    model = make_model(None, OPEN, {}).eval()
    processor = make_processor(None, OPEN, make_config(None, OPEN, {}))
    return model, OpenTest(model, processor, path)


def test_a_model_can_be_asked_in_every_way(asked):
    model, test = asked
    everything = test.ask(model, selection="all")
    assert everything.kept == test.totals.tolist()
    assert np.nanmin(everything.share) == 1 and np.mean(everything.right) > 0.5
    few = test.ask(model, retention=1.0, max_visual_tokens=3)
    assert set(few.kept) == {3} and np.mean(few.right) < np.mean(everything.right)
    own = test.ask(model)
    assert np.mean(own.kept) < 0.2 * np.mean(test.totals)
    other = test.ask(model, queries=of_other_videos(test), retention=0.05)
    mine = test.ask(model, retention=0.05)
    assert np.nanmean(other.share) < np.nanmean(mine.share)


def test_changed_questions_differ_in_a_word_or_in_their_words(asked):
    _, test = asked
    questions = [row["question"] for row in test.rows]
    for changed in (with_another_word(test), *otherwise(test).values()):
        assert len(changed) == len(questions) and all(map(str.__ne__, changed, questions))
    for changed, question in zip(with_another_word(test), questions, strict=True):
        assert sum(map(str.__ne__, changed.split(), question.split())) == 1


def test_what_is_not_there_is_seen_less(asked):
    model, test = asked
    found = nothing_seen(model, test)
    assert found["area"]["what the null token leaves"] > 0.7
    assert found["overlap"] > found["overlap by chance"]


def test_a_longer_video_costs_few_tokens_more(asked):
    model, test = asked
    tokens = counts_by_length(model, test)["tokens"]
    assert tokens["600"] < 10 * tokens["8"]
