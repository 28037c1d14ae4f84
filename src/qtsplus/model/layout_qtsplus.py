"""What a backbone hooks in, and how a prompt is laid out by it ([`lay_out`])."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .methods_qtsplus import TensorSequence
from .prompt_qtsplus import (
    IMAGE,
    MODALITIES,
    VIDEO,
    Grid,
    Grids,
    Layout,
    PromptRow,
    VisualInputs,
    check_grid,
    check_no_padding,
    check_shape,
    check_tensors,
    pad_rows,
)

Seconds = Sequence[float] | Tensor  # per video, from one step in time to the next
MOST_SECONDS = 1e9  # of a step in time, as in stored features; positions are whole numbers of 64 bits
FeaturesOfRows = Mapping[str, TensorSequence]  # per modality and row [k, d]

# --- Where images and videos are in a prompt ---


@dataclass(frozen=True)
class VisualSpan:
    """
    The placeholders of one image or video, or of one frame of a video whose frames have text between them.

    With `line`, a newline follows after every `line` tokens of the encoder. A 1 x 2 x 3 grid from column 4 on, with
    `line=3`, has 6 `tokens` (v) and 2 newlines (n):

        column   4  5  6  7  8  9 10 11
                 v  v  v  n  v  v  v  n
    """

    modality: int
    index: int  # among the batch's images, or its videos
    start: int  # the column of the first placeholder, among the real tokens of the row
    grid: Grid  # tokens along (time, height, width)
    frame: int = 0  # how many frames of the video are in front of this span
    line: int = 0

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def length(self) -> int:
        lines = self.tokens // self.line if self.line else 0
        return self.tokens + lines

    @property
    def stop(self) -> int:
        return self.start + self.length

    def token_columns(self) -> Tensor:
        """`[tokens]`, the columns of the encoder's tokens."""
        tokens = torch.arange(self.tokens, device="cpu")
        if self.line:
            tokens += tokens // self.line
        return self.start + tokens


def find_spans(token_types: list[Tensor], unplaced: Mapping[int, Sequence[VisualSpan]]) -> list[list[VisualSpan]]:
    """
    Pairs the placeholders of every row with the images and videos of the batch, in order.

    Args:
        token_types: per row `[S_b]`, TEXT, IMAGE or VIDEO for each real token.
        unplaced: per modality the spans of all images or videos of the batch, whose `start` is still to be found.

    Raises:
        ValueError: the placeholders do not add up to the spans.
    """
    queues = {modality: iter(spans) for modality, spans in unplaced.items()}
    rows = []
    for row, types in enumerate(token_types):
        placed: list[VisualSpan] = []
        for modality, start, stop in runs(types):
            while start < stop:
                span = next(queues[modality], None)
                placeholders = stop - start
                if span is None or not _fits(span, placeholders, placed):
                    name = MODALITIES[modality]
                    raise _mismatch(name, span, f"{placeholders} {name} placeholder(s) side by side in row {row}")
                span_in_row = replace(span, start=start)
                placed.append(span_in_row)
                start = span_in_row.stop
        rows.append(placed)
    for modality, queue in queues.items():
        span = next(queue, None)
        if span is not None:
            name = MODALITIES[modality]
            raise _mismatch(name, span, f"no more {name} placeholders in the prompts")
    return rows


def runs(numbers: Tensor) -> Iterator[tuple[int, int, int]]:
    """(number, start, stop) of each run of equal numbers `[n]` other than 0, such as a row's placeholders."""
    values, lengths = numbers.unique_consecutive(return_counts=True)
    stop = 0
    for number, length in zip(values.tolist(), lengths.tolist(), strict=True):
        start = stop
        stop += length
        if number != 0:
            yield number, start, stop


def _fits(
    span: VisualSpan,
    placeholders: int,
    placed: list[VisualSpan],
) -> bool:
    """Whether a span fits into so many placeholders, behind those of its row that are placed already."""
    if span.length > placeholders:
        return False
    if span.frame == 0:
        return True
    # A later frame follows a frame of its own video.
    return any((last.modality, last.index) == (span.modality, span.index) for last in placed[-1:])


def _mismatch(
    name: str,
    span: VisualSpan | None,
    placeholders: str,
) -> ValueError:
    expected = f"no more {name}s are given"
    if span is not None:
        expected = f"{name} {span.index} needs {span.length}"
    return ValueError(
        f"{name.capitalize()} features and {name} tokens do not match. There are {placeholders}, but {expected}. "
        f"Make input_ids and {name}_grid_thw with the same processor call."
    )


def find_separators(spans: Sequence[VisualSpan], length: int) -> Tensor:
    """
    The tokens of a row that go unless something is kept of what they end or announce, `[3, K]` as in [`PromptRow`].

    A newline goes with its line. A frame that is a span by itself goes with the text in front of it and the one token
    behind it. The first frame's text stays, since nothing tells where the question ends and that text begins.

    Args:
        spans: those among whose tokens the selector chooses.
        length: tokens of the row.
    """
    separators = []
    first = 0
    for index, span in enumerate(spans):
        end = first + span.tokens
        if span.line:
            lines = range(first, end, span.line)
            ends = range(span.start + span.line, span.stop, span.line + 1)
            separators += [(column, line, line + span.line) for column, line in zip(ends, lines, strict=True)]
        if span.frame:
            text_start = spans[index - 1].stop + 1
            text = list(range(text_start, span.start))
            if span.stop < length:
                text.append(span.stop)
            separators += [(column, first, end) for column in text]
        first = end
    return torch.tensor(separators, dtype=torch.long, device="cpu").reshape(-1, 3).T


# --- What a backbone hooks in ---


def token_grids(grid_thw: Tensor, merge_size: int) -> list[Grid]:
    """(time, height, width) in tokens of every image or video, from `[N, 3]` patches before the spatial merge."""
    return [(time, height // merge_size, width // merge_size) for time, height, width in grid_thw.tolist()]


class QTSplusBackboneMixin:
    """
    What a backbone may override: how its vision tower encodes, where its tokens are, what its language model takes.
    Everything has the value that fits Qwen2.5-VL.
    """

    rope_axes = 3  # of the language model: (time, height, width), or 1 where positions are numbers
    language_seconds = False  # whether the language model's positions measure the seconds of a video
    frames_apart = False  # whether there is text between the frames of a video
    fixed_arguments: tuple[str, ...] = ()  # of the stock `forward`: what the configuration alone decides here

    line_end: Tensor  # [d], the features of a newline, where there are newlines among the placeholders

    # What the Transformers class brings that this mixin is put in front of
    config: Any
    device: torch.device
    dtype: torch.dtype
    training: bool
    get_input_embeddings: Callable[[], nn.Embedding]

    def check_arguments(self, call: Mapping[str, object]) -> None:
        """Raises `ValueError` for stock arguments of a call that would have no effect."""
        for name in self.fixed_arguments:
            value = call.get(name)
            configured = getattr(self.config, name, None)
            if value is not None and value != configured:
                model = type(self).__name__
                raise ValueError(f"{name} has no effect on {model}: leave it out of the call.")

    # --- Pixels and features ---

    def merged_grid(self, grid_thw: Tensor) -> list[Grid]:
        """(time, height, width) in tokens of every image or video."""
        return token_grids(grid_thw, getattr(self.config.vision_config, "spatial_merge_size", 1))

    def pixel_rows(self, grid_thw: Tensor) -> list[int]:
        """Rows of the pixels of every image or video."""
        return grid_thw.prod(-1).tolist()

    @property
    def patches_per_row(self) -> int:
        """Patches that the vision tower makes of a row of the pixels."""
        return 1

    @property
    def token_width(self) -> int:
        """Width of the features of a token: the language model's, and what a backbone puts behind it."""
        return self.config.text_config.hidden_size

    def no_features(self, device: torch.device) -> Tensor:
        """`[0, token_width]`, of a row without anything to look at."""
        dtype = self.get_input_embeddings().weight.dtype
        return torch.empty(0, self.token_width, device=device, dtype=dtype)

    def encode_pixels(
        self,
        pixels: Tensor,
        grid_thw: Tensor,
    ) -> TensorSequence:
        """
        Per image or video its tokens, `[k, token_width]`, without newlines. The pixels are on the model's device, the
        grids on the host.
        """
        raise NotImplementedError

    # --- Placeholders ---

    def token_types(self, input_ids: Tensor) -> Tensor:
        """TEXT, IMAGE or VIDEO for every id."""
        is_image = input_ids == self.config.image_token_id
        is_video = input_ids == self.config.video_token_id
        return is_image * IMAGE + is_video * VIDEO

    def line_length(self, grid: Grid) -> int:
        """Tokens in front of each newline among the placeholders; 0 where there are none."""
        return 0

    def visual_spans(self, modality: int, grids: Sequence[Grid]) -> list[VisualSpan]:
        """The images or videos of a batch as spans whose place in the prompt is still to be found."""
        spans = []
        for index, grid in enumerate(grids):
            span = VisualSpan(modality, index, 0, grid, line=self.line_length(grid))
            if not self.frames_apart or modality == IMAGE:
                spans.append(span)
                continue
            frames, height, width = grid
            frame_grid = (1, height, width)
            spans += [replace(span, grid=frame_grid, frame=frame) for frame in range(frames)]
        return spans

    # --- Positions ---

    @property
    def needs_seconds(self) -> bool:
        """Whether the seconds of a video change the result: by the language model's positions or the re-encoder."""
        selector = self.config.qtsplus_config
        if selector.reencode_layers > 0 and selector.reencode_rope:
            return True
        keeps_positions = selector.position_ids == "original"
        return self.language_seconds and keeps_positions

    @property
    def tokens_per_second(self) -> float:
        """Positions in time per second of video."""
        return getattr(self.config.vision_config, "tokens_per_second", 2)

    def span_positions(
        self,
        span: VisualSpan,
        start: int,
        seconds: Tensor | float,
    ) -> tuple[Tensor, int]:
        """
        The positions of an image or video that begins at `start`, as Qwen2.5-VL has them in Transformers since 5.10.

        Args:
            seconds: from one step in time to the next.

        Returns:
            `[3, k]` (time, height, width) of its placeholders, and the position of the token behind them, `start +
            max(height, width)`.
        """
        interval = 1 if span.modality == IMAGE else self.tokens_per_second * seconds
        axes = torch.ones(span.grid, device="cpu").nonzero().T
        times = (span.frame + axes[0]).float() * interval  # in float32, whatever the default dtype is
        axes[0] = times.long()
        if span.line:  # a newline has the position of the token in front of it
            lines = axes.unflatten(1, (-1, span.line))
            axes = torch.cat([lines, lines[..., -1:]], dim=-1).flatten(1)
        return axes + start, start + max(span.grid[1:])

    def row_positions(
        self,
        spans: Sequence[VisualSpan],
        length: int,
        seconds: Seconds,
    ) -> Tensor:
        """`[3, length]` of a row: text counts up; an image or video takes `span_positions`."""
        parts = []
        column = 0
        position = 0
        origin = 0

        def count_text(stop: int) -> int:
            """Adds the positions of the text up to a column, and returns the position behind it."""
            behind = position + stop - column
            parts.append(torch.arange(position, behind, device="cpu").expand(3, -1))
            return behind

        for span in spans:
            position = count_text(span.start)
            if span.frame == 0:
                origin = position
            interval = seconds[span.index] if span.modality == VIDEO else 0
            vision, behind = self.span_positions(span, origin, interval)
            parts.append(vision)
            position = max(position, behind)
            column = span.stop
        count_text(length)
        return torch.cat(parts, dim=1)

    def language_positions(self, spans: list[VisualSpan], positions: Tensor) -> Tensor:
        """
        `[rope_axes, S_b]`: where the language model puts the tokens of a row; `positions` are those of its grids. Where
        it does not measure seconds, every temporal patch is one step, as an image is.
        """
        length = positions.shape[1]
        if self.rope_axes == 1:
            return torch.arange(length, device="cpu")[None]
        if self.language_seconds:
            return positions
        images = [replace(span, modality=IMAGE, frame=0) for span in spans]
        return self.row_positions(images, length, [])

    def language_axes(self, position_ids: Tensor) -> Tensor:
        """`[rope_axes, B, S]` of `position_ids`."""
        if position_ids.ndim == 2:
            return position_ids.expand(self.rope_axes, -1, -1)
        return position_ids[-self.rope_axes :]

    # --- The language model's inputs ---

    def language_inputs(
        self,
        inputs_embeds: Tensor,
        input_ids: Tensor,
        features: FeaturesOfRows,
    ) -> dict:
        """The language model's arguments for features in place of the placeholders' embeddings."""
        return {"inputs_embeds": self.splice(inputs_embeds, input_ids, features)}

    def splice(
        self,
        inputs_embeds: Tensor,
        input_ids: Tensor,
        features: FeaturesOfRows,
    ) -> Tensor:
        """Puts features in place of the placeholders' embeddings `[B, S, d]`."""
        types = self.token_types(input_ids)
        for modality, name in MODALITIES.items():
            if name not in features:
                continue
            is_placeholder = types == modality
            rows = features[name]
            if len(rows) == len(types):
                # A placeholder behind the prompt's own is a token that was generated, or guessed by a lookup there.
                lengths = [[len(row)] for row in rows]
                most = torch.tensor(lengths, device=types.device)
                is_placeholder &= is_placeholder.cumsum(1) <= most
            packed = torch.cat(list(rows)).to(inputs_embeds)
            inputs_embeds = inputs_embeds.masked_scatter(is_placeholder[..., None], packed)
        return inputs_embeds


# --- Laying out ---


def lay_out(
    model: QTSplusBackboneMixin,
    visual: VisualInputs,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
) -> Layout:
    """
    Finds the images and videos of a batch in its prompts.

    Args:
        input_ids, attention_mask: `[B, S]`; padding may be on either side.
        position_ids: the caller's own, `[B, S]`, or `[3, B, S]` or `[4, B, S]` where the language model takes these.

    Raises:
        ValueError: inputs that do not fit each other; each says what was given and what is expected.
    """
    check_tensors(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        pixel_values=visual.pixel_values,
        pixel_values_videos=visual.pixel_values_videos,
    )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    check_shape("attention_mask", mask, "input_ids", input_ids)
    source_ids = input_ids
    input_ids, mask = torch.stack([input_ids, (mask != 0).to(input_ids.device)]).cpu()
    if attention_mask is None:
        check_no_padding(input_ids, getattr(model.config.get_text_config(), "pad_token_id", None))
    if position_ids is not None:
        shape = position_ids.shape
        if shape[-2:] != input_ids.shape or shape[:-2] not in ((), (3,), (4,)):
            raise ValueError(f"position_ids {tuple(shape)}: expected input_ids' [B, S], or [3, B, S] or [4, B, S].")
        position_ids = position_ids.cpu()
        if restarts(position_ids, mask):
            raise ValueError(
                "Got several sequences packed into one row (position_ids that begin again within a row) together with "
                "images or videos: expected one in each row, padded."
            )
    images = check_grids(model, IMAGE, visual.pixel_values, visual.image_grid_thw)
    videos = check_grids(model, VIDEO, visual.pixel_values_videos, visual.video_grid_thw, visual.video_features)
    grids = {IMAGE: images, VIDEO: videos}
    seconds = _seconds(model, visual.second_per_grid_ts, videos)
    rows = _rows(model, input_ids, mask, grids, seconds, position_ids)
    return Layout(source_ids, input_ids, mask, rows, grids, seconds)


def lay_out_again(
    model: QTSplusBackboneMixin,
    layout: Layout,
    ids: TensorSequence,
) -> Layout:
    """The same images and videos in other prompts, per row `[S_b]` ids."""
    mask = pad_rows([torch.ones_like(row) for row in ids], 0, left=False)
    input_ids = pad_rows(ids, 0, left=False)
    rows = _rows(model, input_ids, mask, layout.grids, layout.seconds)
    source_ids = input_ids.to(layout.source_ids.device, non_blocking=True)
    again = replace(layout, source_ids=source_ids, input_ids=input_ids, mask=mask, rows=rows, present=None)
    return again if layout.present is None else again.narrow(layout.present)


def restarts(position_ids: Tensor, mask: Tensor) -> bool:
    """Whether positions `[B, S]`, `[3, B, S]` or `[4, B, S]` begin again at 0 behind a row's first real token."""
    # Along several axes an image or video goes back too, but only the first token of a sequence to 0 on all of them.
    highest = position_ids if position_ids.ndim == 2 else position_ids.amax(0)
    is_later = mask.cumsum(-1) * mask > 1
    return bool((is_later & (highest == 0)).any())


def are_packed(position_ids: Tensor | None) -> bool:
    """
    Whether these are the positions `[4, B, S]` of sequences packed into one row, by whose first axis the language model
    keeps them apart if it gets neither a mask nor a cache.
    """
    if position_ids is None or position_ids.ndim != 3 or len(position_ids) != 4:
        return False
    return restarts(position_ids, torch.ones_like(position_ids[0]))


def _rows(
    model: QTSplusBackboneMixin,
    input_ids: Tensor,
    mask: Tensor,
    grids: Grids,
    seconds: Seconds,
    position_ids: Tensor | None = None,
) -> list[PromptRow]:
    columns = [row.nonzero()[:, 0] for row in mask]
    ids = list(map(torch.take, input_ids, columns))
    types = list(map(model.token_types, ids))
    unplaced = {modality: model.visual_spans(modality, grids[modality]) for modality in MODALITIES}
    rows = []
    placed = find_spans(types, unplaced)
    for index, (real, ids_of_row, spans) in enumerate(zip(columns, ids, placed, strict=True)):
        positions = model.row_positions(spans, len(real), seconds)
        if position_ids is None:
            language_positions = model.language_positions(spans, positions)
        else:
            language_positions = model.language_axes(position_ids)[:, index, real]
        videos = [span for span in spans if span.modality == VIDEO]
        candidates = [span.token_columns() for span in videos]
        candidates.insert(0, real[:0])  # a row without videos has none
        rows.append(
            PromptRow(
                columns=real,
                ids=ids_of_row,
                spans=spans,
                positions=positions,
                language_positions=language_positions,
                candidates=torch.cat(candidates),
                separators=find_separators(videos, len(real)),
            )
        )
    return rows


def _seconds(
    model: QTSplusBackboneMixin,
    seconds: Seconds | None,
    grids: Sequence[Grid],
) -> Seconds:
    """Per video the seconds of a step in time, checked; 1 if `None`, where they change nothing."""
    if seconds is None:
        longest = max((steps for steps, _, _ in grids), default=0)
        if model.needs_seconds and longest > 1:
            raise ValueError(
                "The videos came without second_per_grid_ts, the seconds of a temporal patch of each, which their "
                "tokens' positions depend on: pass all that the processor returned, through your collator too."
            )
        return [1] * len(grids)
    try:
        if isinstance(seconds, Tensor):
            seconds = seconds.cpu()  # Apple's GPUs have no float64
        values = torch.as_tensor(seconds, dtype=torch.float64, device="cpu").flatten().tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"second_per_grid_ts={seconds!r}: expected the seconds of each video.") from error
    are_seconds = all(0 < value <= MOST_SECONDS for value in values)
    if len(values) != len(grids) or not are_seconds:
        raise ValueError(
            f"second_per_grid_ts={values}: expected finite seconds above 0, one per video ({len(grids)}), each at most "
            f"{MOST_SECONDS:g}."
        )
    return values


def check_grids(
    model: QTSplusBackboneMixin,
    modality: int,
    pixels: Tensor | None,
    grid_thw: Tensor | None,
    features: TensorSequence | None = None,
) -> list[Grid]:
    """The grids of all images or videos in tokens; `ValueError` where pixels, features and grids do not fit."""
    name = MODALITIES[modality]
    if pixels is not None and features is not None:
        raise ValueError(f"Got {name} pixels and {name}_features: pass one of them.")
    has_values = pixels is not None or features is not None
    if has_values != (grid_thw is not None):
        given = f"{name} pixels or features" if has_values else f"{name}_grid_thw"
        raise ValueError(f"Got {given} alone: expected pixels and grids, as the processor gives them.")
    if grid_thw is None:
        return []
    grid_thw = check_grid(f"{name}_grid_thw", grid_thw)
    patches = sum(model.pixel_rows(grid_thw))
    if pixels is not None and len(pixels) != patches:
        raise ValueError(f"{len(pixels)} rows of {name} pixels: expected {patches}, the patches of {name}_grid_thw.")
    return model.merged_grid(grid_thw)
