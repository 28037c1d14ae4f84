"""Questions to what a stream remembers: some of the tokens of some of its steps, alone or beside whole videos."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from .layout_qtsplus import VisualSpan
from .prompt_qtsplus import VIDEO, Layout
from .videos import EncodedVideo

if TYPE_CHECKING:
    from .stream import Camera, Stream


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


def narrowed(
    model: Any, layout: Layout, videos: Sequence[EncodedVideo], max_new_tokens: int
) -> tuple[Layout, torch.Tensor]:
    """
    The layout of one prompt about videos of which some are remembered, with the tokens that are there, at their times;
    and `[k]` ascending, which tokens of the whole grids these are.
    """
    places = [one.places if isinstance(one, Remembered) else torch.arange(len(one.features)) for one in videos]
    layout = at_steps(model.model, layout, _numbers(model, videos, layout.input_ids, max_new_tokens))
    layout = layout.narrow(places)
    if model.model.rope_axes == 1:  # the language model counts tokens: those that are there
        row = layout.rows[0]
        order = torch.arange(len(row.columns), device=row.columns.device)[None]
        layout = replace(layout, rows=[replace(row, language_positions=order)])
    starts = accumulate(map(math.prod, layout.grids[VIDEO]), initial=0)
    return layout, torch.cat([own + start for own, start in zip(places, starts, strict=False)])


def _numbers(
    model: Any, videos: Sequence[EncodedVideo], input_ids: torch.Tensor, max_new_tokens: int
) -> list[list[int]]:
    """The number in time of each step of the videos: [`within`] what the model has positions for, behind the text."""
    backbone = model.model
    grids = [backbone.merged_grid(video.video_grid_thw)[0] for video in videos]
    text = int((backbone.token_types(input_ids) != VIDEO).sum()) + sum(max(grid[1:]) for grid in grids)
    room = model.config.get_text_config().max_position_embeddings - text - max_new_tokens
    numbers = [list(range(grid[0])) for grid in grids]
    for clock in {video.clock for video in videos if isinstance(video, Remembered)}:
        per_step = max(backbone.tokens_per_second * clock.seconds_per_step, 1)
        own = {n: one.rows for n, one in enumerate(videos) if isinstance(one, Remembered) and one.clock is clock}
        shared = within(list(own.values()), max(int(room / per_step) - 1, 1))
        for index, steps in zip(own, shared, strict=True):
            numbers[index] = steps
    return numbers


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
    return torch.tensor([row_of[step] for step in camera.tokens.steps.tolist()]) * math.prod(camera.cells) + (
        camera.tokens.cells
    )


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
        clock = model.row_positions(line, line[0].length, 0, layout.seconds, positions.device)
        spoken = model.language_positions(line, 0, clock)
        return clock[0, steps] - clock[0, : len(steps)], spoken[0, steps] - spoken[0, : len(steps)]

    for span in row.spans:
        own, size = slice(span.frame, span.frame + span.grid[0]), span.grid[1] * span.grid[2]
        columns = span.token_columns().to(positions.device)
        shift, spoken = (by_step[own].repeat_interleave(size) for by_step in shifts(span.index))
        positions[0, columns] += shift
        if model.rope_axes == 3 and not model.frames_apart:  # else time is text, or a token's number
            language[0, columns] += spoken
    return replace(layout, rows=[replace(row, positions=positions, language_positions=language)])
