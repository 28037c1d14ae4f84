"""What a backbone hooks in, and how a prompt is laid out by it ([`lay_out`])."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .prompt_qtsplus import IMAGE, MODALITIES, TEXT, VIDEO, Grid, Layout, PromptRow, VisualInputs, pad_rows

# --- Where images and videos stand ---


@dataclass
class VisualSpan:
    """
    The placeholders of one image or video, or of one frame of it: `length` of a row's real tokens from `start` on. With
    `line`, a separator (a newline) follows after every `line` tokens of the encoder.
    """

    modality: int
    index: int  # among the batch's images, or its videos
    start: int
    grid: tuple[int, int, int]  # tokens along (time, height, width)
    frame: int = 0  # how much of the video stands before this span
    line: int = 0

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def length(self) -> int:
        return self.tokens + (self.tokens // self.line if self.line else 0)

    def token_columns(self) -> torch.Tensor:
        """`[tokens]`, where the encoder's tokens stand in the row."""
        tokens = torch.arange(self.tokens)
        return self.start + tokens + (tokens // self.line if self.line else 0)

    def line_ends(self) -> torch.Tensor:
        """`[tokens / line]`, where the separators stand in the row."""
        return self.start + self.line + torch.arange(self.tokens // self.line if self.line else 0) * (self.line + 1)


def find_spans(token_types: list[torch.Tensor], unplaced: Mapping[int, Sequence[VisualSpan]]) -> list[list[VisualSpan]]:
    """
    Pairs the placeholders of every row with the images and videos of the batch, in order.

    Args:
        token_types: per row `[S_b]`, TEXT, IMAGE or VIDEO for each real token.
        unplaced: per modality the spans of all images or videos of the batch, whose `start` is still to be found.

    Raises:
        ValueError: the placeholders do not add up to the spans.
    """
    counts = {modality: len({span.index for span in spans}) for modality, spans in unplaced.items()}
    queues = {modality: iter(spans) for modality, spans in unplaced.items()}
    rows = []
    for row, types in enumerate(token_types):
        spans, stop = list[VisualSpan](), 0
        runs, lengths = types.unique_consecutive(return_counts=True)
        for modality, length in zip(runs.tolist(), lengths.tolist(), strict=True):
            start, stop = stop, stop + length
            while modality != TEXT and start < stop:
                span = next(queues[modality], VisualSpan(modality, -1, 0, (0, 0, 0)))
                begun = not span.frame or [(one.modality, one.index) for one in spans[-1:]] == [(modality, span.index)]
                end = start + span.length
                if span.index < 0 or end > stop or not begun:
                    raise ValueError(_mismatch(row, modality, stop - start, span, counts[modality]))
                spans.append(replace(span, start=start))
                start = end
        rows.append(spans)
    for modality, queue in queues.items():
        left = len({span.index for span in queue})
        if left:
            name = MODALITIES[modality]
            raise ValueError(
                f"{counts[modality]} {name}s were given, but the prompts have placeholders for only "
                f"{counts[modality] - left}: give one block of placeholders per {name}, as the processor does."
            )
    return rows


def find_separators(spans: Sequence[VisualSpan], length: int) -> torch.Tensor:
    """
    The tokens of a row that go unless something is kept of what they end or announce, `[3, K]` as in [`PromptRow`].

    A newline goes with its line. A frame that is a span by itself goes with the text in front of it and the one token
    behind it; the first one's text stays, since nothing tells where the question ends and that begins.

    Args:
        spans: those among whose tokens the selector chooses.
        length: tokens of the row.
    """
    separators = [torch.zeros(3, 0, dtype=torch.long)]
    first, before = 0, None
    for span in spans:
        if span.line:
            ends, lines = span.line_ends(), first + torch.arange(span.tokens // span.line) * span.line
            separators.append(torch.stack([ends, lines, lines + span.line]))
        if span.frame and before is not None:
            stop = span.start + span.length
            text = [*range(before.start + before.length + 1, span.start), *range(stop, min(stop + 1, length))]
            separators.append(torch.tensor([text, [first] * len(text), [first + span.tokens] * len(text)]))
        first, before = first + span.tokens, span
    return torch.cat(separators, dim=1)


def _mismatch(row: int, modality: int, placeholders: int, span: VisualSpan, count: int) -> str:
    name = MODALITIES[modality]
    if span.index < 0:
        expected = f"only {count} {name}(s) were given"
    else:
        t, h, w = span.grid
        newlines = f" and {span.length - span.tokens} newlines" if span.line else ""
        expected = f"{name} {span.index} has {t} x {h} x {w} = {span.tokens} tokens{newlines}"
    return (
        f"{name.capitalize()} features and {name} tokens do not match. Row {row}: {placeholders} {name} placeholder(s) "
        f"in a row, but {expected}. Make input_ids and {name}_grid_thw with the same processor call, and give every "
        "one of them its pixels."
    )


# --- What a backbone hooks in ---


class QTSplusBackboneMixin:
    """
    What a backbone may override: how its tower encodes, where its tokens stand, what its language model takes.
    Everything has the value that fits Qwen2.5-VL.
    """

    rope_axes = 3  # of the language model: (time, height, width), or 1 where positions are numbers
    language_seconds = False  # whether the language model's positions measure the seconds of a video
    frames_apart = False  # whether text stands between the frames of a video
    patches_per_row: Any = 1  # of the pixels, that the vision tower makes
    fixed_arguments: tuple[str, ...] = ()  # of the stock `forward`: what the configuration alone decides here

    # What the class brings that this stands in front of
    config: Any
    device: Any
    training: bool
    get_input_embeddings: Any
    get_image_features: Any
    get_video_features: Any

    def check_arguments(self, call: Mapping[str, Any]) -> None:
        """Raises `ValueError` for stock arguments of a call that would have no effect."""
        for name in self.fixed_arguments:
            value = call.get(name)
            if value is not None and value != getattr(self.config, name, None):
                raise ValueError(f"{name} has no effect on {type(self).__name__}: leave it out of the call.")

    # --- Pixels and features ---

    def merged_grid(self, grid_thw: torch.Tensor, modality: int = VIDEO) -> list[tuple[int, int, int]]:
        """(time, height, width) in tokens of every image or video."""
        merge = getattr(self.config.vision_config, "spatial_merge_size", 1)
        return [(t, h // merge, w // merge) for t, h, w in grid_thw.tolist()]

    def pixel_rows(self, grid_thw: torch.Tensor) -> list[int]:
        """Rows of the pixels of every image or video."""
        return grid_thw.prod(-1).tolist()

    @property
    def token_width(self) -> int:
        """Width of the features of a token: the language model's, and what a backbone puts behind it."""
        return self.config.text_config.hidden_size

    def no_features(self, device: torch.device) -> torch.Tensor:
        """`[0, token_width]`, of a row without anything to look at."""
        dtype = self.get_input_embeddings().weight.dtype
        return torch.empty(0, self.token_width, device=device, dtype=dtype)

    def encode_pixels(self, modality: int, pixels: torch.Tensor, grid_thw: torch.Tensor) -> Sequence[torch.Tensor]:
        """Per image or video its tokens, `[k, token_width]`, without newlines."""
        encoder = self.get_image_features if modality == IMAGE else self.get_video_features
        return encoder(pixels, grid_thw, return_dict=True).pooler_output

    # --- Placeholders ---

    def token_types(self, input_ids: torch.Tensor) -> torch.Tensor:
        """TEXT, IMAGE or VIDEO for every id."""
        images, videos = input_ids == self.config.image_token_id, input_ids == self.config.video_token_id
        return images * IMAGE + videos * VIDEO

    def line_length(self, modality: int, grid: tuple[int, int, int]) -> int:
        """Tokens in front of each newline among the placeholders; 0 where there are none."""
        return 0

    @property
    def line_end(self) -> torch.Tensor:
        """`[d]`, what stands in place of a newline."""
        raise NotImplementedError

    def visual_spans(self, modality: int, grids: Sequence[tuple[int, int, int]]) -> list[VisualSpan]:
        """The images or videos of a batch as spans whose place in the prompt is still to be found."""
        spans = []
        for index, (t, h, w) in enumerate(grids):
            line = self.line_length(modality, (t, h, w))
            if self.frames_apart and modality == VIDEO:
                spans += [VisualSpan(modality, index, 0, (1, h, w), frame, line) for frame in range(t)]
            else:
                spans.append(VisualSpan(modality, index, 0, (t, h, w), line=line))
        return spans

    # --- Positions ---

    @property
    def needs_seconds(self) -> bool:
        """Whether the seconds of a video change what comes out: by the language model's positions or the re-encoder."""
        selector = self.config.qtsplus_config
        reencodes = selector.reencode_layers > 0 and selector.reencode_rope
        return reencodes or (self.language_seconds and selector.position_ids == "original")

    @property
    def tokens_per_second(self) -> float:
        """Positions in time per second of video."""
        return getattr(self.config.vision_config, "tokens_per_second", 2)

    def span_positions(self, span: VisualSpan, start: int, seconds_per_grid: Any) -> tuple[torch.Tensor, int]:
        """
        `[3, k]` (time, height, width) of the placeholders of an image or video that begins at `start`, and the position
        of the token behind them, `start + max(height, width)`, as Qwen2.5-VL has it in Transformers since 5.10.
        """
        t, h, w = span.grid
        interval = 1 if span.modality == IMAGE else self.tokens_per_second * seconds_per_grid
        if isinstance(interval, torch.Tensor):
            interval = interval.cpu()
        time = ((span.frame + torch.arange(t)) * interval).long()
        axes = torch.stack(torch.meshgrid(time, torch.arange(h), torch.arange(w), indexing="ij")).reshape(3, -1)
        if span.line:  # a newline stands where the token in front of it does
            lines = axes.unflatten(1, (-1, span.line))
            axes = torch.cat([lines, lines[..., -1:]], dim=-1).flatten(1)
        return axes + start, start + max(h, w)

    def row_positions(
        self, spans: Sequence[VisualSpan], length: int, second_per_grid_ts: Sequence[Any], device
    ) -> torch.Tensor:
        """`[3, length]` of a row: text counts up; an image or video takes `span_positions`."""
        parts, column, position, origin = [], 0, 0, 0
        for span in [*spans, None]:
            stop = length if span is None else span.start
            text = torch.arange(position, position + stop - column, device=device)
            parts.append(text.expand(3, -1))
            position += stop - column
            if span is not None:
                seconds = second_per_grid_ts[span.index] if span.modality == VIDEO else None
                origin = origin if span.frame else position
                vision, behind = self.span_positions(span, origin, seconds)
                parts.append(vision.to(device))
                position, column = max(position, behind), span.start + span.length
        return torch.cat(parts, dim=1)

    def language_positions(self, spans: list[VisualSpan], positions: torch.Tensor) -> torch.Tensor:
        """`[rope_axes, S_b]`: where the language model puts the tokens of a row; `positions` are those of its grids."""
        if self.rope_axes == 3:
            return positions
        return torch.arange(positions.shape[1], device=positions.device)[None]

    def language_axes(self, position_ids: torch.Tensor) -> torch.Tensor:
        """`[rope_axes, B, S]` of `position_ids`."""
        if position_ids.ndim == 2:
            return position_ids.expand(self.rope_axes, -1, -1)
        return position_ids[-self.rope_axes :]

    # --- The language model's inputs ---

    def language_inputs(
        self, inputs_embeds: torch.Tensor, input_ids: torch.Tensor, features: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, Any]:
        """What the language model takes for features in place of the placeholders' embeddings."""
        return {"inputs_embeds": self.splice(inputs_embeds, input_ids, features)}

    def splice(
        self, inputs_embeds: torch.Tensor, input_ids: torch.Tensor, features: Mapping[str, Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """Puts features (per modality and row `[k, d]`) in place of the placeholders' embeddings `[B, S, d]`."""
        types = self.token_types(input_ids)
        for modality, name in MODALITIES.items():
            if name not in features:
                continue
            lengths = [len(row) for row in features[name]]
            mask = types == modality
            if len(lengths) == len(mask):
                # A placeholder behind the prompt's own is a token that was generated, or guessed by a lookup there.
                mask &= mask.cumsum(1) <= torch.tensor(lengths, device=mask.device)[:, None]
            if int(mask.sum()) != sum(lengths):
                raise ValueError(f"{int(mask.sum())} {name} placeholders in the prompt for {sum(lengths)} features.")
            packed = torch.cat(list(features[name])).to(inputs_embeds.device, inputs_embeds.dtype)
            inputs_embeds = inputs_embeds.masked_scatter(mask[..., None], packed)
        return inputs_embeds


# --- Laying out ---


def lay_out(
    model: QTSplusBackboneMixin,
    visual: VisualInputs,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> Layout:
    """
    Finds the images and videos of a batch in its prompts.

    Args:
        input_ids, attention_mask: `[B, S]`; padding may stand on either side.
        position_ids: the caller's own, `[B, S]`, or `[3, B, S]` or `[4, B, S]` where the language model takes these.

    Raises:
        ValueError: inputs that do not fit each other; each says what was given and what is expected.
    """
    if attention_mask is None:
        check_no_padding(input_ids, getattr(model.config.get_text_config(), "pad_token_id", None))
    mask = full_mask(input_ids, attention_mask)
    if position_ids is not None and restarts(position_ids, mask):
        raise ValueError(
            "Got several sequences packed into one row (position_ids that begin again within a row) together with "
            "images or videos: expected one in each row, padded."
        )
    grids = {
        IMAGE: check_grids(model, IMAGE, visual.pixel_values, visual.image_grid_thw),
        VIDEO: check_grids(model, VIDEO, visual.pixel_values_videos, visual.video_grid_thw, visual.video_features),
    }
    seconds: Any = visual.second_per_grid_ts
    if seconds is None:
        if model.needs_seconds and any(steps > 1 for steps, _, _ in grids[VIDEO]):
            raise ValueError(
                "The videos came without second_per_grid_ts, the seconds of a temporal patch of each, which their "
                "tokens' positions depend on: pass all that the processor returned, through your collator too."
            )
        seconds = [1] * len(grids[VIDEO])  # which changes nothing
    check_seconds(seconds, len(grids[VIDEO]))
    rows = _rows(model, input_ids, mask, grids, seconds, position_ids)
    return Layout(input_ids, mask, rows, grids, seconds)


def lay_out_again(model: QTSplusBackboneMixin, layout: Layout, ids: Sequence[torch.Tensor]) -> Layout:
    """The same images and videos in other prompts, per row `[S_b]` ids."""
    mask = pad_rows([torch.ones_like(row) for row in ids], 0, left=False)
    input_ids = pad_rows(ids, 0, left=False)
    rows = _rows(model, input_ids, mask, layout.grids, layout.seconds)
    again = replace(layout, input_ids=input_ids, mask=mask, rows=rows, present=None)
    return again if layout.present is None else again.narrow(layout.present)


def full_mask(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """`[B, S]`, 1 on real tokens: the caller's `attention_mask`, checked; all real if `None`."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(mask.shape)}: expected input_ids' shape, {tuple(input_ids.shape)}.")
    return mask


def check_no_padding(input_ids: torch.Tensor, pad_token_id: int | None) -> None:
    """Raises `ValueError` where rows `[B, S]` begin or end with different numbers of padding tokens."""
    if pad_token_id is None or len(input_ids) < 2:
        return
    is_padding = (input_ids == pad_token_id).long()
    for columns in (is_padding, is_padding.flip(1)):
        counts = columns.cumprod(1).sum(1)
        if bool((counts != counts[0]).any()):
            raise ValueError(
                "The prompts are padded, but came without attention_mask: pass all that the processor returned, "
                "through your collator too."
            )


def restarts(position_ids: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether positions `[B, S]`, `[3, B, S]` or `[4, B, S]` begin again at 0 behind a row's first real token."""
    # Along several axes an image or video goes back too, but only the first token of a sequence to 0 on all of them.
    highest = position_ids if position_ids.ndim == 2 else position_ids.amax(0)
    return bool(((highest == 0) & mask.bool() & (mask.cumsum(-1) > 1)).any())


def _rows(model, input_ids, mask, grids, seconds, position_ids=None) -> list[PromptRow]:
    columns = [row.nonzero()[:, 0] for row in mask]
    types = [row[real] for row, real in zip(model.token_types(input_ids), columns, strict=True)]
    spans = find_spans(types, {modality: model.visual_spans(modality, grids[modality]) for modality in MODALITIES})
    own_positions = None if position_ids is None else model.language_axes(position_ids)
    rows = []
    for b, real in enumerate(columns):
        positions = model.row_positions(spans[b], len(real), seconds, input_ids.device)
        language = model.language_positions(spans[b], positions)
        competing = [span for span in spans[b] if span.modality == VIDEO]
        rows.append(
            PromptRow(
                columns=real,
                types=types[b],
                spans=spans[b],
                positions=positions,
                language_positions=language if own_positions is None else own_positions[:, b, real],
                candidates=torch.cat([real[:0], *(span.token_columns().to(real.device) for span in competing)]),
                separators=find_separators(competing, len(real)).to(real.device),
            )
        )
    return rows


def check_seconds(seconds: Any, videos: int) -> None:
    """Raises `ValueError` for what is not a number of seconds above 0 for each video."""
    if not isinstance(seconds, (Sequence, torch.Tensor)) or isinstance(seconds, str):
        raise ValueError(f"second_per_grid_ts={seconds!r}: expected a list with the seconds of each video.")
    if len(seconds) != videos:
        raise ValueError(f"{len(seconds)} second_per_grid_ts: expected one per video ({videos}).")
    values = torch.as_tensor(seconds, dtype=torch.float64)
    if not bool(((values > 0) & values.isfinite()).all()):
        raise ValueError(f"second_per_grid_ts={values.tolist()}: expected finite seconds above 0.")


def check_grids(
    model: QTSplusBackboneMixin,
    modality: int,
    pixels: torch.Tensor | None,
    grid_thw: torch.Tensor | None,
    features: Sequence[torch.Tensor] | None = None,
) -> list[Grid]:
    """The grids of all images or videos in tokens; `ValueError` where pixels, features and grids do not fit."""
    name = MODALITIES[modality]
    if pixels is not None and features is not None:
        raise ValueError(f"Got {name} pixels and {name}_features: pass one of them.")
    if (pixels is None and features is None) != (grid_thw is None):
        values = "pixel values" if features is None else "features"
        present, missing = (values, "grid_thw") if grid_thw is None else ("grid_thw", values)
        raise ValueError(f"The {name}s came with {present} but without {missing}: pass all the processor returned.")
    if grid_thw is None:
        return []
    if not isinstance(grid_thw, torch.Tensor) or grid_thw.is_floating_point():
        raise ValueError(f"{name}_grid_thw={grid_thw!r}: expected a tensor of whole numbers, [{name}s, 3].")
    if bool((grid_thw < 1).any()):
        raise ValueError(f"{name}_grid_thw {grid_thw.tolist()}: an empty {name}; expected at least 1 x 1 x 1 patches.")
    patches = sum(model.pixel_rows(grid_thw))
    if pixels is not None and len(pixels) != patches:
        raise ValueError(f"{len(pixels)} rows of {name} pixels: expected {patches}, the patches of {name}_grid_thw.")
    return model.merged_grid(grid_thw, modality)
