"""The hooks of a backbone, and what stands on both sides of the selection: prompts are laid out, and spliced again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .prompt_qtsplus import (
    IMAGE,
    MODALITIES,
    VIDEO,
    CompactPrompt,
    Grid,
    Layout,
    PromptRow,
    SelectionInputs,
    VisualInputs,
    VisualSpan,
    find_query_mask,
    find_separators,
    find_spans,
    full_mask,
    given_queries,
    join,
    pad_rows,
    restarts,
    text_positions,
)
from .selector_qtsplus import QTSplusOutput

Features = dict[int, list[torch.Tensor]]


class QTSplusBackboneMixin:
    """
    What a backbone may override: how its tower encodes, where its tokens stand, what its language model takes.
    Everything has the value that fits Qwen2.5-VL, except `merged_grid`, which a backbone supplies.
    """

    rope_axes = 3  # of the language model: (time, height, width), or 1 where positions are numbers
    frames_apart = False  # whether text stands between the frames of a video
    recurrent = False  # whether layers carry a state from token to token, so that no mask leaves out what they saw

    # What the class brings that this stands in front of
    config: Any
    device: Any
    training: bool
    get_input_embeddings: Any
    get_image_features: Any
    get_video_features: Any

    # --- Pixels and features ---

    def merged_grid(self, grid_thw: torch.Tensor, modality: int = VIDEO) -> list[tuple[int, int, int]]:
        """(time, height, width) in tokens of every image or video."""
        raise NotImplementedError

    def pixel_rows(self, grid_thw: torch.Tensor) -> list[int]:
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

    def no_features(self, device: torch.device) -> torch.Tensor:
        """`[0, token_width]`, of a row without anything to look at."""
        dtype = self.get_input_embeddings().weight.dtype
        return torch.empty(0, self.token_width, device=device, dtype=dtype)

    @property
    def candidate_modalities(self) -> tuple[int, ...]:
        """Whether the tokens of images compete for the budget, or only those of videos."""
        return (IMAGE, VIDEO) if self.config.qtsplus_config.select_images else (VIDEO,)

    @property
    def tile_side(self) -> int | None:
        """Tokens a side of the part of a frame that the tower can be given by itself; `None` if that is all of it."""
        return None

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

    def placeholder_counts(self, modality: int, grid_thw: torch.Tensor) -> list[int]:
        """Placeholders of every image or video, newlines too."""
        counts = [0] * len(grid_thw)
        for span in self.visual_spans(modality, self.merged_grid(grid_thw, modality)):
            counts[span.index] += span.length
        return counts

    # --- Positions ---

    @property
    def tokens_per_second(self) -> float:
        """Positions in time per second of video."""
        return 2

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
        self, spans: Sequence[VisualSpan], length: int, start: int, second_per_grid_ts: Sequence[Any], device
    ) -> torch.Tensor:
        """`[3, length]` of a row that begins at `start`: text counts up; an image or video takes `span_positions`."""
        parts, column, position = [], 0, int(start)
        origin = position
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

    def language_positions(self, spans: list[VisualSpan], start: int, positions: torch.Tensor) -> torch.Tensor:
        """`[rope_axes, S_b]`: where the language model puts the tokens of a row; `positions` are those of its grids."""
        if self.rope_axes == 3:
            return positions
        return torch.arange(start, start + positions.shape[1], device=positions.device)[None]

    def lay_positions(self, order: torch.Tensor, language: torch.Tensor) -> torch.Tensor:
        """`position_ids` of the language model, from the order of the tokens `[B, S]` and `[rope_axes, B, S]`."""
        return language[0] if self.rope_axes == 1 else torch.cat([order[None], language])

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
                raise ValueError(
                    f"{int(mask.sum())} {name} placeholders in the prompt for {sum(lengths)} {name} features."
                )
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
    starts: Sequence[int] | None = None,
) -> Layout:
    """
    Finds the images and videos of a batch in its prompts.

    Args:
        input_ids, attention_mask: `[B, S]`; padding may stand on either side.
        position_ids: the caller's own, `[B, S]`, or `[3, B, S]` or `[4, B, S]` where the language model takes these.
        starts: per row, the position of its first token (0 if `None`).

    Raises:
        ValueError: inputs that do not fit each other; each says what was given and what is expected.
    """
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
    seconds: Any = [1] * len(grids[VIDEO]) if visual.second_per_grid_ts is None else visual.second_per_grid_ts
    if len(seconds) != len(grids[VIDEO]):
        raise ValueError(f"{len(seconds)} second_per_grid_ts: expected one per video ({len(grids[VIDEO])}).")
    starts = [0] * len(input_ids) if starts is None else list(starts)
    rows = _rows(model, input_ids, mask, starts, grids, seconds, position_ids)
    return Layout(input_ids, mask, rows, starts, grids, seconds, model.candidate_modalities)


def lay_out_again(model: QTSplusBackboneMixin, layout: Layout, ids: Sequence[torch.Tensor]) -> Layout:
    """The same images and videos in other prompts, per row `[S_b]` ids."""
    mask = pad_rows([torch.ones_like(row) for row in ids], 0, left=False)
    input_ids = pad_rows(ids, 0, left=False)
    rows = _rows(model, input_ids, mask, layout.starts, layout.grids, layout.seconds)
    again = replace(layout, input_ids=input_ids, mask=mask, rows=rows, present=None)
    return again if layout.present is None else again.narrow(layout.present)


def _rows(model, input_ids, mask, starts, grids, seconds, position_ids=None) -> list[PromptRow]:
    columns = [row.nonzero()[:, 0] for row in mask]
    types = [row[real] for row, real in zip(model.token_types(input_ids), columns, strict=True)]
    spans = find_spans(types, {modality: model.visual_spans(modality, grids[modality]) for modality in MODALITIES})
    own_positions = None if position_ids is None else model.language_axes(position_ids)
    modalities, rows = model.candidate_modalities, []
    for b, real in enumerate(columns):
        positions = model.row_positions(spans[b], len(real), starts[b], seconds, input_ids.device)
        language = model.language_positions(spans[b], starts[b], positions)
        competing = [span for span in spans[b] if span.modality in modalities]
        rows.append(
            PromptRow(
                columns=real,
                types=types[b],
                spans=spans[b],
                positions=positions,
                language_positions=language if own_positions is None else own_positions[:, b, real],
                candidates=join([span.token_columns().to(real.device) for span in competing], real[:0]),
                separators=find_separators(competing, len(real)).to(real.device),
            )
        )
    return rows


def find_questions(
    model: QTSplusBackboneMixin, layout: Layout, query_mask: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """
    Per row `[S_b]` bool, which of its tokens are the question, by `query_mask` where there is one: `[B, S]`, or
    narrower where answers were put behind the prompts that it was made for.
    """
    config, shape = model.config, layout.input_ids.shape

    def find() -> torch.Tensor:
        return find_query_mask(
            layout.input_ids,
            layout.mask,
            config.user_turn_token_ids,
            config.turn_end_token_id,
            config.special_token_ids,
            config.video_token_id,
            getattr(config, "frame_text_token_ids", ()),
        )

    if query_mask is None:
        query_mask = find()
    elif query_mask.shape != shape:
        width = query_mask.shape[1]
        if len(query_mask) != shape[0] or width > shape[1] or bool(find()[:, width:].any()):
            raise ValueError(f"query_mask {tuple(query_mask.shape)}: expected input_ids' shape, {tuple(shape)}.")
        query_mask = nn.functional.pad(query_mask, (0, shape[1] - width))
    return [question[row.columns] for question, row in zip(query_mask.bool(), layout.rows, strict=True)]


def query_embeds(model: QTSplusBackboneMixin, layout: Layout, selection: SelectionInputs) -> list[torch.Tensor]:
    """Per row `[L_b, d]`, the embeddings of the question that is given apart, or else of the prompt's own."""
    questions, embed = find_questions(model, layout, selection.query_mask), model.get_input_embeddings()
    queries = given_queries(selection, len(layout.rows))
    if queries is None:
        rows = zip(layout.input_ids, layout.rows, questions, strict=True)
        queries = [ids[row.columns[question]] for ids, row, question in rows]
    return [embed(ids[None])[0] for ids in queries]  # NEFTune's hook and the like expect rows of ids


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
    if bool((grid_thw < 1).any()):
        raise ValueError(f"{name}_grid_thw {grid_thw.tolist()}: an empty {name}; expected at least 1 x 1 x 1 patches.")
    patches = sum(model.pixel_rows(grid_thw))
    if pixels is not None and len(pixels) != patches:
        raise ValueError(f"{len(pixels)} rows of {name} pixels: expected {patches}, the patches of {name}_grid_thw.")
    return model.merged_grid(grid_thw, modality)


# --- Splicing ---


def splice(
    model: QTSplusBackboneMixin,
    layout: Layout,
    features: Features,
    selected: Sequence[torch.Tensor],
    qtsplus: QTSplusOutput,
    pad_left: bool | None = None,
) -> CompactPrompt:
    """
    The shortened prompts: what was no candidate, and of the candidates the kept ones.

    Args:
        features: per modality, of every image or video of the batch; read where they do not compete.
        selected: per row `[n_b, token_width]`, the kept candidates.
        qtsplus: with the `kept_indices`; its `columns` are set.
        pad_left: pad on the left; `None` pads where the caller did, left if nowhere.
    """
    columns, positions = [], []
    row_features: dict[str, list[torch.Tensor]] = {name: [] for name in MODALITIES.values()}
    for row, tokens, kept_indices in zip(layout.rows, selected, qtsplus.kept_indices or (), strict=True):
        keep = row.keep(kept_indices.to(row.columns.device))
        columns.append(row.columns[keep])
        positions.append(row.language_positions[:, keep])
        for name, kept in _row_features(model, layout, row, keep, tokens, features).items():
            row_features[name].append(kept)

    pad_left = bool(layout.mask[:, -1].all()) if pad_left is None else pad_left
    padded = pad_rows(columns, -1, pad_left)
    is_padding, source = padded < 0, padded.clamp(min=0)
    attention_mask = (~is_padding).long()
    order = text_positions(attention_mask)
    if model.config.qtsplus_config.position_ids == "sequential":
        start = torch.tensor(layout.starts, device=order.device)
        language = (order + start[:, None]).masked_fill(is_padding, 0).expand(model.rope_axes, -1, -1)
        next_position = start + attention_mask.sum(-1)
    else:
        language = pad_rows(positions, 0, pad_left).transpose(0, 1)
        next_position = torch.stack([row.language_positions[:, -1].max() + 1 for row in layout.rows])
    qtsplus.columns = padded
    padding_id = model.config.text_config.pad_token_id or 0
    return CompactPrompt(
        input_ids=layout.input_ids.gather(1, source).masked_fill(is_padding, padding_id),
        attention_mask=attention_mask,
        position_ids=model.lay_positions(order, language),
        features=row_features,
        columns=padded,
        next_position=next_position,
        source_ids=layout.input_ids,
        source_mask=layout.mask,
        counts={
            modality: [len({span.index for span in row.spans if span.modality == modality}) for row in layout.rows]
            for modality in MODALITIES
        },
        qtsplus=qtsplus,
    )


def _row_features(model, layout: Layout, row: PromptRow, keep, tokens, features: Features) -> dict[str, torch.Tensor]:
    """What stands in place of a row's image and video placeholders, `[k, token_width]` each."""
    row_features, types = {}, None
    competing = {span.modality for span in row.spans}.intersection(layout.modalities)
    if len(competing) > 1 or any(span.line for span in row.spans):
        competes = torch.isin(row.types, torch.tensor(layout.modalities, device=keep.device))
        types = row.types[keep & competes].to(tokens.device)
        tokens = _with_line_ends(model, row, keep & competes, tokens)
    for modality, name in MODALITIES.items():
        if modality not in layout.modalities:
            untouched = [features[modality][span.index] for span in row.spans if span.modality == modality]
            row_features[name] = join(untouched, model.no_features(row.columns.device))
        elif types is None:
            row_features[name] = tokens if modality in competing else tokens[:0]
        else:
            row_features[name] = tokens[types == modality]
    return row_features


def _with_line_ends(model, row: PromptRow, keep: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The kept tokens `[k, d]` with the newlines that stay among them."""
    is_token = torch.zeros_like(keep)
    is_token[row.candidates] = True
    is_token = is_token[keep].to(tokens.device)
    if len(is_token) > len(tokens):
        spread = model.line_end.to(tokens.device, tokens.dtype).expand(len(is_token), -1).clone()
        spread[is_token] = tokens
        tokens = spread
    return tokens
