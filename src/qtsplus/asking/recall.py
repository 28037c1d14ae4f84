"""Questions to what a stream remembers: some of the tokens of some of its steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..model.layout_qtsplus import VisualSpan
from ..model.prompt_qtsplus import VIDEO, Layout
from ..video.encoded import EncodedVideo


class Clock(Protocol):
    """What the cameras of a stream share."""

    frames_per_step: int
    seconds_per_step: float


@dataclass(frozen=True, kw_only=True)
class Remembered(EncodedVideo):
    """
    What a stream remembers of a camera, as a video of the steps that are left.

    Args:
        clock: the stream, whose cameras share one.
        cells: the tokens of a whole step.
        rows: the step in time of each step of the grid.
        missing: frames that the last of them lacks.
        begins: when the first frame of some steps was taken, in seconds; others begin on the clock.
        places: `[M]` ascending, where the features stand in the grid, which has more tokens.
    """

    clock: Clock
    cells: int
    rows: list[int]
    missing: int
    places: Tensor
    begins: dict[int, float]

    @property
    def frames(self) -> int:
        steps = (self.places // self.cells).unique()
        return self.clock.frames_per_step * len(steps) - self.missing

    def span(self, first: int, last: int) -> tuple[float, float]:
        start_step = self.rows[first]
        end_step = self.rows[last - 1] + 1
        seconds = self.clock.seconds_per_step
        start = self.begins.get(start_step, start_step * seconds)
        regular_end = min(end_step * seconds, self.length)
        end = self.begins.get(end_step, regular_end)
        return start, end


def narrowed(
    model,
    layout: Layout,
    videos: Sequence[Remembered],
    new_tokens: int,
) -> tuple[Layout, Tensor]:
    """
    The layout of one prompt about what is remembered, with the tokens that are there, at their times: [`within`] what
    the model has positions for, behind the text; and `[k]` ascending, which tokens of the whole grids these are.
    """
    backbone = model.model
    grids = layout.grids[VIDEO]
    is_text = backbone.token_types(layout.input_ids) != VIDEO
    room = model.config.get_text_config().max_position_embeddings - new_tokens
    room -= int(is_text.sum())
    for _, height, width in grids:
        room -= max(height, width)
    clock = videos[0].clock
    positions_per_step = max(backbone.tokens_per_second * clock.seconds_per_step, 1)
    most_steps = int(room / positions_per_step) - 1
    numbers = within([video.rows for video in videos], max(most_steps, 1))
    layout = at_steps(backbone, layout, numbers)
    layout = layout.narrow([video.places for video in videos])
    if backbone.rope_axes == 1:  # the language model counts tokens: those that are there
        row = layout.rows[0]
        columns = row.columns
        order = torch.arange(len(columns), device=columns.device)
        row = replace(row, language_positions=order[None])
        layout = replace(layout, rows=[row])
    places = []
    first = 0
    for video, grid in zip(videos, grids, strict=True):
        places.append(video.places + first)
        first += math.prod(grid)
    return layout, torch.cat(places)


def rows_of(steps: Sequence[int]) -> list[int]:
    """The steps that are there, and one in front of each gap: what shows the same on both sides is no one stretch."""
    rows: list[int] = []
    for step in sorted(set(steps)):
        if rows and step > rows[-1] + 1:
            rows.append(rows[-1] + 1)
        rows.append(step)
    return rows


def within(
    rows: Sequence[Sequence[int]],
    most: int,
) -> list[list[int]]:
    """
    The same steps, counted from the oldest, at most `most` of them.

    Where the time between the oldest and the newest is longer, the newer half of the positions is true, and all that
    is older is drawn together evenly.
    """
    first = min(steps[0] for steps in rows)
    last = max(steps[-1] for steps in rows)
    true = most // 2  # positions of the newest steps
    drawn_together = most - true
    share = 1.0
    if last - first > most:
        share = drawn_together / (last - true - first)
    numbers = []
    for steps in rows:
        counted = []
        for step in steps:
            since_oldest = step - first
            newer = min(most - last + step, since_oldest)
            older = int(since_oldest * share)
            counted.append(max(newer, older))
        numbers.append(counted)
    return numbers


def at_steps(
    model,
    layout: Layout,
    numbers: Sequence[Sequence[int]],
) -> Layout:
    """The layout of one prompt, whose videos have steps with these numbers in time in place of 0, 1, 2, ..."""
    row = layout.rows[0]
    positions = row.positions.clone()
    language = row.language_positions.clone()
    shifts = []
    for video, steps_of_video in enumerate(numbers):
        shifts.append(_shifts(model, layout, video, steps_of_video))
    for span in row.spans:
        selector_shift, language_shift = shifts[span.index]
        frames, height, width = span.grid
        steps = slice(span.frame, span.frame + frames)
        columns = span.token_columns().to(positions.device)
        cells = height * width
        positions[0, columns] += selector_shift[steps].repeat_interleave(cells)
        if model.rope_axes == 3 and not model.frames_apart:  # else time is text, or a token's number
            language[0, columns] += language_shift[steps].repeat_interleave(cells)
    row = replace(row, positions=positions, language_positions=language)
    return replace(layout, rows=[row])


def _shifts(
    model,
    layout: Layout,
    video: int,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """`[T]` each: how much later each step of a video is on the selector's clock, and on the language model's."""
    device = layout.rows[0].positions.device
    steps = torch.tensor(numbers, device=device)
    count = len(numbers)
    grid = (numbers[-1] + count, 1, 1)
    line = VisualSpan(VIDEO, video, 0, grid)
    by_selector = model.row_positions([line], line.length, layout.seconds, device)
    by_language_model = model.language_positions([line], by_selector)
    shifts = []
    for positions in (by_selector, by_language_model):
        clock = positions[0]
        shifts.append(clock[steps] - clock[:count])
    selector_shift, language_shift = shifts
    return selector_shift, language_shift
