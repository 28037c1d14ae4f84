"""Kept tokens become seconds and regions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qtsplus.asking.evidence import STRONG, evidence_intervals
from qtsplus.video.grids import keep_maps, token_grids, token_maps

MERGE = 2
FOUR_STEPS = torch.tensor([[4, 4, 4]])  # 4 steps of 2 x 2 tokens


def spans_of(intervals):
    return [(interval.start, interval.end) for interval in intervals]


def test_neighbouring_steps_form_one_interval():
    kept = torch.tensor([0, 5, 12, 15])  # steps 0, 1 and 3
    relevance = torch.zeros(16)
    relevance[kept] = torch.tensor([0.21, 0.23, 0.25, 0.27])
    intervals = evidence_intervals(kept, relevance, FOUR_STEPS, [0.5], MERGE)
    assert spans_of(intervals) == [(1.5, 2.0), (0.0, 1.0)]
    assert [interval.weight for interval in intervals] == pytest.approx([0.52 / 0.96, 0.44 / 0.96])
    assert [interval.box for interval in intervals] == [(0.5, 0.5, 1.0, 1.0), (0.0, 0.0, 1.0, 0.5)]


def test_what_was_kept_since_there_was_room_is_no_evidence():
    relevance = torch.full((16,), 0.01)
    relevance[[5, 9, 12]] = torch.tensor([0.4, 0.21, 0.19])  # half of the highest is enough
    every_token = torch.arange(16)
    (interval,) = evidence_intervals(every_token, relevance, FOUR_STEPS, [1.0], MERGE)
    assert (interval.start, interval.end) == (1.0, 3.0)
    assert interval.box == (0.5, 0.0, 1.0, 0.5)
    assert interval.weight == pytest.approx(0.67 / relevance.sum().item())


def test_tokens_weigh_the_same_where_the_selection_did_not_look():
    kept = torch.tensor([0, 1, 8])
    unknown = torch.empty(0)
    intervals = evidence_intervals(kept, unknown, torch.tensor([[3, 4, 4]]), [1.0], MERGE)
    assert [interval.weight for interval in intervals] == pytest.approx([2 / 3, 1 / 3])


def test_a_second_video_counts_from_its_own_beginning():
    grids = torch.tensor([[2, 4, 4], [2, 2, 4]])  # 8 and 4 tokens
    kept = torch.tensor([1, 10])
    intervals = evidence_intervals(kept, None, grids, [1.0, 0.25], MERGE)
    assert [interval.video for interval in intervals] == [0, 1]
    assert spans_of(intervals) == [(0.0, 1.0), (0.25, 0.5)]


@pytest.mark.parametrize(
    ("strong_share", "spans"),
    [(STRONG, [(1.0, 2.0), (3.0, 4.0)]), (0.2, [(1.0, 4.0)])],
)
def test_what_shows_it_is_evidence_though_an_answer_needs_less_of_it(strong_share, spans):
    kept = torch.tensor([1])
    relevance = torch.tensor([0.0, 0.3, 0.1, 0.3, 0.0, 0.1])
    grid = torch.tensor([[6, 2, 2]])
    assert spans_of(evidence_intervals(kept, relevance, grid, [1.0], MERGE, strong_share)) == spans


def test_weak_tokens_lengthen_a_stretch_and_make_none():
    kept = torch.tensor([12])
    relevance_of_steps = torch.tensor([0.3, 0.0, 0.3, 1.0, 0.2, 0.0, 0.3])
    relevance = relevance_of_steps.repeat_interleave(4) / 8.4
    grid = torch.tensor([[7, 4, 4]])
    intervals = evidence_intervals(kept, relevance, grid, [1.0], MERGE, strong_share=0.2)
    assert spans_of(intervals) == [(2.0, 5.0)]


def test_the_keep_map_is_laid_out_as_time_height_width():
    (kept,) = keep_maps(torch.tensor([0, 3, 7]), torch.tensor([[2, 4, 4]]), MERGE)
    first_step = [[True, False], [False, True]]
    second_step = [[False, False], [False, True]]
    assert kept.tolist() == [first_step, second_step]


def test_no_kept_token_is_no_evidence():
    nothing = torch.empty(0, dtype=torch.long)
    assert evidence_intervals(nothing, torch.ones(4), torch.tensor([[1, 4, 4]]), [1], MERGE) == []


@st.composite
def samples(draw):
    """A sample of 1 to 3 videos with some of their tokens kept: indices, relevance, grids and seconds per step."""
    steps = st.integers(1, 6)
    side = st.integers(1, 3)
    grids = torch.tensor(draw(st.lists(st.tuples(steps, side, side), min_size=1, max_size=3)))
    tokens = int(grids.prod(1).sum())
    videos = len(grids)
    kept = draw(st.sets(st.integers(0, tokens - 1), min_size=1))
    relevance = draw(st.lists(st.floats(0, 1, width=32), min_size=tokens, max_size=tokens))
    seconds = draw(st.lists(st.floats(0.01, 100), min_size=videos, max_size=videos))
    patches = grids * torch.tensor([1, MERGE, MERGE])
    return torch.tensor(sorted(kept)), torch.tensor(relevance), patches, seconds


def strong_maps(kept_indices, relevance, grid_thw):
    """Per video bool `[T, H, W]`: the tokens that count as evidence."""
    relevance = relevance.double()
    strong = (relevance >= STRONG * relevance.max()) & (relevance > 0)
    if not strong.any():
        strong[kept_indices] = True
    return token_maps(strong, token_grids(grid_thw, MERGE))


@given(samples())
def test_keep_maps_hold_the_kept_tokens(sample):
    kept_indices, _, grid_thw, _ = sample
    maps = keep_maps(kept_indices, grid_thw, MERGE)
    assert [tuple(kept.shape) for kept in maps] == token_grids(grid_thw, MERGE)
    flat = torch.cat([kept.flatten() for kept in maps])
    assert flat.nonzero()[:, 0].tolist() == kept_indices.tolist()


@given(samples())
def test_intervals_cover_exactly_the_steps_with_strong_tokens(sample):
    kept_indices, relevance, grid_thw, seconds = sample
    intervals = evidence_intervals(kept_indices, relevance, grid_thw, seconds, MERGE)
    weights = [interval.weight for interval in intervals]
    assert 0 < sum(weights) < 1 + 1e-6
    assert weights == sorted(weights, reverse=True)
    for video, is_strong in enumerate(strong_maps(kept_indices, relevance, grid_thw)):
        covered = [False] * len(is_strong)
        for interval in intervals:
            if interval.video != video:
                continue
            first = round(interval.start / seconds[video])
            last = round(interval.end / seconds[video])
            assert not any(covered[max(first - 1, 0) : last + 1]), "neighbours were not merged"
            covered[first:last] = [True] * (last - first)
            check_box(interval.box, is_strong[first:last].any(0))
        assert covered == is_strong.any(2).any(1).tolist()


def check_box(box, is_strong):
    """Every row and every column of a box holds something strong."""
    height, width = is_strong.shape
    left, top, right, bottom = box
    rows = slice(round(top * height), round(bottom * height))
    columns = slice(round(left * width), round(right * width))
    inside = is_strong[rows, columns]
    assert inside.any(0).all()
    assert inside.any(1).all()


def test_a_box_is_of_the_group_with_the_most_and_joins_no_cell_elsewhere():
    relevance = torch.zeros(2 * 25)
    relevance[[6, 7]] = torch.tensor([0.6, 0.7])  # an object in the first step
    relevance[[25 + 7, 25 + 12]] = torch.tensor([0.7, 0.6])  # it has moved in the second
    relevance[24] = 1.0  # a far cell
    kept = relevance.nonzero()[:, 0]
    (interval,) = evidence_intervals(kept, relevance, torch.tensor([[2, 10, 10]]), [1.0], MERGE)
    assert interval.box == (0.2, 0.2, 0.6, 0.6)
    assert interval.weight == pytest.approx(1)
