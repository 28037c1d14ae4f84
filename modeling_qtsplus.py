"""Video language models with the query-aware selector between the visual merger and the language model.

The file reads in the order data flows: the prompt's layout, then [`QTSplusModelMixin`] (encode, select, splice,
positions), then [`QTSplusGenerationMixin`] (the loss on and generation from the shortened prompt), then the Qwen2.5-VL
classes, which say only what is Qwen2.5-VL's own.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
    Qwen2_5_VLPreTrainedModel,
)
from transformers.utils import can_return_tuple

from .configuration_qtsplus import Qwen2_5_VLQTSplusConfig
from .selector_qtsplus import QTSplusOutput, QTSplusSelector, find_query_mask

TEXT, IMAGE, VIDEO = 0, 1, 2
KINDS = {IMAGE: "image", VIDEO: "video"}


# --------------------------------------------------------------------------------------------------------------------
# The prompt's layout
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class VisualSpan:
    """The placeholders of one image or video: `length` of a row's real tokens from `start` on."""

    kind: int
    index: int  # among the batch's images, or its videos
    start: int
    grid: tuple[int, int, int]  # tokens along (time, height, width)

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.length)


@dataclass
class CompactPrompt:
    """
    What the language model sees, `[B, S']`.

    `features["image"]` and `features["video"]` hold per row the `[k, d]` embeddings of its image and video
    placeholders; `columns` the caller's column behind each column here, -1 on padding; `next_position` `[B]` the first
    position after the prompt; `spans` per row the images and videos of the caller's prompt.
    """

    input_ids: torch.Tensor
    inputs_embeds: torch.Tensor | None
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    features: dict[str, list[torch.Tensor]]
    columns: torch.Tensor
    next_position: torch.Tensor
    spans: list[list[VisualSpan]]
    qtsplus: QTSplusOutput


def find_spans(
    token_types: Sequence[torch.Tensor], grids: dict[int, list[tuple[int, int, int]]]
) -> list[list[VisualSpan]]:
    """
    Pairs the placeholders of every row with the images and videos of the batch, in order.

    Args:
        token_types: per row `[S_b]`, TEXT, IMAGE or VIDEO for each real token.
        grids: per kind, (time, height, width) in tokens of every image or video of the batch.

    Raises:
        ValueError: the placeholders do not add up to the grids.
    """
    queues = {kind: iter(enumerate(grids[kind])) for kind in KINDS}
    rows = []
    for row, types in enumerate(token_types):
        spans: list[VisualSpan] = []
        for kind, start, stop in _runs(types):
            while start < stop:
                index, grid = next(queues[kind], (None, (0, 0, 0)))
                span = VisualSpan(kind, -1 if index is None else index, start, grid)
                if index is None or start + span.length > stop:
                    raise ValueError(_mismatch(row, kind, stop - start, span, len(grids[kind])))
                spans.append(span)
                start += span.length
        rows.append(spans)
    for kind, queue in queues.items():
        left = sum(1 for _ in queue)
        if left:
            raise ValueError(
                f"{len(grids[kind])} {KINDS[kind]}s were given, but the prompts have placeholders for only "
                f"{len(grids[kind]) - left}: give one block of placeholders per {KINDS[kind]}, as the processor does."
            )
    return rows


def _runs(types: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(kind, start, stop) of every run of placeholders."""
    bounds = [0, *((types[1:] != types[:-1]).nonzero()[:, 0] + 1).tolist(), len(types)]
    values = types[bounds[:-1]].tolist() if len(types) else []
    for value, start, stop in zip(values, bounds, bounds[1:], strict=False):
        if value != TEXT:
            yield value, start, stop


def _mismatch(row: int, kind: int, found: int, span: VisualSpan, given: int) -> str:
    name = KINDS[kind]
    if span.index < 0:
        expected = f"only {given} {name}(s) were given"
    else:
        t, h, w = span.grid
        expected = f"{name} {span.index} has {t} x {h} x {w} = {span.length} tokens"
    return (
        f"Row {row}: {found} {name} placeholder(s) in a row, but {expected}. Make input_ids and {name}_grid_thw with "
        "the same processor call, and give every one of them its pixels."
    )


def text_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position among the real tokens, `[B, S]` -> `[B, S]`; 0 on padding."""
    return (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 0)


def pad_rows(rows: Sequence[torch.Tensor], value: int, left: bool) -> torch.Tensor:
    """Stacks `[..., n_b]` rows along a new first dimension, padded at one side of the last."""
    width = max(row.shape[-1] for row in rows)
    padded = []
    for row in rows:
        missing = width - row.shape[-1]
        padded.append(nn.functional.pad(row, (missing, 0) if left else (0, missing), value=value))
    return torch.stack(padded)


# --------------------------------------------------------------------------------------------------------------------
# Encode -> select -> splice -> positions
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class SelectedFeatures(BaseModelOutputWithPooling):
    """Features that [`QTSplusModelMixin.compress`] has selected; `pooler_output` has `[k_b, d]` for each row."""


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

    A backbone supplies `merged_grid` and `span_positions`, and the usual `get_image_features`, `get_video_features`,
    `config.image_token_id` and `config.video_token_id`.
    """

    def merged_grid(self, grid_thw: torch.Tensor) -> list[tuple[int, int, int]]:
        raise NotImplementedError

    def span_positions(self, span: VisualSpan, start: int, seconds_per_grid: Any) -> tuple[torch.Tensor, int]:
        raise NotImplementedError

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
        query_mask: torch.Tensor | None = None,
        query_input_ids: torch.Tensor | None = None,
        query_attention_mask: torch.Tensor | None = None,
        retention: float | None = None,
        max_visual_tokens: int | None = None,
        sample_gate: bool | None = None,
        pad_left: bool | None = None,
        start_positions: Sequence[int] | None = None,
    ) -> CompactPrompt:
        """
        Args:
            input_ids, attention_mask: `[B, S]`; padding may stand on either side.
            position_ids: the caller's own positions, `[B, S]`, `[3, B, S]` or `[4, B, S]`, for the full prompt.
            pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, second_per_grid_ts: as Qwen2.5-VL's.
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
        batch_size, width = input_ids.shape
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask {tuple(mask.shape)}: expected input_ids' shape, {(batch_size, width)}.")
        if pad_left is None:
            pad_left = bool(mask[:, -1].all())
        real = [row.nonzero()[:, 0] for row in mask]

        # Encode
        types = self.token_types(input_ids)
        grids = {
            IMAGE: self._grids("image", pixel_values, image_grid_thw),
            VIDEO: self._grids("video", pixel_values_videos, video_grid_thw),
        }
        spans = find_spans([types[b, real[b]] for b in range(batch_size)], grids)
        features = {
            IMAGE: self._encode("image", self.get_image_features, pixel_values, image_grid_thw),
            VIDEO: self._encode("video", self.get_video_features, pixel_values_videos, video_grid_thw),
        }
        if second_per_grid_ts is None:
            second_per_grid_ts = [1] * len(grids[VIDEO])
        if len(second_per_grid_ts) != len(grids[VIDEO]):
            raise ValueError(
                f"{len(second_per_grid_ts)} second_per_grid_ts: expected one per video ({len(grids[VIDEO])})."
            )

        # Positions of the full prompt
        if position_ids is None:
            starts = start_positions or [0] * batch_size
            positions = [
                self._row_positions(len(real[b]), spans[b], starts[b], second_per_grid_ts, input_ids.device)
                for b in range(batch_size)
            ]
        else:
            given = position_ids.expand(3, -1, -1) if position_ids.ndim == 2 else position_ids[-3:]
            positions = [given[:, b, real[b]] for b in range(batch_size)]

        # Select
        config = self.config.qtsplus_config
        candidate_kinds = (IMAGE, VIDEO) if config.select_images else (VIDEO,)
        nothing = self._no_features(input_ids.device)
        visual, candidates = [], []
        for row in spans:
            chosen = [span for span in row if span.kind in candidate_kinds]
            visual.append(_join([features[span.kind][span.index] for span in chosen], nothing))
            columns = [torch.arange(s.start, s.start + s.length, device=input_ids.device) for s in chosen]
            candidates.append(_join(columns, input_ids.new_empty(0)))
        queries = self._queries(input_ids, inputs_embeds, mask, query_mask, query_input_ids, query_attention_mask)
        selected, qtsplus = self.qtsplus(
            visual,
            queries,
            [positions[b][:, candidates[b]] for b in range(batch_size)],
            retention=retention,
            max_visual_tokens=max_visual_tokens,
            sample_gate=sample_gate,
        )

        # Splice
        row_columns, kept_positions = [], []
        row_features: dict[str, list[torch.Tensor]] = {name: [] for name in KINDS.values()}
        for b in range(batch_size):
            keep = torch.ones(len(real[b]), dtype=torch.bool, device=input_ids.device)
            kept = candidates[b][qtsplus.kept_indices[b].to(input_ids.device)]
            keep[candidates[b]] = False
            keep[kept] = True
            row_columns.append(real[b][keep])
            kept_positions.append(positions[b][:, keep])
            kinds = types[b, real[b]][kept].to(selected[b].device)
            for kind, name in KINDS.items():
                if kind in candidate_kinds:
                    row_features[name].append(selected[b] if len(candidate_kinds) == 1 else selected[b][kinds == kind])
                else:
                    untouched = [features[kind][span.index] for span in spans[b] if span.kind == kind]
                    row_features[name].append(_join(untouched, nothing))

        columns = pad_rows(row_columns, -1, pad_left)
        kept_mask = (columns >= 0).to(mask.dtype)
        source = columns.clamp(min=0)
        qtsplus.columns = columns
        return CompactPrompt(
            input_ids=input_ids.gather(1, source).masked_fill(columns < 0, self.config.text_config.pad_token_id or 0),
            inputs_embeds=None
            if inputs_embeds is None
            else inputs_embeds.gather(1, source[..., None].expand(-1, -1, inputs_embeds.shape[-1])),
            attention_mask=kept_mask,
            position_ids=self._layout_positions(kept_positions, kept_mask, start_positions, pad_left),
            features=row_features,
            columns=columns,
            next_position=self._next_position(positions, kept_positions, start_positions),
            spans=spans,
            qtsplus=qtsplus,
        )

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
        self, name: str, pixels: torch.Tensor | None, grid_thw: torch.Tensor | None
    ) -> list[tuple[int, int, int]]:
        if (pixels is None) != (grid_thw is None):
            given, missing = ("grid_thw", "pixel values") if pixels is None else ("pixel values", "grid_thw")
            raise ValueError(
                f"The {name}s came with {given} but without {missing}: pass all that the processor returned."
            )
        if grid_thw is None:
            return []
        if bool((grid_thw < 1).any()):
            raise ValueError(
                f"{name}_grid_thw {grid_thw.tolist()}: an empty {name}; expected at least 1 x 1 x 1 patches."
            )
        patches = int(grid_thw.prod(-1).sum())
        if len(pixels) != patches:
            raise ValueError(
                f"{len(pixels)} rows of {name} pixels: expected {patches}, the patches of {name}_grid_thw."
            )
        return self.merged_grid(grid_thw)

    def _encode(self, name: str, encoder, pixels: torch.Tensor | None, grid_thw: torch.Tensor | None):
        """`[k, d]` features of each image or video."""
        if pixels is None:
            return []
        features = encoder(pixels, grid_thw, return_dict=True).pooler_output
        for index, one in enumerate(features):
            if not bool(torch.isfinite(one.sum(dtype=torch.float32))):
                pixel_ends = [0, *grid_thw.prod(-1).cumsum(0).tolist()]
                fine = bool(torch.isfinite(pixels[pixel_ends[index] : pixel_ends[index + 1]]).all())
                blame = "its features (the weights or the dtype overflow)" if fine else "its pixel values"
                raise ValueError(f"NaN or infinity in {blame} of {name} {index}: expected finite numbers.")
        return features

    def _no_features(self, device: torch.device) -> torch.Tensor:
        embedding = self.get_input_embeddings()
        return torch.empty(0, embedding.embedding_dim, device=device, dtype=embedding.weight.dtype)

    def _queries(self, input_ids, inputs_embeds, mask, query_mask, query_input_ids, query_attention_mask):
        """Per row `[L_b, d]`: the raw embeddings of the question."""
        embed = self.get_input_embeddings()
        if query_input_ids is not None:
            if len(query_input_ids) != len(input_ids):
                raise ValueError(
                    f"{len(query_input_ids)} rows of query_input_ids: expected one per prompt ({len(input_ids)})."
                )
            keep = torch.ones_like(query_input_ids) if query_attention_mask is None else query_attention_mask
            return [embed(ids[kept.bool()]) for ids, kept in zip(query_input_ids, keep, strict=True)]
        if query_mask is None:
            config = self.config
            query_mask = find_query_mask(
                input_ids, mask, config.user_turn_token_ids, config.turn_end_token_id, config.special_token_ids
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
        for span in [*spans, None]:
            stop = length if span is None else span.start
            text = torch.arange(position, position + stop - column, device=device)
            parts.append(text.expand(3, -1))
            position += stop - column
            if span is not None:
                seconds = second_per_grid_ts[span.index] if span.kind == VIDEO else None
                vision, position = self.span_positions(span, position, seconds)
                parts.append(vision.to(device))
                column = span.start + span.length
        return torch.cat(parts, dim=1)

    def _layout_positions(self, kept_positions, kept_mask, start_positions, pad_left) -> torch.Tensor:
        """`[4, B, S']`: the position among the real tokens (for masks), then time, height and width."""
        order = text_positions(kept_mask)
        if self.config.qtsplus_config.position_ids == "sequential":
            starts = torch.tensor(start_positions or [0] * len(order), device=order.device)[:, None]
            vision = ((order + starts) * (kept_mask != 0)).expand(3, -1, -1)
        else:
            vision = pad_rows(kept_positions, 0, pad_left).transpose(0, 1)
        return torch.cat([order[None], vision])

    def _next_position(self, positions, kept_positions, start_positions) -> torch.Tensor:
        if self.config.qtsplus_config.position_ids == "sequential":
            starts = start_positions or [0] * len(positions)
            ends = [start + row.shape[1] for start, row in zip(starts, kept_positions, strict=True)]
        else:
            ends = [int(row[:, -1].max()) + 1 for row in positions]
        return torch.tensor(ends, device=positions[0].device)

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
        """The language model's inputs for any call: with pixels, with features already selected, or with text alone."""
        if pixels["pixel_values"] is not None or pixels["pixel_values_videos"] is not None:
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
            return {
                "inputs_embeds": self.splice(inputs_embeds, prompt.input_ids, prompt.features),
                "attention_mask": None
                if attention_mask is None and bool(prompt.attention_mask.all())
                else prompt.attention_mask,
                "position_ids": prompt.position_ids,
            }, prompt.qtsplus

        qtsplus = None
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if mm_encoder_outputs:
            if not all(isinstance(output, SelectedFeatures) for output in mm_encoder_outputs.values()):
                raise ValueError("mm_encoder_outputs would pass the selector by: pass pixel values.")
            features = {name: output.pooler_output for name, output in mm_encoder_outputs.items()}
            inputs_embeds = self.splice(inputs_embeds, input_ids, features)
        elif self.training and torch.is_grad_enabled():
            # The selector takes part in every training step, so that no rank of a distributed run waits for another.
            nothing = self._no_features(inputs_embeds.device)
            rows, no_position = len(inputs_embeds), torch.zeros(3, 0, dtype=torch.long, device=inputs_embeds.device)
            features, qtsplus = self.qtsplus([nothing] * rows, [nothing] * rows, [no_position] * rows)
            inputs_embeds = inputs_embeds + torch.cat(features).sum()
        if position_ids is None:
            past_length = 0 if past_key_values is None else int(past_key_values.get_seq_length())
            if past_length == 0 and not mm_encoder_outputs:
                self._check_no_placeholders(input_ids)
                self.rope_deltas = inputs_embeds.new_zeros((len(inputs_embeds), 1), dtype=torch.long)
            position_ids = self._positions_after(past_length, inputs_embeds, attention_mask)
        return {"inputs_embeds": inputs_embeds, "attention_mask": attention_mask, "position_ids": position_ids}, qtsplus

    def _check_no_placeholders(self, input_ids: torch.Tensor | None):
        if input_ids is None:
            return
        for kind, name in KINDS.items():
            count = int((self.token_types(input_ids) == kind).sum())
            if count:
                raise ValueError(f"The prompt has {count} {name} placeholders, but no {name} pixels were given.")

    def _positions_after(self, past_length: int, inputs_embeds: torch.Tensor, attention_mask) -> torch.Tensor | None:
        """Positions of `[B, S]` new tokens behind a cache, `[4, B, S]`; `None` lets the language model count from 0."""
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
        return torch.cat([order[None], (order + delta).expand(3, -1, -1)])


def _join(parts: list[torch.Tensor], nothing: torch.Tensor) -> torch.Tensor:
    """Concatenates; one part is not copied."""
    if not parts:
        return nothing
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# --------------------------------------------------------------------------------------------------------------------
# Loss and generation on the shortened prompt
# --------------------------------------------------------------------------------------------------------------------

_PIXELS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
_CALL = ("query_mask", "query_input_ids", "query_attention_mask", "retention", "max_visual_tokens")


@dataclass
class CachedPrompt:
    """What a key/value cache that `generate` filled stands for; kept on the cache as `qtsplus` for the next turn."""

    rows: list[torch.Tensor]  # per row, the real tokens of the caller's prompt
    compact: CompactPrompt
    generated: torch.Tensor  # [B, g], behind the prompt
    counts: dict[int, list[int]]  # per kind and row, images and videos in the prompt


class _PromptStreamer(BaseStreamer):
    """Shows a streamer the caller's prompt where `generate` would show the shortened one."""

    def __init__(self, streamer: BaseStreamer, prompt: torch.Tensor):
        self.streamer, self.prompt = streamer, prompt

    def put(self, value):
        if self.prompt is not None:
            value, self.prompt = self.prompt.to(value.device), None
        self.streamer.put(value)

    def end(self):
        self.streamer.end()


class QTSplusGenerationMixin:
    """`generate` and the labels of the shortened prompt, for a class whose `model` is a [`QTSplusModelMixin`]."""

    def compact_labels(
        self, labels: torch.Tensor, input_ids: torch.Tensor | None, columns: torch.Tensor
    ) -> torch.Tensor:
        """`[B, S]` labels of the full prompt -> `[B, S']`; padding and placeholders are ignored (-100)."""
        if input_ids is not None:
            labels = labels.masked_fill(self.model.token_types(input_ids) != TEXT, -100)
        return labels.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -100)

    @torch.no_grad()
    def generate(self, inputs=None, generation_config=None, streamer=None, **kwargs):
        """
        As [`~GenerationMixin.generate`], from the shortened prompt. The returned sequences begin with the caller's own
        `input_ids`. Everything between (logits processors, stopping criteria, the cache, attentions) sees the shortened
        prompt.

        Args:
            retention (`float`, *optional*): keep this fraction of the visual tokens, in (0, 1].
            max_visual_tokens (`int`, *optional*): keep at most this many.
            past_key_values (`Cache`, *optional*): a cache from an earlier `generate` on the same conversation. What it
                holds is neither encoded nor selected again, and need not be passed again as pixels.

        Returns:
            as stock; with `return_dict_in_generate=True` the output carries `qtsplus`, a [`QTSplusOutput`].
        """
        input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        if input_ids is None or kwargs.get("inputs_embeds") is not None or "mm_encoder_outputs" in kwargs:
            if kwargs.get("pixel_values_videos") is not None:
                raise ValueError("generate selects visual tokens by input_ids: pass them instead of inputs_embeds.")
            # Nothing to shorten: embeddings, an empty prompt, or a prompt that this method has shortened already.
            return super().generate(input_ids, generation_config, streamer=streamer, **kwargs)
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError('cache_implementation="paged" cannot take a prompt with selected visual tokens.')

        pixels = {name: kwargs.pop(name, None) for name in _PIXELS}
        call = {name: kwargs.pop(name, None) for name in _CALL}
        attention_mask, position_ids = kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None)
        kwargs.pop("mm_token_type_ids", None)  # found in input_ids
        cache = kwargs.get("past_key_values")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        rows = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]

        if cache is None or cache.get_seq_length() == 0:
            prompt = self.model.compress(
                input_ids, attention_mask, position_ids, **pixels, **call, sample_gate=False, pad_left=True
            )
            counts = _count_spans(prompt.spans)
        else:
            prompt, counts = self._continue(cache, rows, pixels, call)
        generation_config, kwargs = self._count_new_tokens(generation_config, kwargs, input_ids.shape[1])

        result = super().generate(
            prompt.input_ids,
            generation_config,
            streamer=None if streamer is None else _PromptStreamer(streamer, input_ids),
            attention_mask=prompt.attention_mask,
            position_ids=prompt.position_ids,
            mm_encoder_outputs={
                name: SelectedFeatures(pooler_output=tuple(features)) for name, features in prompt.features.items()
            },
            **kwargs,
        )

        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        generated = sequences[:, prompt.input_ids.shape[1] :]
        copies = len(sequences) // len(input_ids)
        sequences = torch.cat([input_ids.repeat_interleave(copies, dim=0).to(generated.device), generated], dim=1)
        cache = cache if isinstance(result, torch.Tensor) else result.get("past_key_values")
        if cache is not None and copies == 1:
            prompt.features = {}
            cache.qtsplus = CachedPrompt(rows, prompt, generated, counts)
        if isinstance(result, torch.Tensor):
            return sequences
        result.sequences = sequences
        result.qtsplus = prompt.qtsplus
        return result

    def _continue(self, cache: Cache, rows, pixels, call) -> tuple[CompactPrompt, dict[int, list[int]]]:
        """The shortened prompt of the next turn: the columns that the cache holds, then what is new in `rows`."""
        state = getattr(cache, "qtsplus", None)
        if not isinstance(state, CachedPrompt) or len(state.rows) != len(rows):
            raise ValueError(
                f"past_key_values holds {cache.get_seq_length()} columns that no generate call of this model with one "
                f"sequence for each of the {len(rows)} prompts left there: start with an empty cache, without beams "
                "and with num_return_sequences=1."
            )
        if call["query_mask"] is not None:
            call = {**call, "query_mask": None}  # the question of the new turn is found in the new tokens
        old = state.compact
        device = old.input_ids.device
        answer = state.generated[:, : cache.get_seq_length() - old.input_ids.shape[1]].to(device)
        answer_mask = torch.zeros_like(answer)
        fresh_rows, starts = [], []
        for b, (known, ids) in enumerate(zip(state.rows, rows, strict=True)):
            if len(ids) <= len(known) or not torch.equal(ids[: len(known)].to(known.device), known):
                raise ValueError(
                    f"Row {b} does not begin with the {len(known)} tokens of the prompt that filled past_key_values: "
                    "pass the whole conversation, with the earlier prompt and its answer."
                )
            # The caller's text decides how much of the cached answer stands; at least one token must be new.
            rest = ids[len(known) :].to(device)
            limit = min(answer.shape[1], len(rest) - 1)
            differs = (rest[:limit] != answer[b, :limit]).nonzero()
            same = int(differs[0]) if len(differs) else limit
            answer_mask[b, :same] = 1
            starts.append(int(old.next_position[b]) + same)
            fresh_rows.append(rest[same:])

        fresh_ids = pad_rows(fresh_rows, 0, left=True)
        fresh_mask = pad_rows([torch.ones_like(row) for row in fresh_rows], 0, left=True)
        counts, pixels = self._uncached_pixels(pixels, state.counts, fresh_ids * fresh_mask)
        fresh = self.model.compress(
            fresh_ids, fresh_mask, **pixels, **call, sample_gate=False, pad_left=True, start_positions=starts
        )
        attention_mask = torch.cat([old.attention_mask, answer_mask, fresh.attention_mask], dim=1)
        answered = old.next_position[:, None] + torch.arange(answer.shape[1], device=device)
        vision = [old.position_ids[1:], answered.expand(3, -1, -1), fresh.position_ids[1:]]
        return replace(
            fresh,
            input_ids=torch.cat([old.input_ids, answer, fresh.input_ids], dim=1),
            attention_mask=attention_mask,
            position_ids=torch.cat([text_positions(attention_mask)[None], torch.cat(vision, dim=2)]),
        ), counts

    def _uncached_pixels(self, pixels, cached: dict[int, list[int]], fresh_ids: torch.Tensor):
        """Drops the images and videos that stand in the cache; returns the conversation's counts and the rest."""
        pixels, counts = dict(pixels), {}
        types = self.model.token_types(fresh_ids)
        for kind, values, grid in ((IMAGE, *_PIXELS[:2]), (VIDEO, *_PIXELS[2:4])):
            new = [sum(1 for run_kind, _, _ in _runs(row) if run_kind == kind) for row in types]
            counts[kind] = [before + more for before, more in zip(cached[kind], new, strict=True)]
            if pixels[grid] is None or len(pixels[grid]) == sum(new):
                continue
            if len(pixels[grid]) != sum(counts[kind]):
                raise ValueError(
                    f"{len(pixels[grid])} {KINDS[kind]}s were given: expected the {sum(new)} that the cache does not "
                    f"hold, or all {sum(counts[kind])} of the conversation."
                )
            is_new = torch.tensor([i >= b for b, c in zip(cached[kind], counts[kind], strict=True) for i in range(c)])
            patches = pixels[grid].prod(-1).cpu()
            pixels[values] = pixels[values][is_new.repeat_interleave(patches).to(pixels[values].device)]
            pixels[grid] = pixels[grid][is_new.to(pixels[grid].device)]
            if kind == VIDEO and pixels["second_per_grid_ts"] is not None:
                seconds = zip(pixels["second_per_grid_ts"], is_new, strict=True)
                pixels["second_per_grid_ts"] = [one for one, new_one in seconds if new_one]
            if not any(new):
                pixels.update({values: None, grid: None})
        return counts, pixels

    def _count_new_tokens(self, generation_config, kwargs, prompt_length: int):
        """Lengths that count the prompt would count the shortened one: says them in new tokens instead."""
        given = copy.deepcopy(generation_config)

        def setting(name):
            for source in (kwargs.get(name), getattr(given, name, None), getattr(self.generation_config, name, None)):
                if source is not None:
                    return source
            return None

        for total, new, least in (("max_length", "max_new_tokens", 1), ("min_length", "min_new_tokens", 0)):
            length = setting(total)
            if setting(new) is None and length:
                if length - prompt_length < least and total == "max_length":
                    raise ValueError(
                        f"max_length={length}, but the prompt alone has {prompt_length} tokens: set max_new_tokens."
                    )
                kwargs[new] = max(length - prompt_length, least)
            kwargs.pop(total, None)
            if given is not None:
                setattr(given, total, None)
        return given, kwargs

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        outputs = model_kwargs.pop("mm_encoder_outputs", None)
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        if outputs is not None:
            model_kwargs["mm_encoder_outputs"] = {
                name: SelectedFeatures(pooler_output=tuple(f for f in one.pooler_output for _ in range(expand_size)))
                for name, one in outputs.items()
            }
        return input_ids, model_kwargs

    def prepare_inputs_for_generation(self, input_ids, is_first_iteration=False, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration and kwargs.get("use_cache", True):
            inputs.pop("mm_encoder_outputs", None)  # Transformers below 5.18 does not know that these belong to prefill
        return inputs


def _count_spans(spans: list[list[VisualSpan]]) -> dict[int, list[int]]:
    return {kind: [sum(span.kind == kind for span in row) for row in spans] for kind in KINDS}


# --------------------------------------------------------------------------------------------------------------------
# Loading and initialising
# --------------------------------------------------------------------------------------------------------------------


class QTSplusPreTrainedMixin:
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
            ValueError: weights are missing, as in a base Qwen2.5-VL checkpoint, whose names are other ones too.
        """
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} of the weights of {cls.__name__} ({missing[0]}, "
                "...), which would stay random. If it is a base checkpoint without a selector, make a QTSplus model of "
                "it first: qtsplus convert."
            )
        return (model, info) if output_loading_info else model


# --------------------------------------------------------------------------------------------------------------------
# Qwen2.5-VL
# --------------------------------------------------------------------------------------------------------------------


class Qwen2_5_VLQTSplusPreTrainedModel(QTSplusPreTrainedMixin, Qwen2_5_VLPreTrainedModel):
    config: Qwen2_5_VLQTSplusConfig
    config_class = Qwen2_5_VLQTSplusConfig
    _no_split_modules = [*Qwen2_5_VLPreTrainedModel._no_split_modules, "QTSplusSelector"]


class Qwen2_5_VLQTSplusModel(QTSplusModelMixin, QTSplusPreTrainedMixin, Qwen2_5_VLModel):
    """Qwen2.5-VL without a head, with a [`QTSplusSelector`] as `qtsplus`."""

    config: Qwen2_5_VLQTSplusConfig
    config_class = Qwen2_5_VLQTSplusConfig
    _no_split_modules = Qwen2_5_VLQTSplusPreTrainedModel._no_split_modules

    def __init__(self, config: Qwen2_5_VLQTSplusConfig):
        super().__init__(config)
        text = config.text_config
        self.qtsplus = QTSplusSelector(
            config.qtsplus_config,
            hidden_size=text.hidden_size,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            rms_norm_eps=text.rms_norm_eps,
            rope_theta=text.rope_parameters["rope_theta"],
            mrope_section=text.rope_parameters.get("mrope_section", (16, 24, 24)),
        )
        self.post_init()

    def merged_grid(self, grid_thw: torch.Tensor) -> list[tuple[int, int, int]]:
        merge = self.config.vision_config.spatial_merge_size
        return [(t, h // merge, w // merge) for t, h, w in grid_thw.tolist()]

    def span_positions(self, span: VisualSpan, start: int, seconds_per_grid: Any) -> tuple[torch.Tensor, int]:
        """
        `[3, k]` positions of an image's or video's tokens, and the position of the token behind them.

        Time advances by `tokens_per_second * seconds_per_grid` per temporal patch, height and width by 1 per merged
        patch; the text behind goes on at `start + max(height, width)`, as in Transformers since 5.10.
        """
        t, h, w = span.grid
        interval = 1 if span.kind == IMAGE else self.config.vision_config.tokens_per_second * seconds_per_grid
        if isinstance(interval, torch.Tensor):
            interval = interval.cpu()
        time = (torch.arange(t) * interval).long()
        axes = torch.meshgrid(time, torch.arange(h), torch.arange(w), indexing="ij")
        return torch.stack(axes).reshape(3, -1) + start, start + max(h, w)

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
        query_mask: torch.Tensor | None = None,
        query_input_ids: torch.Tensor | None = None,
        query_attention_mask: torch.Tensor | None = None,
        retention: float | None = None,
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


class Qwen2_5_VLQTSplusForConditionalGeneration(
    QTSplusGenerationMixin, QTSplusPreTrainedMixin, Qwen2_5_VLForConditionalGeneration
):
    """Qwen2.5-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen2_5_VLQTSplusConfig
    config_class = Qwen2_5_VLQTSplusConfig
    _no_split_modules = Qwen2_5_VLQTSplusPreTrainedModel._no_split_modules

    def __init__(self, config: Qwen2_5_VLQTSplusConfig):
        super(Qwen2_5_VLForConditionalGeneration, self).__init__(
            config
        )  # the stock one would build a stock model first
        self.model = Qwen2_5_VLQTSplusModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

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
        query_mask: torch.Tensor | None = None,
        query_input_ids: torch.Tensor | None = None,
        query_attention_mask: torch.Tensor | None = None,
        retention: float | None = None,
        max_visual_tokens: int | None = None,
        **kwargs,
    ) -> tuple | QTSplusCausalLMOutputWithPast:
        """
        As the stock class over the shortened prompt: `logits` are `[B, S', vocabulary]`, and `output.qtsplus.columns`
        says which column of `input_ids` each one belongs to. `labels` `[B, S]` are those of the full prompt.

        Args:
            query_mask: `[B, S]`, 1 on the question's tokens, as the processor makes it; found in `input_ids` if absent.
            query_input_ids, query_attention_mask: `[B, L]`, a question that does not stand in the prompt.
            retention: keep this fraction of the visual tokens, in (0, 1].
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
    "QTSplusModelOutputWithPast",
    "Qwen2_5_VLQTSplusForConditionalGeneration",
    "Qwen2_5_VLQTSplusModel",
]
