"""Kept tokens become seconds and regions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qtsplus.asking.evidence import STRONG, evidence_intervals
from qtsplus.video.grids import keep_maps, token_grids, token_maps

MERGE = 2


def test_neighbouring_steps_form_one_interval():
    grid = torch.tensor([[4, 4, 4]])  # 4 steps of 2 x 2 tokens
    kept = torch.tensor([0, 5, 12, 15])  # steps 0, 1 and 3
    relevance = torch.zeros(16)
    relevance[kept] = torch.tensor([0.21, 0.23, 0.25, 0.27])
    first, second = evidence_intervals(kept, relevance, grid, [0.5], MERGE)
    assert (first.start, first.end, second.start, second.end) == (1.5, 2.0, 0.0, 1.0)
    assert [first.weight, second.weight] == pytest.approx([0.52 / 0.96, 0.44 / 0.96])
    assert (first.box, second.box) == ((0.5, 0.5, 1.0, 1.0), (0.0, 0.0, 1.0, 0.5))


def test_what_was_kept_since_there_was_room_is_no_evidence():
    relevance = torch.full((16,), 0.01)
    relevance[[5, 9, 12]] = torch.tensor([0.4, 0.21, 0.19])  # half of the highest is enough
    (interval,) = evidence_intervals(torch.arange(16), relevance, torch.tensor([[4, 4, 4]]), [1.0], MERGE)
    assert (interval.start, interval.end, interval.box) == (1.0, 3.0, (0.5, 0.0, 1.0, 0.5))
    assert interval.weight == pytest.approx(0.67 / relevance.sum().item())


def test_tokens_weigh_the_same_where_the_selection_did_not_look():
    intervals = evidence_intervals(
        torch.tensor([0, 1, 8]), torch.empty(0), torch.tensor([[3, 4, 4]]), torch.tensor([1.0]), MERGE
    )
    assert [interval.weight for interval in intervals] == pytest.approx([2 / 3, 1 / 3])


def test_a_second_video_counts_from_its_own_beginning():
    grids = torch.tensor([[2, 4, 4], [2, 2, 4]])  # 8 and 4 tokens
    intervals = evidence_intervals(torch.tensor([1, 10]), None, grids, [1.0, 0.25], MERGE)
    assert [(i.video, i.start, i.end) for i in intervals] == [(0, 0.0, 1.0), (1, 0.25, 0.5)]


def test_what_shows_it_is_evidence_though_an_answer_needs_less_of_it():
    relevance = torch.tensor([0.0, 0.3, 0.1, 0.3, 0.0, 0.1])
    grid = torch.tensor([[6, 2, 2]])
    one = evidence_intervals(torch.tensor([1]), relevance, grid, [1.0], MERGE)
    assert [(i.start, i.end) for i in one] == [(1.0, 2.0), (3.0, 4.0)]
    more = evidence_intervals(torch.tensor([1]), relevance, grid, [1.0], MERGE, strong_share=0.2)
    assert [(i.start, i.end) for i in more] == [(1.0, 4.0)]


def test_weak_tokens_lengthen_a_stretch_and_make_none():
    relevance = torch.tensor([0.3, 0.0, 0.3, 1.0, 0.2, 0.0, 0.3]).repeat_interleave(4) / 8.4
    grid = torch.tensor([[7, 4, 4]])
    (one,) = evidence_intervals(torch.tensor([12]), relevance, grid, [1.0], MERGE, strong_share=0.2)
    assert (one.start, one.end) == (2.0, 5.0)


def test_the_keep_map_is_laid_out_as_time_height_width():
    (kept,) = keep_maps(torch.tensor([0, 3, 7]), torch.tensor([[2, 4, 4]]), MERGE)
    assert kept.tolist() == [[[True, False], [False, True]], [[False, False], [False, True]]]


def test_no_kept_token_is_no_evidence():
    assert evidence_intervals(torch.empty(0, dtype=torch.long), torch.ones(4), torch.tensor([[1, 4, 4]]), [1], 2) == []


def test_relevance_of_another_length_is_refused():
    with pytest.raises(ValueError, match="hold 4 tokens, but there are 5 values"):
        evidence_intervals(torch.tensor([0]), torch.ones(5), torch.tensor([[1, 4, 4]]), [1.0], MERGE)


@st.composite
def samples(draw):
    """A sample of 1 to 3 videos with some of their tokens kept."""
    side = st.integers(1, 3)
    grids = draw(st.lists(st.tuples(st.integers(1, 6), side, side), min_size=1, max_size=3))
    num_tokens = sum(t * h * w for t, h, w in grids)
    kept = draw(st.sets(st.integers(0, num_tokens - 1), min_size=1))
    relevance = draw(st.lists(st.floats(0, 1, width=32), min_size=num_tokens, max_size=num_tokens))
    seconds = draw(st.lists(st.floats(0.01, 100), min_size=len(grids), max_size=len(grids)))
    grid_thw = torch.tensor([(t, h * MERGE, w * MERGE) for t, h, w in grids])
    return torch.tensor(sorted(kept)), torch.tensor(relevance), grid_thw, seconds


@given(samples())
def test_intervals_cover_exactly_the_steps_with_strong_tokens(sample):
    kept_indices, relevance, grid_thw, seconds = sample
    intervals = evidence_intervals(kept_indices, relevance, grid_thw, seconds, MERGE)
    weights = [interval.weight for interval in intervals]
    assert 0 < sum(weights) < 1 + 1e-6 and weights == sorted(weights, reverse=True)

    maps = keep_maps(kept_indices, grid_thw, MERGE)
    assert [tuple(kept.shape) for kept in maps] == token_grids(grid_thw, MERGE)
    assert torch.equal(torch.cat([kept.flatten() for kept in maps]).nonzero()[:, 0], kept_indices)
    relevance = relevance.double()
    strong = (relevance >= STRONG * relevance.max()) & (relevance > 0)
    if not strong.any():
        strong[kept_indices] = True
    for video, (kept, is_strong) in enumerate(zip(maps, token_maps(strong, token_grids(grid_thw, MERGE)), strict=True)):
        own = sorted((interval for interval in intervals if interval.video == video), key=lambda one: one.start)
        middles = [(step + 0.5) * seconds[video] for step in range(len(kept))]
        covered = [any(i.start < middle < i.end for i in own) for middle in middles]
        assert covered == is_strong.any(2).any(1).tolist()
        assert all(a.end < b.start for a, b in zip(own, own[1:], strict=False)), "neighbours were not merged"
        _, height, width = kept.shape
        for interval in own:
            first, last = (round(second / seconds[video]) for second in (interval.start, interval.end))
            cells = is_strong[first:last].any(0)
            left, top, right, bottom = (round(s * n) for s, n in zip(interval.box, [width, height] * 2, strict=True))
            inside = cells[top:bottom, left:right]
            assert inside.any(0).all() and inside.any(1).all(), "a row or column of the box holds nothing strong"


def test_a_box_is_of_the_group_with_the_most_and_joins_no_cell_elsewhere():
    relevance = torch.zeros(2 * 25)
    relevance[[6, 7, 25 + 7, 25 + 12, 24]] = torch.tensor([0.6, 0.7, 0.7, 0.6, 1.0])  # an object that moves; a far cell
    (interval,) = evidence_intervals(relevance.nonzero()[:, 0], relevance, torch.tensor([[2, 10, 10]]), [1.0], MERGE)
    assert interval.box == (0.2, 0.2, 0.6, 0.6) and interval.weight == pytest.approx(1)
