"""Spans with newlines, frames apart, separators and the text in front of frames, without a model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qtsplus.model.layout_qtsplus import QTSplusBackboneMixin, VisualSpan, find_separators, find_spans
from qtsplus.model.prompt_qtsplus import IMAGE, TEXT, VIDEO, PromptRow
from qtsplus.model.question_qtsplus import find_query_mask

GRIDS = st.tuples(*[st.integers(1, 4)] * 3)


class FramesApart(QTSplusBackboneMixin):
    frames_apart = True


def unplaced(grid):
    return {IMAGE: [], VIDEO: FramesApart().visual_spans(VIDEO, [grid])}


def row_of(spans, length):
    candidates = torch.cat([span.token_columns() for span in spans])
    nothing = torch.zeros(3, length, dtype=torch.long)
    columns = torch.arange(length)
    return PromptRow(columns, columns, spans, nothing, nothing, candidates, find_separators(spans, length))


@given(grid=GRIDS, by_row=st.booleans(), start=st.integers(0, 5))
def test_tokens_and_newlines_fill_a_span(grid, by_row, start):
    t, h, w = grid
    span = VisualSpan(VIDEO, 0, start, grid, line=w if by_row else t * h * w)
    tokens, ends = span.token_columns(), span.line_ends()
    assert torch.equal(torch.cat([tokens, ends]).sort().values, torch.arange(start, start + span.length))
    assert len(ends) == (t * h if by_row else 1) and int(ends[-1]) == start + span.length - 1


@given(grid=GRIDS, by_row=st.booleans(), data=st.data())
def test_a_newline_stays_exactly_where_a_token_of_its_line_does(grid, by_row, data):
    t, h, w = grid
    line = w if by_row else t * h * w
    span = VisualSpan(VIDEO, 0, 2, grid, line=line)
    kept = data.draw(st.sets(st.integers(0, t * h * w - 1), min_size=1))
    keep = row_of([span], span.length + 4).keep(torch.tensor(sorted(kept)))
    assert set(span.token_columns()[keep[span.token_columns()]].tolist()) == {2 + i + i // line for i in kept}
    assert keep[span.line_ends()].tolist() == [
        any(i // line == number for i in kept) for number in range(t * h * w // line)
    ]
    assert keep[:2].all() and keep[-2:].all()


@given(frames=st.integers(1, 5), tokens=st.integers(1, 4), text=st.integers(2, 4), data=st.data())
def test_a_frame_goes_with_its_text_behind_the_first(frames, tokens, text, data):
    # What stands: 3 x prompt, then per frame its text, its tokens and one token that closes it, then 2 x prompt.
    length = 3 + frames * (text + tokens + 1) + 2
    types = torch.full((length,), TEXT)
    starts = [3 + text + frame * (text + tokens + 1) for frame in range(frames)]
    for start in starts:
        types[start : start + tokens] = VIDEO
    (spans,) = find_spans([types], unplaced((frames, 1, tokens)))
    assert [span.start for span in spans] == starts and [span.frame for span in spans] == list(range(frames))
    kept = data.draw(st.sets(st.integers(0, frames * tokens - 1), min_size=1))
    keep = row_of(spans, length).keep(torch.tensor(sorted(kept)))
    for frame, start in enumerate(starts):
        stays = frame == 0 or any(index // tokens == frame for index in kept)
        around = [*range(start - text, start), start + tokens]
        assert keep[around].tolist() == [stays] * (text + 1)
        assert keep[start : start + tokens].tolist() == [frame * tokens + i in kept for i in range(tokens)]
    assert keep[:3].all() and keep[-2:].all()


def test_a_video_does_not_go_on_in_another_row():
    types = torch.tensor([TEXT, VIDEO, VIDEO, TEXT, VIDEO, VIDEO, TEXT])
    halves = [types[:4], types[3:]]
    with pytest.raises(ValueError, match="Row 1: 2 video placeholder"):
        find_spans(halves, unplaced((2, 1, 2)))


USER, END, BREAK, IMG, IMG_END, PAD, FRAME = 90, 91, 10, 92, 93, 94, 40
HEADER = [FRAME, 41, 42]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("before", "behind"), [([], [1, 2]), ([1, 2], []), ([1], [2, FRAME]), ([FRAME, 1], [2])])
@pytest.mark.parametrize("line_break", [True, False])
def test_the_text_of_frames_is_no_question(count, before, behind, line_break):
    frame = [*HEADER, IMG, PAD, PAD, IMG_END]
    video = frame + [token for _ in range(count - 1) for token in ([BREAK] if line_break else []) + frame]
    ids = torch.tensor([[USER, BREAK, *before, *video, *behind, END]])
    mask = find_query_mask(ids, None, [USER], END, [IMG, IMG_END, PAD, USER, END], PAD, [FRAME])
    assert ids[0][mask[0].bool()].tolist() == before + behind
