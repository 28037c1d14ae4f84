"""Kept tokens become seconds and regions."""

from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clips import make_world, render_world
from qtsplus.asking.evidence import evidence_intervals
from qtsplus.asking.session import ask, encode
from qtsplus.model.layout_qtsplus import token_grids
from qtsplus.video.grids import token_maps

MERGE = 2
STRONG = 0.5


def grid_of(*sizes):
    """The patches `[N, 3]` of videos whose grids have these sizes in tokens."""
    patches_per_token = torch.tensor([1, MERGE, MERGE])
    return torch.tensor(sizes) * patches_per_token


FOUR_STEPS = grid_of((4, 2, 2))
TWO_VIDEOS = grid_of((2, 2, 2), (2, 1, 2))


def intervals_of(
    kept,
    relevance,
    grid,
    seconds=(1.0,),
    strong_share=STRONG,
):
    return evidence_intervals(
        torch.tensor(kept),
        relevance,
        grid,
        seconds,
        MERGE,
        strong_share,
    )


def spans_of(intervals):
    return [(interval.start, interval.end) for interval in intervals]


def weights_of(intervals):
    return [interval.weight for interval in intervals]


def relevance_of(count, values):
    """`[count]`: these values by their places, and zeros."""
    relevance = torch.zeros(count)
    for place, value in values.items():
        relevance[place] = value
    return relevance


def test_neighbouring_steps_form_one_interval():
    values = {0: 0.21, 5: 0.23, 12: 0.25, 15: 0.27}  # in the steps 0, 1 and 3
    relevance = relevance_of(16, values)
    last, first = intervals_of(list(values), relevance, FOUR_STEPS, [0.5])
    assert (first.start, first.end) == (0.0, 1.0)
    assert (last.start, last.end) == (1.5, 2.0)
    assert first.weight == pytest.approx(0.44 / 0.96)
    assert last.weight == pytest.approx(0.52 / 0.96)
    assert first.box == (0.0, 0.0, 1.0, 0.5)
    assert last.box == (0.5, 0.5, 1.0, 1.0)


def test_what_was_kept_since_there_was_room_is_no_evidence():
    relevance = torch.full((16,), 0.01)
    relevance[5] = 0.4
    relevance[9] = 0.21  # half of the highest is enough
    relevance[12] = 0.19
    (interval,) = intervals_of(list(range(16)), relevance, FOUR_STEPS)
    assert interval.start == 1.0
    assert interval.end == 3.0
    assert interval.box == (0.5, 0.0, 1.0, 0.5)
    total = float(relevance.sum())
    assert interval.weight == pytest.approx(0.67 / total)


def test_tokens_weigh_the_same_where_the_selection_did_not_look():
    heavy, light = intervals_of([0, 1, 8], torch.empty(0), grid_of((3, 2, 2)))
    assert heavy.weight == pytest.approx(2 / 3)
    assert light.weight == pytest.approx(1 / 3)


def test_a_second_video_counts_from_its_own_beginning():
    first, second = intervals_of([1, 10], None, TWO_VIDEOS, [1.0, 0.25])
    assert first.video == 0
    assert second.video == 1
    assert (first.start, first.end) == (0.0, 1.0)
    assert (second.start, second.end) == (0.25, 0.5)


SHARES = [
    (STRONG, [(1.0, 2.0), (3.0, 4.0)]),
    (0.2, [(1.0, 4.0)]),
]


@pytest.mark.parametrize(("share", "spans"), SHARES)
def test_what_shows_it_is_evidence_though_an_answer_needs_less_of_it(share, spans):
    relevance = torch.tensor([0.0, 0.3, 0.1, 0.3, 0.0, 0.1])
    intervals = intervals_of([1], relevance, grid_of((6, 1, 1)), strong_share=share)
    assert spans_of(intervals) == spans


def test_weak_tokens_lengthen_a_stretch_and_make_none():
    relevance = torch.tensor([0.3, 0.0, 0.3, 1.0, 0.2, 0.0, 0.3]).repeat_interleave(4) / 8.4
    intervals = intervals_of([12], relevance, grid_of((7, 2, 2)), strong_share=0.2)
    assert spans_of(intervals) == [(2.0, 5.0)]


def test_no_kept_token_is_no_evidence():
    nothing = torch.empty(0, dtype=torch.long)
    assert evidence_intervals(nothing, torch.ones(4), grid_of((1, 2, 2)), [1], MERGE, STRONG) == []


def test_a_box_is_of_the_group_with_the_most_and_joins_no_cell_elsewhere():
    values = {
        6: 0.6,  # an object in the first step
        7: 0.7,
        24: 1.0,  # a far cell
        25 + 7: 0.7,  # the object has moved in the second step
        25 + 12: 0.6,
    }
    relevance = relevance_of(50, values)
    grid = grid_of((2, 5, 5))
    (interval,) = intervals_of(list(values), relevance, grid)
    assert interval.box == (0.2, 0.2, 0.6, 0.6)
    assert interval.weight == pytest.approx(1)


@st.composite
def samples(draw):
    """A sample of 1 to 3 videos with some of their tokens kept: indices, relevance, grids and seconds per step."""
    steps = st.integers(1, 6)
    side = st.integers(1, 3)
    grids = draw(st.lists(st.tuples(steps, side, side), min_size=1, max_size=3))
    videos = len(grids)
    patches = grid_of(*grids)
    all_patches = int(patches.prod(1).sum())
    tokens = all_patches // MERGE**2
    places = st.integers(0, tokens - 1)
    kept = draw(st.sets(places, min_size=1))
    kept_indices = torch.tensor(sorted(kept))
    relevance = draw(st.lists(st.floats(0, 1, width=32), min_size=tokens, max_size=tokens))
    seconds = draw(st.lists(st.floats(0.01, 100), min_size=videos, max_size=videos))
    return kept_indices, torch.tensor(relevance), patches, seconds


def strong_maps(kept_indices, relevance, grid_thw):
    """Per video bool `[T, H, W]`: the tokens that count as evidence."""
    relevance = relevance.double()
    is_enough = relevance >= STRONG * relevance.max()
    strong = is_enough & (relevance > 0)
    if not strong.any():
        strong[kept_indices] = True
    return token_maps(strong, token_grids(grid_thw, MERGE))


@given(samples())
def test_intervals_cover_exactly_the_steps_with_strong_tokens(sample):
    kept_indices, relevance, grid_thw, seconds = sample
    intervals = evidence_intervals(kept_indices, relevance, grid_thw, seconds, MERGE, STRONG)
    weights = weights_of(intervals)
    assert 0 < sum(weights) < 1 + 1e-6
    assert weights == sorted(weights, reverse=True)
    for video, is_strong in enumerate(strong_maps(kept_indices, relevance, grid_thw)):
        covered = torch.zeros(len(is_strong), dtype=torch.bool)
        for interval in intervals:
            if interval.video != video:
                continue
            first = round(interval.start / seconds[video])
            last = round(interval.end / seconds[video])
            around = covered[max(first - 1, 0) : last + 1]
            assert not around.any(), "neighbours were not merged"
            covered[first:last] = True
            check_box(interval.box, is_strong[first:last].any(0))
        has_strong = is_strong.flatten(1).any(1)
        assert torch.equal(covered, has_strong)


def check_box(box, is_strong):
    """Every row and every column of a box holds something strong."""
    height, width = is_strong.shape
    left, top, right, bottom = box
    rows = is_strong[round(top * height) : round(bottom * height)]
    inside = rows[:, round(left * width) : round(right * width)]
    assert inside.any(0).all()
    assert inside.any(1).all()


# A player's clock -----------------------------------------------------------------------------------------------------


SIXTEENTH = Fraction(1, 16)
WORLD = make_world(10)


def write_at(path, frames, times):
    """Each frame at its time, in seconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "10"}
        stream.time_base = SIXTEENTH
        stream.codec_context.time_base = SIXTEENTH
        for frame, time in zip(frames, times, strict=True):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts = round(16 * time)
            picture.time_base = SIXTEENTH
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


@pytest.mark.parametrize("late", [0.0, 3.0])
def test_evidence_of_a_variable_rate_is_on_the_players_clock(loaded, tmp_path, late):
    """Four frames a second at first and sixteen later: most of the frames show the second half."""
    times = np.concatenate([np.arange(0, 4, 0.25), np.arange(4, 8, 0.0625)])
    shown = render_world(WORLD)[(2 * times).astype(int)]
    path = tmp_path / "video.mp4"
    write_at(path, shown, late + times)
    video = encode(*loaded, path)
    answered = 0
    for thing in WORLD.objects:
        answer = ask(*loaded, video, thing.question, max_new_tokens=8)
        if answer.answer != thing.mark:
            continue
        answered += 1
        place = answer.evidence[0]
        assert late <= place.start < place.end <= late + 8.1
        assert place.start - late < thing.vanishes_at
        assert place.end - late > thing.appears_at
    assert answered >= 3
