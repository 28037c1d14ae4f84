"""
Questions to what a stream remembers, some of the tokens of some of its steps: which of them are in the prompt, and at
which times. live/stream.py decides what is remembered, and answers.py asks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..model.layout_qtsplus import VisualSpan
from ..model.prompt_qtsplus import VIDEO, Layout
from ..video.encoded import EncodedVideo


@dataclass(frozen=True, kw_only=True)
class Remembered(EncodedVideo):
    """
    What a stream remembers of a camera, as a video of the steps that are left.

    Args:
        frames_per_step: of every camera of the stream.
        cells: the tokens of a whole step.
        rows: the step in time of each step of the grid.
        missing: frames that the last of them lacks.
        begins: when the first frame of some steps was taken, in seconds; others begin on the clock.
        places: `[M]` ascending, where the features stand in the grid, which has more tokens.
    """

    frames_per_step: int
    cells: int
    rows: list[int]
    missing: int
    places: Tensor
    begins: dict[int, float]

    @property
    def frames(self) -> int:
        steps = (self.places // self.cells).unique()
        return self.frames_per_step * len(steps) - self.missing

    @property
    def length(self) -> float:
        """Seconds on the stream's clock."""
        return self.about.start + self.about.length

    def span(self, first: int, last: int) -> tuple[float, float]:
        start_step = self.rows[first]
        end_step = self.rows[last - 1] + 1
        seconds = self.seconds_per_step
        start = self.begins.get(start_step, start_step * seconds)
        regular_end = min(end_step * seconds, self.length)
        return start, self.begins.get(end_step, regular_end)


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
    positions_of_step = backbone.tokens_per_second * videos[0].seconds_per_step
    steps_in_room = room / max(positions_of_step, 1)
    most = max(int(steps_in_room) - 1, 1)
    numbers = within([video.rows for video in videos], most)
    layout = at_steps(backbone, layout, numbers)
    layout = layout.narrow([video.places for video in videos])
    if backbone.rope_axes == 1:  # the language model counts tokens: those that are there
        (row,) = layout.rows
        row.language_positions = torch.arange(len(row.ids))[None]
    places = []
    tokens_before = 0
    for video, grid in zip(videos, grids, strict=True):
        places.append(video.places + tokens_before)
        tokens_before += math.prod(grid)
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
    oldest = min(steps[0] for steps in rows)
    newest = max(steps[-1] for steps in rows)
    length = newest - oldest
    excess = max(0, length - most)
    older_half = most - most // 2  # positions
    share = older_half / (older_half + excess)
    numbers = []
    for steps in rows:
        numbers_of_row = []
        for step in steps:
            number = step - oldest
            drawn_together = int(number * share)
            numbers_of_row.append(max(number - excess, drawn_together))
        numbers.append(numbers_of_row)
    return numbers


def at_steps(
    model,
    layout: Layout,
    numbers: Sequence[Sequence[int]],
) -> Layout:
    """The layout of one prompt, whose videos have steps with these numbers in time in place of 0, 1, 2, ..."""
    (row,) = layout.rows
    positions = row.positions.clone()
    language_positions = row.language_positions.clone()
    has_language_time = model.rope_axes == 3 and not model.frames_apart  # else time is text, or a token's number
    shifts = [_shifts(model, layout, video, numbers_of_video) for video, numbers_of_video in enumerate(numbers)]
    for span in row.spans:
        selector_shift, language_shift = shifts[span.index]
        frames, height, width = span.grid
        steps = slice(span.frame, span.frame + frames)
        columns = span.token_columns()
        cells = height * width
        shift = selector_shift[steps]
        positions[0, columns] += shift.repeat_interleave(cells)
        if has_language_time:
            shift = language_shift[steps]
            language_positions[0, columns] += shift.repeat_interleave(cells)
    row = replace(row, positions=positions, language_positions=language_positions)
    return replace(layout, rows=[row])


def _shifts(
    model,
    layout: Layout,
    video: int,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """`[T]` each: how much later each step of a video is on the selector's clock, and on the language model's."""
    steps = torch.tensor(numbers)
    count = len(numbers)
    grid = (numbers[-1] + count, 1, 1)
    line = VisualSpan(VIDEO, video, 0, grid)
    by_selector = model.row_positions([line], line.length, layout.seconds)
    by_language_model = model.language_positions([line], by_selector)
    selector_clock = by_selector[0]
    language_clock = by_language_model[0]
    selector_shift = selector_clock[steps] - selector_clock[:count]
    language_shift = language_clock[steps] - language_clock[:count]
    return selector_shift, language_shift
