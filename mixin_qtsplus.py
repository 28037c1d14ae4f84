"""What every video language model with the selector shares, whatever its backbone.

The file reads in the order data flows: [`QTSplusModelMixin`] lays out the prompt, encodes, selects and splices;
[`QTSplusHeadMixin`] puts logits and a loss behind it. A backbone's own file says only what differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .generation_qtsplus import QTSplusGenerationMixin
from .prompt_qtsplus import (
    IMAGE,
    KINDS,
    PATCHES_PER_CHUNK,
    PATCHES_PER_CHUNK_ON_CPU,
    VIDEO,
    CompactPrompt,
    PromptRow,
    SelectedFeatures,
    VisualSpan,
    chunk_grids,
    find_separators,
    find_spans,
    pad_rows,
    text_positions,
)
from .saving_qtsplus import QTSplusSavingMixin
from .selector_qtsplus import QTSplusOutput, QTSplusSelector, find_query_mask, take_rows


@dataclass
class QTSplusModelOutputWithPast(BaseModelOutputWithPast):
    """A backbone's output with the selector's decisions as `qtsplus` ([`QTSplusOutput`]; `None` without vision)."""

    qtsplus: QTSplusOutput | None = None


@dataclass
class QTSplusCausalLMOutputWithPast(CausalLMOutputWithPast):
    """
    As the stock output, over the shortened prompt, with the selector's decisions as `qtsplus`. `loss` in training is
    the language-modelling loss plus `qtsplus.loss_t + qtsplus.loss_m + qtsplus.loss_s`; in evaluation the former alone.
    """

    qtsplus: QTSplusOutput | None = None


class QTSplusModelMixin:
    """
    Shortens a prompt: encodes its images and videos, selects among the visual tokens of each row by the row's question,
    and lays out the ids, mask and positions of what is left.

    A backbone supplies `merged_grid`, and what else differs among the methods in front of `encode_videos`; beside them
    the usual `get_image_features`, `get_video_features` and `language_model`, `config.image_token_id` and
    `config.video_token_id`.
    """

    rope_axes = 3  # of the language model: (time, height, width), or 1
    frames_apart = False  # whether text stands between the frames of a video
    rope_deltas: torch.Tensor | None = None

    def merged_grid(self, grid_thw: torch.Tensor, kind: int = VIDEO) -> list[tuple[int, int, int]]:
        """(time, height, width) in tokens of every image or video."""
        raise NotImplementedError

    def pixel_rows(self, grid_thw: torch.Tensor) -> list[int]:
        """Rows of the pixels of every image or video."""
        return grid_thw.prod(-1).tolist()

    @property
    def patches_per_row(self) -> int:
        """Patches that the vision tower makes of a row of the pixels."""
        return 1

    def line_length(self, kind: int, grid: tuple[int, int, int]) -> int:
        """Tokens in front of each newline among the placeholders; 0 where there are none."""
        return 0

    def placeholder_counts(self, kind: int, grid_thw: torch.Tensor) -> list[int]:
        """Placeholders of every image or video, newlines too."""
        grids = self.merged_grid(grid_thw, kind)
        return [VisualSpan(kind, 0, 0, grid, line=self.line_length(kind, grid)).length for grid in grids]

    @property
    def line_end(self) -> torch.Tensor:
        """`[d]`, what stands in the place of a newline."""
        raise NotImplementedError

    @property
    def token_width(self) -> int:
        """Width of the features of a token: the language model's, and what a backbone puts behind it."""
        return self.get_input_embeddings().embedding_dim

    @property
    def tokens_per_second(self) -> float:
        """Positions in time per second of video."""
        return 2

    def encode_pixels(self, kind: int, pixels: torch.Tensor, grid_thw: torch.Tensor) -> Sequence[torch.Tensor]:
        """Per image or video its tokens, `[k, token_width]`, without newlines."""
        encoder = self.get_image_features if kind == IMAGE else self.get_video_features
        return encoder(pixels, grid_thw, return_dict=True).pooler_output

    def span_positions(self, span: VisualSpan, start: int, seconds_per_grid: Any) -> tuple[torch.Tensor, int]:
        """
        `[3, k]` (time, height, width) of the placeholders of an image or video that begins at `start`, and the position
        of the token behind them.

        Time advances by `tokens_per_second * seconds_per_grid` per temporal patch, height and width by 1 per token; the
        text behind goes on at `start + max(height, width)`, as Qwen2.5-VL does in Transformers since 5.10.
        """
        t, h, w = span.grid
        interval = 1 if span.kind == IMAGE else self.tokens_per_second * seconds_per_grid
        if isinstance(interval, torch.Tensor):
            interval = interval.cpu()
        time = ((span.frame + torch.arange(t)) * interval).long()
        axes = torch.stack(torch.meshgrid(time, torch.arange(h), torch.arange(w), indexing="ij")).reshape(3, -1)
        if span.line:  # a newline stands where the token in front of it does
            lines = axes.unflatten(1, (-1, span.line))
            axes = torch.cat([lines, lines[..., -1:]], dim=-1).flatten(1)
        return axes + start, start + max(h, w)

    def language_positions(self, spans: list[VisualSpan], start: int, positions: torch.Tensor) -> torch.Tensor:
        """`[rope_axes, S_b]`: where the language model puts the tokens of a row; `positions` are those of its grids."""
        if self.rope_axes == 3:
            return positions
        return torch.arange(start, start + positions.shape[1], device=positions.device)[None]

    def language_inputs(
        self, inputs_embeds: torch.Tensor, input_ids: torch.Tensor, features: dict[str, list[torch.Tensor]]
    ) -> dict[str, Any]:
        """What the language model takes for features in the place of the placeholders' embeddings."""
        return {"inputs_embeds": self.splice(inputs_embeds, input_ids, features)}

    def build_selector(self, config) -> QTSplusSelector:
        """A selector of the language model's shape."""
        text = config.text_config
        half = text.hidden_size // text.num_attention_heads // 2
        section = text.rope_parameters.get("mrope_section")
        if section is None or sum(section) != half:
            time, height = half // 4, (half - half // 4) // 2  # as Qwen2.5-VL shares them out
            section = (time, height, half - time - height)
        return QTSplusSelector(
            config.qtsplus_config,
            hidden_size=text.hidden_size,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            rms_norm_eps=text.rms_norm_eps,
            rope_theta=text.rope_parameters["rope_theta"],
            mrope_section=section,
        )

    @torch.no_grad()
    def encode_videos(
        self,
        pixel_values_videos: torch.Tensor,
        video_grid_thw: torch.Tensor,
        *,
        frames_per_chunk: int | None = None,
        device: torch.device | str | None = None,
    ) -> list[torch.Tensor]:
        """
        Encodes videos once, for any number of questions: `forward` and `generate` take what this returns as
        `video_features=`, in the place of `pixel_values_videos`. Without gradients; to train the encoder, pass pixels.

        The vision tower looks at each temporal patch by itself, so chunks change nothing but the memory in use.

        Args:
            pixel_values_videos, video_grid_thw: as the processor returns them; they may stay on the CPU, from where
                one chunk at a time is moved.
            frames_per_chunk: encode at most this many frames at a time, but at least one temporal patch; about
                16,384 patches at a time if `None`, and 2,048 on a CPU.
            device: where the features shall live, such as `"cpu"`; the model's if `None`.

        Returns:
            per video `[k, token_width]`, all its visual tokens.

        Raises:
            ValueError: pixels and grids that do not fit each other, or that are not finite; no frame per chunk.
        """
        self._grids(VIDEO, pixel_values_videos, video_grid_thw)
        if pixel_values_videos is None:
            raise ValueError("encode_videos got no videos: pass pixel_values_videos and video_grid_thw.")
        if self.device.type != "meta":  # as where weights wait on disk; what brings them in brings the pixels too
            video_grid_thw = video_grid_thw.to(self.device)
        return self._encode(VIDEO, pixel_values_videos, video_grid_thw, frames_per_chunk, device)

    def compress(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: torch.Tensor | Sequence[float] | None = None,
        video_features: Sequence[torch.Tensor] | None = None,
        query_mask: torch.Tensor | None = None,
        query_input_ids: torch.Tensor | None = None,
        query_attention_mask: torch.Tensor | None = None,
        retention: float | Sequence[float] | None = None,
        max_visual_tokens: int | None = None,
        sample_gate: bool | None = None,
        pad_left: bool | None = None,
        start_positions: Sequence[int] | None = None,
    ) -> CompactPrompt:
        """
        Args:
            input_ids, attention_mask: `[B, S]`; padding may stand on either side.
            position_ids: the caller's own positions for the full prompt, `[B, S]`; `[3, B, S]` or `[4, B, S]` too where
                the language model takes them.
            pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, second_per_grid_ts: as the processor
                returns them.
            video_features: per video `[k, d]`, as [`encode_videos`] returns them, in the place of its pixels. On
                another device than the prompt, one row's are moved at a time.
            query_mask: `[B, S]`, 1 on the question's tokens; found in `input_ids` if `None`.
            query_input_ids, query_attention_mask: `[B, L]`, a question that does not stand in the prompt.
            retention, max_visual_tokens, sample_gate: as for [`QTSplusSelector`].
            pad_left: pad the result on the left; `None` pads where the caller did, left if nowhere.
            start_positions: per row, the position of its first token (0 if `None`).

        Raises:
            ValueError: inputs that do not fit each other; each says what was given and what is expected.
        """
        if input_ids is None:
            input_ids = self._ids_from_embeds(inputs_embeds)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask {tuple(mask.shape)}: expected input_ids' shape, {tuple(input_ids.shape)}."
            )
        if pad_left is None:
            pad_left = bool(mask[:, -1].all())
        starts = [0] * len(input_ids) if start_positions is None else list(start_positions)

        grids = {
            IMAGE: self._grids(IMAGE, pixel_values, image_grid_thw),
            VIDEO: self._grids(VIDEO, pixel_values_videos, video_grid_thw, video_features),
        }
        rows = self._layout(input_ids, mask, position_ids, grids, second_per_grid_ts, starts)
        features = {
            IMAGE: self._encode(IMAGE, pixel_values, image_grid_thw),
            VIDEO: self._encode(VIDEO, pixel_values_videos, video_grid_thw)
            if video_features is None
            else self._given_features(VIDEO, video_features, grids[VIDEO]),
        }
        queries = self._queries(input_ids, inputs_embeds, mask, query_mask, query_input_ids, query_attention_mask)
        nothing = self._no_features(input_ids.device)
        sources = [
            [features[span.kind][span.index].to(nothing.device) for span in _whole(row.spans, self._candidate_kinds)]
            or [nothing]
            for row in rows
        ]
        width = self.get_input_embeddings().embedding_dim
        selected, qtsplus = self.qtsplus(
            [[part[:, :width] for part in parts] for parts in sources],
            queries,
            [row.positions[:, row.candidates] for row in rows],
            retention=retention,
            max_visual_tokens=max_visual_tokens,
            sample_gate=sample_gate,
        )
        if self.token_width > width:
            triples = zip(selected, sources, qtsplus.kept_indices, strict=True)
            selected = [
                torch.cat([tokens, take_rows([part[:, width:] for part in parts], kept)], dim=1)
                for tokens, parts, kept in triples
            ]
        return self._splice_rows(input_ids, inputs_embeds, rows, features, selected, qtsplus, pad_left, starts)

    @property
    def _candidate_kinds(self) -> tuple[int, ...]:
        return (IMAGE, VIDEO) if self.config.qtsplus_config.select_images else (VIDEO,)

    def _layout(self, input_ids, mask, position_ids, grids, second_per_grid_ts, starts) -> list[PromptRow]:
        """The rows of the full prompt: which tokens are whose, and where they stand."""
        seconds = [1] * len(grids[VIDEO]) if second_per_grid_ts is None else second_per_grid_ts
        if len(seconds) != len(grids[VIDEO]):
            raise ValueError(f"{len(seconds)} second_per_grid_ts: expected one per video ({len(grids[VIDEO])}).")
        columns = [row.nonzero()[:, 0] for row in mask]
        types = [row[real] for row, real in zip(self.token_types(input_ids), columns, strict=True)]
        spans = find_spans(types, grids, self.frames_apart, self.line_length)
        given = None if position_ids is None else self.language_axes(position_ids)
        rows = []
        for b, real in enumerate(columns):
            positions = self._row_positions(len(real), spans[b], starts[b], seconds, input_ids.device)
            language = self.language_positions(spans[b], starts[b], positions)
            chosen_spans = [span for span in spans[b] if span.kind in self._candidate_kinds]
            rows.append(
                PromptRow(
                    columns=real,
                    types=types[b],
                    spans=spans[b],
                    positions=positions,
                    language_positions=language if given is None else given[:, b, real],
                    candidates=_join([span.token_columns().to(real.device) for span in chosen_spans], real[:0]),
                    separators=find_separators(chosen_spans, len(real)).to(real.device),
                )
            )
        return rows

    def _splice_rows(self, input_ids, inputs_embeds, rows, features, selected, qtsplus, pad_left, starts):
        """The shortened prompt: what was no candidate, and of the candidates the kept ones."""
        nothing = self._no_features(input_ids.device)
        columns, positions = [], []
        row_features: dict[str, list[torch.Tensor]] = {name: [] for name in KINDS.values()}
        for row, tokens, kept_indices in zip(rows, selected, qtsplus.kept_indices, strict=True):
            keep = row.keep(kept_indices.to(row.columns.device))
            columns.append(row.columns[keep])
            positions.append(row.language_positions[:, keep])
            tokens, kinds = self._with_line_ends(row, keep, tokens)
            for kind, name in KINDS.items():
                if kind in self._candidate_kinds:
                    one_kind = len(self._candidate_kinds) == 1
                    row_features[name].append(tokens if one_kind else tokens[kinds == kind])
                else:
                    untouched = [features[kind][span.index] for span in row.spans if span.kind == kind]
                    row_features[name].append(_join(untouched, nothing))

        padded = pad_rows(columns, -1, pad_left)
        is_padding, source = padded < 0, padded.clamp(min=0)
        attention_mask = (~is_padding).long()
        if inputs_embeds is not None:
            inputs_embeds = inputs_embeds.gather(1, source[..., None].expand(-1, -1, inputs_embeds.shape[-1]))
        order = text_positions(attention_mask)
        if self.config.qtsplus_config.position_ids == "sequential":
            start = torch.tensor(starts, device=order.device)
            language = (order + start[:, None]).masked_fill(is_padding, 0).expand(self.rope_axes, -1, -1)
            next_position = start + attention_mask.sum(-1)
        else:
            language = pad_rows(positions, 0, pad_left).transpose(0, 1)
            next_position = torch.stack([row.language_positions[:, -1].max() + 1 for row in rows])
        qtsplus.columns = padded
        return CompactPrompt(
            input_ids=input_ids.gather(1, source).masked_fill(is_padding, self.config.text_config.pad_token_id or 0),
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=self.lay_positions(order, language),
            features=row_features,
            columns=padded,
            next_position=next_position,
            spans=[row.spans for row in rows],
            qtsplus=qtsplus,
        )

    def _with_line_ends(self, row: PromptRow, keep: torch.Tensor, tokens: torch.Tensor):
        """The kept tokens `[k, d]` with the newlines that stay among them, and the kind of each."""
        is_token = torch.zeros_like(keep)
        is_token[row.candidates] = True
        candidate_kind = torch.isin(row.types, torch.tensor(self._candidate_kinds, device=keep.device))
        kinds, is_token = row.types[keep & candidate_kind], is_token[keep & candidate_kind].to(tokens.device)
        if len(is_token) > len(tokens):
            spread = self.line_end.to(tokens.device, tokens.dtype).expand(len(is_token), -1).clone()
            spread[is_token] = tokens
            tokens = spread
        return tokens, kinds.to(tokens.device)

    def lay_positions(self, order: torch.Tensor, language: torch.Tensor) -> torch.Tensor:
        """`position_ids` of the language model, from the order of the tokens `[B, S]` and `[rope_axes, B, S]`."""
        return language[0] if self.rope_axes == 1 else torch.cat([order[None], language])

    def language_axes(self, position_ids: torch.Tensor) -> torch.Tensor:
        """`[rope_axes, B, S]` of `position_ids`."""
        if position_ids.ndim == 2:
            return position_ids.expand(self.rope_axes, -1, -1)
        return position_ids[-self.rope_axes :]

    def token_types(self, input_ids: torch.Tensor) -> torch.Tensor:
        """TEXT, IMAGE or VIDEO for every id."""
        images, videos = input_ids == self.config.image_token_id, input_ids == self.config.video_token_id
        return images * IMAGE + videos * VIDEO

    def splice(self, inputs_embeds: torch.Tensor, input_ids: torch.Tensor, features: dict[str, list[torch.Tensor]]):
        """Puts features (per kind and row `[k, d]`) in the place of the placeholders' embeddings `[B, S, d]`."""
        types = self.token_types(input_ids)
        for kind, name in KINDS.items():
            if name not in features:
                continue
            lengths = [len(row) for row in features[name]]
            mask = types == kind
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

    def _ids_from_embeds(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        """Ids that tell placeholders from text, when only embeddings were given."""
        input_ids = torch.full(inputs_embeds.shape[:2], -1, dtype=torch.long, device=inputs_embeds.device)
        for token_id in (self.config.image_token_id, self.config.video_token_id):
            embedding = self.get_input_embeddings()(torch.tensor(token_id, device=inputs_embeds.device))
            input_ids[(inputs_embeds == embedding).all(-1)] = token_id
        return input_ids

    def _grids(
        self,
        kind: int,
        pixels: torch.Tensor | None,
        grid_thw: torch.Tensor | None,
        features: Sequence[torch.Tensor] | None = None,
    ) -> list[tuple[int, int, int]]:
        name = KINDS[kind]
        if pixels is not None and features is not None:
            raise ValueError(f"Got {name} pixels and {name}_features: pass one of them.")
        if (pixels is None and features is None) != (grid_thw is None):
            values = "pixel values" if features is None else "features"
            given, missing = (values, "grid_thw") if grid_thw is None else ("grid_thw", values)
            raise ValueError(
                f"The {name}s came with {given} but without {missing}: pass all that the processor returned."
            )
        if grid_thw is None:
            return []
        if bool((grid_thw < 1).any()):
            raise ValueError(
                f"{name}_grid_thw {grid_thw.tolist()}: an empty {name}; expected at least 1 x 1 x 1 patches."
            )
        patches = sum(self.pixel_rows(grid_thw))
        if pixels is not None and len(pixels) != patches:
            raise ValueError(
                f"{len(pixels)} rows of {name} pixels: expected {patches}, the patches of {name}_grid_thw."
            )
        return self.merged_grid(grid_thw, kind)

    def _encode(
        self,
        kind: int,
        pixels: torch.Tensor | None,
        grid_thw: torch.Tensor | None,
        frames_per_chunk: int | None = None,
        device: torch.device | str | None = None,
    ) -> list[torch.Tensor]:
        """`[k, token_width]` features of each image or video."""
        if pixels is None:
            return []
        lengths = [t * h * w for t, h, w in self.merged_grid(grid_thw, kind)]
        features: dict[int, torch.Tensor] = {}
        filled, start = [0] * len(lengths), 0
        for chunk in self._chunks(kind, grid_thw, frames_per_chunk):
            grid = grid_thw.new_tensor([piece for _, piece in chunk])
            patches = self.pixel_rows(grid)
            rows = pixels[start : start + sum(patches)].to(grid.device)
            encoded = self.encode_pixels(kind, rows, grid)
            for (index, _), one, own in zip(chunk, encoded, rows.split(patches), strict=True):
                if not _is_finite(one):
                    fine = _is_finite(own)
                    blame = "its features (the weights or the dtype overflow)" if fine else "its pixel values"
                    raise ValueError(f"NaN or infinity in {blame} of {KINDS[kind]} {index}: expected finite numbers.")
                if len(one) == lengths[index]:
                    features[index] = one.to(device or one.device)
                    continue
                if index not in features:
                    # Filled piece by piece: joining the pieces afterwards would hold them twice.
                    features[index] = one.new_empty(lengths[index], one.shape[-1], device=device or one.device)
                features[index][filled[index] : filled[index] + len(one)] = one
                filled[index] += len(one)
            start += len(rows)
        return list(features.values())

    def _chunks(self, kind: int, grid_thw: torch.Tensor, frames_per_chunk: int | None):
        """What is encoded at a time; see [`chunk_grids`]."""
        grids = grid_thw.tolist()
        if frames_per_chunk is not None:
            if isinstance(frames_per_chunk, bool) or frames_per_chunk != int(frames_per_chunk) or frames_per_chunk < 1:
                raise ValueError(f"frames_per_chunk={frames_per_chunk!r}: expected a whole number, at least 1.")
            frames = getattr(self.config.vision_config, "temporal_patch_size", 1)
            return chunk_grids(grids, frames_per_chunk, [frames] * len(grids))
        if self.training and torch.is_grad_enabled():
            # Gradients would keep every chunk's activations, and ranks that share weights must call them equally often.
            return [list(enumerate(grids))]
        capacity = PATCHES_PER_CHUNK_ON_CPU if self.device.type == "cpu" else PATCHES_PER_CHUNK
        patches = [rows * self.patches_per_row for rows in self.pixel_rows(grid_thw)]
        if kind == IMAGE:  # its crops belong together
            whole = chunk_grids([(1, h, w) for _, h, w in grids], capacity, patches)
            return [[(index, grids[index]) for index, _ in chunk] for chunk in whole]
        return chunk_grids(grids, capacity, [count // t for count, (t, _, _) in zip(patches, grids, strict=True)])

    def _given_features(self, kind: int, features: Sequence[torch.Tensor], grids) -> list[torch.Tensor]:
        """`[k, token_width]` features that the caller had encoded."""
        name = KINDS[kind]
        if len(features) != len(grids):
            raise ValueError(f"{len(features)} {name}_features: expected one per {name} ({len(grids)}).")
        dtype, width = self.get_input_embeddings().weight.dtype, self.token_width
        for index, (one, (t, h, w)) in enumerate(zip(features, grids, strict=True)):
            if one.shape != (t * h * w, width):
                raise ValueError(
                    f"{name}_features {index} has shape {tuple(one.shape)}: expected {(t * h * w, width)}, the merged "
                    f"tokens of its grid, {t} x {h} x {w}, by the model's width."
                )
            if not _is_finite(one):
                raise ValueError(f"NaN or infinity in {name}_features {index}: expected finite numbers.")
        return [one.to(dtype) for one in features]

    def _no_features(self, device: torch.device) -> torch.Tensor:
        embedding = self.get_input_embeddings()
        return torch.empty(0, self.token_width, device=device, dtype=embedding.weight.dtype)

    def _queries(self, input_ids, inputs_embeds, mask, query_mask, query_input_ids, query_attention_mask):
        """Per row `[L_b, d]`: the raw embeddings of the question."""
        embed = self.get_input_embeddings()
        if query_input_ids is not None:
            if len(query_input_ids) != len(input_ids):
                raise ValueError(
                    f"{len(query_input_ids)} rows of query_input_ids: expected one per prompt ({len(input_ids)})."
                )
            if query_attention_mask is not None and query_attention_mask.shape != query_input_ids.shape:
                raise ValueError(
                    f"query_attention_mask {tuple(query_attention_mask.shape)}: expected query_input_ids' shape, "
                    f"{tuple(query_input_ids.shape)}."
                )
            keep = torch.ones_like(query_input_ids) if query_attention_mask is None else query_attention_mask
            return [embed(ids[kept.bool()]) for ids, kept in zip(query_input_ids, keep, strict=True)]
        if query_mask is None:
            config = self.config
            query_mask = find_query_mask(
                input_ids,
                mask,
                config.user_turn_token_ids,
                config.turn_end_token_id,
                config.special_token_ids,
                config.video_token_id,
                getattr(config, "frame_text_token_ids", ()),
            )
        elif query_mask.shape != input_ids.shape:
            raise ValueError(
                f"query_mask {tuple(query_mask.shape)}: expected input_ids' shape, {tuple(input_ids.shape)}."
            )
        query_mask = query_mask.bool() & mask.bool()
        if inputs_embeds is not None:
            return [row[kept] for row, kept in zip(inputs_embeds, query_mask, strict=True)]
        return [embed(row[kept]) for row, kept in zip(input_ids, query_mask, strict=True)]

    def _row_positions(self, length, spans, start, second_per_grid_ts, device) -> torch.Tensor:
        """`[3, length]`: text counts up; an image or video takes `span_positions`."""
        parts, column, position = [], 0, int(start)
        origin = position
        for span in [*spans, None]:
            stop = length if span is None else span.start
            text = torch.arange(position, position + stop - column, device=device)
            parts.append(text.expand(3, -1))
            position += stop - column
            if span is not None:
                seconds = second_per_grid_ts[span.index] if span.kind == VIDEO else None
                origin = origin if span.frame else position
                vision, behind = self.span_positions(span, origin, seconds)
                parts.append(vision.to(device))
                position, column = max(position, behind), span.start + span.length
        return torch.cat(parts, dim=1)

    def _forward_qtsplus(
        self,
        input_ids,
        attention_mask,
        position_ids,
        past_key_values,
        inputs_embeds,
        pixels: dict[str, Any],
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None,
        call: dict[str, Any],
    ) -> tuple[dict[str, Any], QTSplusOutput | None]:
        """The language model's inputs for any call: with pixels or features, with selected features, or text alone."""
        if any(pixels[name] is not None for name in ("pixel_values", "pixel_values_videos", "video_features")):
            if mm_encoder_outputs:
                raise ValueError("Pass pixel values or mm_encoder_outputs, not both.")
            if past_key_values is not None and past_key_values.get_seq_length() > 0:
                raise ValueError("New images or videos after a cache: use generate, which lays them out.")
            prompt = self.compress(input_ids, attention_mask, position_ids, inputs_embeds, **pixels, **call)
            if prompt.inputs_embeds is None:
                inputs_embeds = self.get_input_embeddings()(prompt.input_ids)
            else:
                inputs_embeds = prompt.inputs_embeds
            self.rope_deltas = (prompt.next_position - prompt.attention_mask.sum(-1))[:, None]
            # Without a mask, gaps in the positions of a sequence would be read as the seams of packed ones.
            unmasked = self.rope_axes == 3 and attention_mask is None and bool(prompt.attention_mask.all())
            return {
                **self.language_inputs(inputs_embeds, prompt.input_ids, prompt.features),
                "attention_mask": None if unmasked else prompt.attention_mask,
                "position_ids": prompt.position_ids,
            }, prompt.qtsplus

        qtsplus = None
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        inputs = {"inputs_embeds": inputs_embeds}
        if mm_encoder_outputs:
            self.check_selected(mm_encoder_outputs)
            features = {name: output.pooler_output for name, output in mm_encoder_outputs.items()}
            inputs = self.language_inputs(inputs_embeds, input_ids, features)
        elif self.training and torch.is_grad_enabled():
            # The selector takes part in every training step, so that no rank of a distributed run waits for another.
            nothing = self._no_features(inputs_embeds.device)[:, : inputs_embeds.shape[-1]]
            rows, no_position = len(inputs_embeds), torch.zeros(3, 0, dtype=torch.long, device=inputs_embeds.device)
            features, qtsplus = self.qtsplus([nothing] * rows, [nothing] * rows, [no_position] * rows)
            inputs = {"inputs_embeds": inputs_embeds + torch.cat(features).sum()}
        if position_ids is None:
            past_length = 0 if past_key_values is None else int(past_key_values.get_seq_length())
            if past_length == 0 and not mm_encoder_outputs:
                self._check_no_placeholders(input_ids)
                self.rope_deltas = inputs_embeds.new_zeros((len(inputs_embeds), 1), dtype=torch.long)
            position_ids = self._positions_after(past_length, inputs_embeds, attention_mask)
        return {**inputs, "attention_mask": attention_mask, "position_ids": position_ids}, qtsplus

    def check_selected(self, mm_encoder_outputs: dict[str, Any] | None):
        """Raises `ValueError` for features that [`compress`] has not selected."""
        if not all(isinstance(output, SelectedFeatures) for output in (mm_encoder_outputs or {}).values()):
            raise ValueError("mm_encoder_outputs would pass the selector by: pass pixel values.")

    def _check_no_placeholders(self, input_ids: torch.Tensor | None):
        if input_ids is None:
            return
        for kind, name in KINDS.items():
            count = int((self.token_types(input_ids) == kind).sum())
            if count:
                raise ValueError(f"The prompt has {count} {name} placeholders, but no {name} pixels were given.")

    def _positions_after(self, past_length: int, inputs_embeds: torch.Tensor, attention_mask) -> torch.Tensor | None:
        """`position_ids` of `[B, S]` new tokens behind a cache; `None` lets the language model count from 0."""
        batch_size, length = inputs_embeds.shape[:2]
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            order = text_positions(attention_mask)[:, -length:]
        elif past_length == 0:
            return None
        else:
            order = torch.arange(past_length, past_length + length, device=inputs_embeds.device).expand(batch_size, -1)
        delta = 0
        if self.rope_deltas is not None:
            delta = self.rope_deltas.repeat_interleave(batch_size // len(self.rope_deltas), dim=0).to(order.device)
        return self.lay_positions(order, (order + delta).expand(self.rope_axes, -1, -1))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.FloatTensor | None = None,
        image_grid_thw: torch.LongTensor | None = None,
        video_grid_thw: torch.LongTensor | None = None,
        mm_token_type_ids: torch.IntTensor | None = None,
        second_per_grid_ts: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        video_features: Sequence[torch.Tensor] | None = None,
        query_mask: torch.Tensor | None = None,
        query_input_ids: torch.Tensor | None = None,
        query_attention_mask: torch.Tensor | None = None,
        retention: float | Sequence[float] | None = None,
        max_visual_tokens: int | None = None,
        **kwargs,
    ) -> tuple | QTSplusModelOutputWithPast:
        """As the stock model over the shortened prompt; [`QTSplusModelMixin.compress`] explains our own arguments."""
        inputs, qtsplus = self._forward_qtsplus(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            {
                "pixel_values": pixel_values,
                "image_grid_thw": image_grid_thw,
                "pixel_values_videos": pixel_values_videos,
                "video_grid_thw": video_grid_thw,
                "second_per_grid_ts": second_per_grid_ts,
                "video_features": video_features,
            },
            mm_encoder_outputs,
            {
                "query_mask": query_mask,
                "query_input_ids": query_input_ids,
                "query_attention_mask": query_attention_mask,
                "retention": retention,
                "max_visual_tokens": max_visual_tokens,
            },
        )
        outputs = self.language_model(past_key_values=past_key_values, use_cache=use_cache, **inputs, **kwargs)
        return QTSplusModelOutputWithPast(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            qtsplus=qtsplus,
        )


def _whole(spans: list[VisualSpan], kinds: Sequence[int]) -> list[VisualSpan]:
    """The first span of each image or video of these kinds."""
    return [span for span in spans if span.kind in kinds and not span.frame]


def _is_finite(values: torch.Tensor) -> bool:
    """By the extremes, which unlike a sum in float32 need no wider copy of 16-bit values."""
    return bool(torch.stack(values.detach().aminmax()).isfinite().all())


def _join(parts: list[torch.Tensor], nothing: torch.Tensor) -> torch.Tensor:
    """Concatenates; one part is not copied."""
    if not parts:
        return nothing
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# --------------------------------------------------------------------------------------------------------------------
# Loading and initialising
# --------------------------------------------------------------------------------------------------------------------


class QTSplusPreTrainedMixin(QTSplusSavingMixin):
    """Initialises the selector, and refuses checkpoints that would leave a part of the model random."""

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, QTSplusSelector):
            # A fresh re-encoder changes nothing, so that it does not wreck a trained language model.
            for layer in module.reencode_layers:
                for weight in (layer.o_proj.weight, layer.ffn[-1].weight, layer.ffn[-1].bias):
                    init.zeros_(weight)
            init.zeros_(module.rho_history)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """
        As stock, but a checkpoint that lacks weights is an error.

        Raises:
            ValueError: weights are missing, as in a checkpoint of the base model, whose names may be other ones too.
        """
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} of the weights of {cls.__name__} ({missing[0]}, "
                "...), which would stay random. If it is a base checkpoint without a selector, make a QTSplus model of "
                "it first: qtsplus convert."
            )
        for module in model.modules():
            if isinstance(module, QTSplusSelector):
                module.freeze_unused()
        return (model, info) if output_loading_info else model


# --------------------------------------------------------------------------------------------------------------------
# With a language-modelling head
# --------------------------------------------------------------------------------------------------------------------


class QTSplusHeadMixin(QTSplusGenerationMixin):
    """Logits, a loss and `generate`, for a class whose `model` is a [`QTSplusModelMixin`] and that has an `lm_head`."""

    def encode_videos(
        self,
        pixel_values_videos: torch.Tensor,
        video_grid_thw: torch.Tensor,
        *,
        frames_per_chunk: int | None = None,
        device: torch.device | str | None = None,
    ) -> list[torch.Tensor]:
        """See [`QTSplusModelMixin.encode_videos`]."""
        return self.model.encode_videos(
            pixel_values_videos, video_grid_thw, frames_per_chunk=frames_per_chunk, device=device
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.FloatTensor | None = None,
        image_grid_thw: torch.LongTensor | None = None,
        video_grid_thw: torch.LongTensor | None = None,
        mm_token_type_ids: torch.IntTensor | None = None,
        second_per_grid_ts: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        video_features: Sequence[torch.Tensor] | None = None,
        query_mask: torch.Tensor | None = None,
        query_input_ids: torch.Tensor | None = None,
        query_attention_mask: torch.Tensor | None = None,
        retention: float | Sequence[float] | None = None,
        max_visual_tokens: int | None = None,
        **kwargs,
    ) -> tuple | QTSplusCausalLMOutputWithPast:
        """
        As the stock class over the shortened prompt: `logits` are `[B, S', vocabulary]`, and `output.qtsplus.columns`
        says which column of `input_ids` each one belongs to. `labels` `[B, S]` are those of the full prompt.

        Args:
            video_features: as [`encode_videos`] returns them, in the place of `pixel_values_videos`.
            query_mask: `[B, S]`, 1 on the question's tokens, as the processor makes it; found in `input_ids` if absent.
            query_input_ids, query_attention_mask: `[B, L]`, a question that does not stand in the prompt.
            retention: keep this fraction of the visual tokens, in (0, 1]; one for all rows or one for each.
            max_visual_tokens: keep at most this many.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            pixel_values=pixel_values,
            pixel_values_videos=pixel_values_videos,
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            second_per_grid_ts=second_per_grid_ts,
            video_features=video_features,
            mm_encoder_outputs=mm_encoder_outputs,
            query_mask=query_mask,
            query_input_ids=query_input_ids,
            query_attention_mask=query_attention_mask,
            retention=retention,
            max_visual_tokens=max_visual_tokens,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])

        loss, qtsplus = None, outputs.qtsplus
        if labels is not None:
            if qtsplus is not None and qtsplus.columns is not None:
                labels = self.compact_labels(labels, input_ids, qtsplus.columns)
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size, **kwargs
            )
            if self.training and qtsplus is not None:
                loss = loss + qtsplus.loss_t + qtsplus.loss_m + qtsplus.loss_s
        return QTSplusCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            qtsplus=qtsplus,
        )


__all__ = [
    "QTSplusCausalLMOutputWithPast",
    "QTSplusHeadMixin",
    "QTSplusModelMixin",
    "QTSplusModelOutputWithPast",
    "QTSplusPreTrainedMixin",
]
