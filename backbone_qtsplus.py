"""What a backbone may override: how its tower encodes, where its tokens stand, what its language model takes.

Everything here has the value that fits Qwen2.5-VL, but for `merged_grid`. A backbone's own file says what differs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .prompt_qtsplus import IMAGE, MODALITIES, VIDEO, VisualSpan


class QTSplusBackboneMixin:
    """
    A backbone supplies `merged_grid`; beside it the usual `get_image_features`, `get_video_features`,
    `get_input_embeddings` and `language_model`, and `config.image_token_id` and `config.video_token_id`.

    Its class attributes: `rope_axes`, 3 where the language model's positions are (time, height, width) and 1 where they
    are numbers; `frames_apart`, whether text stands between the frames of a video; `recurrent`, whether layers carry a
    state from token to token, so that no mask can leave out what a cache has seen.
    """

    rope_axes = 3
    frames_apart = False
    recurrent = False

    # What the class brings that this stands in front of
    config: Any
    get_input_embeddings: Any
    get_image_features: Any
    get_video_features: Any

    # ----------------------------------------------------------------------------------------------------------------
    # Pixels and features
    # ----------------------------------------------------------------------------------------------------------------

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
        return self.get_input_embeddings().embedding_dim

    @property
    def tile_side(self) -> int | None:
        """
        Tokens a side of the part of a frame that the vision tower can be given by itself. `None` if it has to see whole
        frames, since it learns the absolute place of a patch.
        """
        return None

    def encode_pixels(self, modality: int, pixels: torch.Tensor, grid_thw: torch.Tensor) -> Sequence[torch.Tensor]:
        """Per image or video its tokens, `[k, token_width]`, without newlines."""
        encoder = self.get_image_features if modality == IMAGE else self.get_video_features
        return encoder(pixels, grid_thw, return_dict=True).pooler_output

    # ----------------------------------------------------------------------------------------------------------------
    # Placeholders
    # ----------------------------------------------------------------------------------------------------------------

    def token_types(self, input_ids: torch.Tensor) -> torch.Tensor:
        """TEXT, IMAGE or VIDEO for every id."""
        images, videos = input_ids == self.config.image_token_id, input_ids == self.config.video_token_id
        return images * IMAGE + videos * VIDEO

    def line_length(self, modality: int, grid: tuple[int, int, int]) -> int:
        """Tokens in front of each newline among the placeholders; 0 where there are none."""
        return 0

    @property
    def line_end(self) -> torch.Tensor:
        """`[d]`, what stands in the place of a newline."""
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

    # ----------------------------------------------------------------------------------------------------------------
    # Positions
    # ----------------------------------------------------------------------------------------------------------------

    @property
    def tokens_per_second(self) -> float:
        """Positions in time per second of video."""
        return 2

    def span_positions(self, span: VisualSpan, start: int, seconds_per_grid: Any) -> tuple[torch.Tensor, int]:
        """
        `[3, k]` (time, height, width) of the placeholders of an image or video that begins at `start`, and the position
        of the token behind them.

        Time advances by `tokens_per_second * seconds_per_grid` per temporal patch, height and width by 1 per token; the
        text behind goes on at `start + max(height, width)`, as Qwen2.5-VL does in Transformers since 5.10.
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

    # ----------------------------------------------------------------------------------------------------------------
    # The language model's inputs
    # ----------------------------------------------------------------------------------------------------------------

    def language_inputs(
        self, inputs_embeds: torch.Tensor, input_ids: torch.Tensor, features: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, Any]:
        """What the language model takes for features in the place of the placeholders' embeddings."""
        return {"inputs_embeds": self.splice(inputs_embeds, input_ids, features)}

    def splice(
        self, inputs_embeds: torch.Tensor, input_ids: torch.Tensor, features: Mapping[str, Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """Puts features (per modality and row `[k, d]`) in the place of the placeholders' embeddings `[B, S, d]`."""
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

    def ids_from_embeds(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        """`[B, S]` ids that tell placeholders from text (-1), when only embeddings were given."""
        input_ids = torch.full(inputs_embeds.shape[:2], -1, dtype=torch.long, device=inputs_embeds.device)
        for token_id in (self.config.image_token_id, self.config.video_token_id):
            embedding = self.get_input_embeddings()(torch.tensor(token_id, device=inputs_embeds.device))
            input_ids[(inputs_embeds == embedding).all(-1)] = token_id
        return input_ids


__all__ = ["QTSplusBackboneMixin"]
