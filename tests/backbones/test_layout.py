"""Spans with newlines, frames apart, separators and the text in front of frames, without a model."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import booleans, data, integers, sets, tuples

from qtsplus.model.layout_qtsplus import QTSplusBackboneMixin, VisualSpan, find_separators, find_spans
from qtsplus.model.prompt_qtsplus import IMAGE, TEXT, VIDEO, PromptRow
from qtsplus.model.question_qtsplus import find_query_mask
from tiny import assert_same

SIDE = integers(1, 4)
GRIDS = tuples(SIDE, SIDE, SIDE)


class FramesApart(QTSplusBackboneMixin):
    frames_apart = True


def unplaced(grid):
    return {
        IMAGE: [],
        VIDEO: FramesApart().visual_spans(VIDEO, [grid]),
    }


def span_of(grid, by_row, start):
    """A video with a newline behind every row, or behind all of it."""
    line = grid[2] if by_row else math.prod(grid)
    return VisualSpan(VIDEO, 0, start, grid, line=line)


def kept_columns(spans, length, kept_indices):
    """`[length]` bool, the columns of a row that stay where some candidates do."""
    positions = torch.zeros(3, length, dtype=torch.long)
    columns = torch.arange(length)
    tokens = [span.token_columns() for span in spans]
    row = PromptRow(
        columns=columns,
        ids=columns,
        spans=spans,
        positions=positions,
        language_positions=positions,
        candidates=torch.cat(tokens),
        separators=find_separators(spans, length),
    )
    return row.keep(torch.tensor(sorted(kept_indices)))


def newlines(span):
    return find_separators([span], span.stop)[0]


def numbers(is_set):
    """The places where a bool tensor is true."""
    (places,) = is_set.nonzero(as_tuple=True)
    return set(places.tolist())


@given(grid=GRIDS, by_row=booleans(), start=integers(0, 5))
def test_tokens_and_newlines_fill_a_span(grid, by_row, start):
    span = span_of(grid, by_row, start)
    tokens = span.token_columns()
    ends = newlines(span)
    assert_same(torch.cat([tokens, ends]).sort().values, torch.arange(start, span.stop))
    assert len(ends) == span.tokens // span.line
    assert ends[-1] == span.stop - 1


@given(grid=GRIDS, by_row=booleans(), draws=data())
def test_a_newline_stays_exactly_where_a_token_of_its_line_does(grid, by_row, draws):
    span = span_of(grid, by_row, 2)
    kept = draws.draw(sets(integers(0, span.tokens - 1), min_size=1))
    keep = kept_columns([span], span.length + 4, kept)
    assert numbers(keep[span.token_columns()]) == kept
    lines = {token // span.line for token in kept}
    assert numbers(keep[newlines(span)]) == lines
    assert keep[:2].all()
    assert keep[-2:].all()


def test_a_video_does_not_go_on_in_another_row():
    first = torch.tensor([TEXT, VIDEO, VIDEO, TEXT])
    second = torch.tensor([VIDEO, VIDEO, TEXT])
    with pytest.raises(ValueError, match="There are 2 video placeholder.* in row 1, but video 0 needs 2"):
        find_spans([first, second], unplaced((2, 1, 2)))


USER = 90
END = 91
BREAK = 10
IMG = 92
IMG_END = 93
PAD = 94
FRAME = 40


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ([], [1, 2]),
        ([1, 2], []),
        ([1], [2, FRAME]),
        ([FRAME, 1], [2]),
    ],
)
@pytest.mark.parametrize("line_break", [[BREAK], []], ids=["lines", "no lines"])
def test_the_text_of_frames_is_no_question(count, before, behind, line_break):
    frame = [FRAME, 41, 42, IMG, PAD, PAD, IMG_END]
    next_frame = line_break + frame
    video = frame + next_frame * (count - 1)
    ids = torch.tensor([USER, BREAK, *before, *video, *behind, END])
    (mask,) = find_query_mask(
        ids[None],
        attention_mask=None,
        user_turn_token_ids=[USER],
        turn_end_token_id=END,
        special_token_ids=[IMG, IMG_END, PAD, USER, END],
        video_token_id=PAD,
        frame_text_token_ids=[FRAME],
    )
    assert ids[mask.bool()].tolist() == before + behind
