"""Questions to what a stream remembers: some of the tokens of some of its steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from ..model.layout_qtsplus import VisualSpan
from ..model.prompt_qtsplus import VIDEO, Layout
from ..video.encoded import EncodedVideo

if TYPE_CHECKING:
    from ..live.stream import Camera, Stream


@dataclass(frozen=True, kw_only=True)
class Remembered(EncodedVideo):
    """
    What a stream remembers of a camera, as a video of the steps that are left.

    Args:
        clock: the stream, whose cameras share one.
        rows: the step in time of each step of the grid.
        missing: frames that the last of them lacks.
        begins: when the first frame of some steps was taken, in seconds; others begin on the clock.
        places: `[M]` ascending, where the features stand in the grid, which has more tokens.
    """

    clock: "Stream"
    rows: list[int]
    missing: int
    places: torch.Tensor
    begins: dict[int, float]

    @property
    def frames(self) -> int:
        cells = math.prod(self.clock.model.model.merged_grid(self.video_grid_thw)[0][1:])
        return self.clock.frames_per_step * len((self.places // cells).unique()) - self.missing

    def span(self, first: int, last: int) -> tuple[float, float]:
        seconds, start, end = self.clock.seconds_per_step, self.rows[first], self.rows[last - 1] + 1
        return self.begins.get(start, start * seconds), self.begins.get(end, min(end * seconds, self.length))


def narrowed(model: Any, layout: Layout, videos: Sequence[Remembered], new_tokens: int) -> tuple[Layout, torch.Tensor]:
    """
    The layout of one prompt about what is remembered, with the tokens that are there, at their times: [`within`] what
    the model has positions for, behind the text; and `[k]` ascending, which tokens of the whole grids these are.
    """
    backbone, grids = model.model, layout.grids[VIDEO]
    text = int((backbone.token_types(layout.input_ids) != VIDEO).sum()) + sum(max(grid[1:]) for grid in grids)
    room = model.config.get_text_config().max_position_embeddings - text - new_tokens
    per_step = max(backbone.tokens_per_second * videos[0].clock.seconds_per_step, 1)
    numbers = within([one.rows for one in videos], max(int(room / per_step) - 1, 1))
    layout = at_steps(backbone, layout, numbers).narrow([one.places for one in videos])
    if backbone.rope_axes == 1:  # the language model counts tokens: those that are there
        row = layout.rows[0]
        order = torch.arange(len(row.columns), device=row.columns.device)[None]
        layout = replace(layout, rows=[replace(row, language_positions=order)])
    starts = accumulate(map(math.prod, grids), initial=0)
    return layout, torch.cat([one.places + start for one, start in zip(videos, starts, strict=False)])


def rows_of(steps: Sequence[int]) -> list[int]:
    """The steps that are there, and one in front of each gap: what shows the same on both sides is no one stretch."""
    rows: list[int] = []
    for step in sorted(set(steps)):
        if rows and step > rows[-1] + 1:
            rows.append(rows[-1] + 1)
        rows.append(step)
    return rows


def places_of(camera: "Camera", rows: Sequence[int]) -> torch.Tensor:
    """`[m]` ascending: where a camera's tokens stand in a video of these steps."""
    row_of = {step: row for row, step in enumerate(rows)}
    rows_of_tokens = torch.tensor([row_of[step] for step in camera.tokens.steps.tolist()])
    return rows_of_tokens * math.prod(camera.cells) + camera.tokens.cells


def within(rows: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """
    The same steps, counted from the oldest, at most `most` of them.

    Where the time between the oldest and the newest is longer, the newer half of the positions is true, and all that
    is older is drawn together evenly.
    """
    first, last = min(steps[0] for steps in rows), max(steps[-1] for steps in rows)
    if last - first <= most:
        return [[step - first for step in steps] for steps in rows]
    far = most - most // 2  # positions that are left to what is older
    share = far / (last - most // 2 - first)
    return [[max(most - last + step, int((step - first) * share)) for step in steps] for steps in rows]


def at_steps(model: Any, layout: Layout, numbers: Sequence[Sequence[int]]) -> Layout:
    """The layout of one prompt, whose videos have steps with these numbers in time in place of 0, 1, 2, ..."""
    row = layout.rows[0]
    positions, language = row.positions.clone(), row.language_positions.clone()

    @cache
    def shifts(video: int) -> tuple[torch.Tensor, torch.Tensor]:
        """By step, how much later it is on the selector's clock, and on the language model's."""
        steps = torch.tensor(numbers[video], device=positions.device)
        line = [VisualSpan(VIDEO, video, 0, (int(steps[-1]) + len(steps), 1, 1))]
        clock = model.row_positions(line, line[0].length, layout.seconds, positions.device)
        spoken = model.language_positions(line, clock)
        return clock[0, steps] - clock[0, : len(steps)], spoken[0, steps] - spoken[0, : len(steps)]

    for span in row.spans:
        own, size = slice(span.frame, span.frame + span.grid[0]), span.grid[1] * span.grid[2]
        columns = span.token_columns().to(positions.device)
        shift, spoken = (by_step[own].repeat_interleave(size) for by_step in shifts(span.index))
        positions[0, columns] += shift
        if model.rope_axes == 3 and not model.frames_apart:  # else time is text, or a token's number
            language[0, columns] += spoken
    return replace(layout, rows=[replace(row, positions=positions, language_positions=language)])
