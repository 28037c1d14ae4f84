"""
Prompts about a stream, which remembers some of the tokens of some of its steps in time: where these tokens stand in the
prompt, and at which times. live/stream.py decides what is remembered, and answers.py asks.
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
    What a stream remembers of a camera, as a video. Of the steps in time without a remembered token, only the first of
    each gap is in its grid.

    Args:
        frames_per_step: of every camera of the stream.
        cells: the number of tokens in a complete step.
        step_numbers: for each step of the grid, its number in the stream.
        missing: how many frames the last step lacks.
        begins: by the number of a step, the second in which its first frame was taken. A step that is not in it begins
            at its number times `seconds_per_step`.
        places: `[M]` ascending, the index of each remembered token among all tokens of the grid.
    """

    frames_per_step: int
    cells: int
    step_numbers: list[int]
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
        start_step = self.step_numbers[first]
        end_step = self.step_numbers[last - 1] + 1
        seconds = self.seconds_per_step
        start = self.begins.get(start_step, start_step * seconds)
        regular_end = min(end_step * seconds, self.length)
        return start, self.begins.get(end_step, regular_end)


def remembered_layout(
    model,
    layout: Layout,
    videos: Sequence[Remembered],
    new_tokens: int,
) -> tuple[Layout, Tensor]:
    """
    The layout of one prompt with only the remembered tokens, at their times, and `[k]` ascending, the index of each
    among all tokens of the grids. Times that need more positions than the model has are compressed.
    """
    backbone = model.model
    grids = layout.grids[VIDEO]
    is_text = backbone.token_types(layout.input_ids) != VIDEO
    # The positions that are left for time, without those of the answer, the text, and the height and width of frames.
    room = model.config.get_text_config().max_position_embeddings - new_tokens
    room -= int(is_text.sum())
    for _, height, width in grids:
        room -= max(height, width)
    positions_per_step = backbone.tokens_per_second * videos[0].seconds_per_step
    steps_in_room = room / max(positions_per_step, 1)
    most = max(int(steps_in_room) - 1, 1)
    numbers = compress([video.step_numbers for video in videos], most)
    layout = move_steps(backbone, layout, numbers)
    layout = layout.narrow([video.places for video in videos])
    if backbone.rope_axes == 1:  # the language model only counts tokens, so the remembered ones are counted
        (row,) = layout.rows
        row.language_positions = torch.arange(len(row.ids), device="cpu")[None]
    places = []
    tokens_before = 0
    for video, grid in zip(videos, grids, strict=True):
        places.append(video.places + tokens_before)
        tokens_before += math.prod(grid)
    return layout, torch.cat(places)


def mark_gaps(steps: Sequence[int]) -> list[int]:
    """
    The steps in order, each once, with one empty step at the beginning of each gap. So evidence on both sides of a gap
    is not taken for one interval.
    """
    numbers: list[int] = []
    for step in sorted(set(steps)):
        if numbers and step > numbers[-1] + 1:
            numbers.append(numbers[-1] + 1)
        numbers.append(step)
    return numbers


def compress(
    steps_of_videos: Sequence[Sequence[int]],
    most: int,
) -> list[list[int]]:
    """
    The steps of each video, counted from the oldest of all and compressed so that no number exceeds `most`.

    Steps in the newer half of the numbers keep their distances. If the rest is too long, it is compressed evenly into
    the older half.
    """
    oldest = min(steps[0] for steps in steps_of_videos)
    newest = max(steps[-1] for steps in steps_of_videos)
    length = newest - oldest
    excess = max(0, length - most)
    older_half = most - most // 2
    share = older_half / (older_half + excess)
    numbers_of_videos = []
    for steps in steps_of_videos:
        numbers = []
        for step in steps:
            number = step - oldest
            compressed = int(number * share)
            numbers.append(max(number - excess, compressed))
        numbers_of_videos.append(numbers)
    return numbers_of_videos


def move_steps(
    model,
    layout: Layout,
    numbers: Sequence[Sequence[int]],
) -> Layout:
    """The layout of one prompt, with the steps of its videos at the times of these numbers instead of 0, 1, 2, ..."""
    (row,) = layout.rows
    positions = row.positions.clone()
    language_positions = row.language_positions.clone()
    # Otherwise the language model reads times as text, or only counts tokens.
    has_language_time = model.rope_axes == 3 and not model.frames_apart
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
    """`[T]` each: how far the steps of a video move in the selector's positions, and in the language model's."""
    count = len(numbers)
    # A video of one token per step, long enough for the old and the new numbers.
    grid = (numbers[-1] + count, 1, 1)
    line = VisualSpan(VIDEO, video, 0, grid)
    by_selector = model.row_positions([line], line.length, layout.seconds)
    by_language_model = model.language_positions([line], by_selector)
    selector_shift = by_selector[0, numbers] - by_selector[0, :count]
    language_shift = by_language_model[0, numbers] - by_language_model[0, :count]
    return selector_shift, language_shift
