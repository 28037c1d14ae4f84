"""Spans with newlines, frames apart, separators and the text in front of frames, without a model."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qtsplus.model.layout_qtsplus import QTSplusBackboneMixin, VisualSpan, find_separators, find_spans
from qtsplus.model.prompt_qtsplus import IMAGE, TEXT, VIDEO, PromptRow
from qtsplus.model.question_qtsplus import find_query_mask

SIDE = st.integers(1, 4)
GRIDS = st.tuples(SIDE, SIDE, SIDE)


class FramesApart(QTSplusBackboneMixin):
    frames_apart = True


def unplaced(grid):
    return {IMAGE: [], VIDEO: FramesApart().visual_spans(VIDEO, [grid])}


def span_of(grid, by_row, start):
    """A video with a newline behind every row, or behind all of it."""
    line = grid[2] if by_row else math.prod(grid)
    return VisualSpan(VIDEO, 0, start, grid, line=line)


def kept_columns(spans, length, kept_indices):
    """`[length]` bool, the columns of a row that stay where some candidates do."""
    nothing = torch.zeros(3, length, dtype=torch.long)
    columns = torch.arange(length)
    row = PromptRow(
        columns=columns,
        types=columns,
        spans=spans,
        positions=nothing,
        language_positions=nothing,
        candidates=torch.cat([span.token_columns() for span in spans]),
        separators=find_separators(spans, length),
    )
    return row.keep(torch.tensor(sorted(kept_indices)))


@given(grid=GRIDS, by_row=st.booleans(), start=st.integers(0, 5))
def test_tokens_and_newlines_fill_a_span(grid, by_row, start):
    span = span_of(grid, by_row, start)
    ends = span.line_ends()
    columns = torch.cat([span.token_columns(), ends])
    assert columns.sort().values.tolist() == list(range(start, span.stop))
    assert len(ends) == (grid[0] * grid[1] if by_row else 1)
    assert int(ends[-1]) == span.stop - 1


@given(grid=GRIDS, by_row=st.booleans(), data=st.data())
def test_a_newline_stays_exactly_where_a_token_of_its_line_does(grid, by_row, data):
    span = span_of(grid, by_row, 2)
    kept = data.draw(st.sets(st.integers(0, span.tokens - 1), min_size=1))
    keep = kept_columns([span], span.length + 4, kept)
    tokens = keep[span.token_columns()]
    assert set(tokens.nonzero().flatten().tolist()) == kept
    lines_kept = {token // span.line for token in kept}
    assert set(keep[span.line_ends()].nonzero().flatten().tolist()) == lines_kept
    assert keep[:2].all()
    assert keep[-2:].all()


@given(frames=st.integers(1, 5), tokens=st.integers(1, 4), text=st.integers(2, 4), data=st.data())
def test_a_frame_goes_with_its_text_behind_the_first(frames, tokens, text, data):
    # 3 x prompt, then per frame its text, its tokens and one token that closes it, then 2 x prompt.
    of_frame = [TEXT] * text + [VIDEO] * tokens + [TEXT]
    types = [TEXT] * 3 + of_frame * frames + [TEXT] * 2
    (spans,) = find_spans([torch.tensor(types)], unplaced((frames, 1, tokens)))
    kept = data.draw(st.sets(st.integers(0, frames * tokens - 1), min_size=1))
    keep = kept_columns(spans, len(types), kept).tolist()
    for frame, span in enumerate(spans):
        begin = 3 + frame * len(of_frame)
        assert span.frame == frame
        assert span.start == begin + text
        tokens_kept = [frame * tokens + token in kept for token in range(tokens)]
        stays = frame == 0 or any(tokens_kept)
        assert keep[begin : begin + len(of_frame)] == [stays] * text + tokens_kept + [stays]
    assert all(keep[:3])
    assert all(keep[-2:])


def test_a_video_does_not_go_on_in_another_row():
    types = torch.tensor([TEXT, VIDEO, VIDEO, TEXT, VIDEO, VIDEO, TEXT])
    with pytest.raises(ValueError, match="Row 1: 2 video placeholder"):
        find_spans([types[:4], types[3:]], unplaced((2, 1, 2)))


USER = 90
END = 91
BREAK = 10
IMG = 92
IMG_END = 93
PAD = 94
FRAME = 40


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("before", "behind"), [([], [1, 2]), ([1, 2], []), ([1], [2, FRAME]), ([FRAME, 1], [2])])
@pytest.mark.parametrize("line_break", [[BREAK], []], ids=["lines", "no lines"])
def test_the_text_of_frames_is_no_question(count, before, behind, line_break):
    frame = [FRAME, 41, 42, IMG, PAD, PAD, IMG_END]
    video = frame + (line_break + frame) * (count - 1)
    ids = torch.tensor([USER, BREAK, *before, *video, *behind, END])
    (mask,) = find_query_mask(ids[None], None, [USER], END, [IMG, IMG_END, PAD, USER, END], PAD, [FRAME])
    assert ids[mask.bool()].tolist() == before + behind
