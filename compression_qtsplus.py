"""From the caller's prompt to the shortened one: laid out, encoded, selected and spliced together again."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .encoding_qtsplus import QTSplusEncodingMixin
from .inputs_qtsplus import SelectionInputs, VisualInputs, take_inputs
from .lm_attention_qtsplus import AskedPrompt, QTSplusLMAttentionMixin
from .prompt_qtsplus import (
    IMAGE,
    MODALITIES,
    VIDEO,
    CompactPrompt,
    PromptRow,
    VisualSpan,
    find_separators,
    find_spans,
    pad_rows,
    text_positions,
)
from .selection_qtsplus import LM_ATTENTION
from .selector_qtsplus import QTSplusOutput, QTSplusSelector, take_rows

Grids = dict[int, list[tuple[int, int, int]]]
Shapes = dict[int, list[list[tuple[int, int, int]]]]  # of the tokens that are there: one grid, or several in turn
Features = dict[int, list[torch.Tensor]]


class QTSplusCompressionMixin(QTSplusLMAttentionMixin, QTSplusEncodingMixin):
    """Shortens a prompt by what the [`QTSplusSelector`] at `self.qtsplus` keeps of its visual tokens."""

    qtsplus: QTSplusSelector

    def compress(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        sample_gate: bool | None = None,
        pad_left: bool | None = None,
        start_positions: Sequence[int] | None = None,
        earlier: Sequence[torch.Tensor] | None = None,
        looking: Sequence[torch.Tensor] | None = None,
        **inputs: Any,
    ) -> CompactPrompt:
        """
        Args:
            input_ids, attention_mask: `[B, S]`; padding may stand on either side.
            position_ids: the caller's own positions for the full prompt, `[B, S]`; `[3, B, S]` or `[4, B, S]` too where
                the language model takes them.
            inputs_embeds: `[B, S, d]`, in the place of the embeddings of `input_ids`.
            sample_gate: as for [`QTSplusSelector`].
            pad_left: pad the result on the left; `None` pads where the caller did, left if nowhere.
            start_positions: per row, the position of its first token (0 if `None`).
            earlier: per row, the ids of the conversation in front of its first token, such as a cache holds.
            looking: per row `[P]`, the tokens whose attention counts for `selection="lm_attention"`, among its real
                ones; those from which the answer begins if `None`.
            inputs: the fields of [`VisualInputs`] and [`SelectionInputs`].

        Raises:
            ValueError: inputs that do not fit each other; each says what was given and what is expected.
            TypeError: an input of another name.
        """
        visual, selection = take_inputs(inputs)
        if inputs:
            raise TypeError(f"compress got {', '.join(inputs)}; expected fields of VisualInputs and SelectionInputs.")
        if input_ids is None:
            if inputs_embeds is None:
                raise ValueError("Got neither input_ids nor inputs_embeds: expected one of them.")
            input_ids = self.ids_from_embeds(inputs_embeds)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask {tuple(mask.shape)}: expected input_ids' shape, {tuple(input_ids.shape)}."
            )
        if position_ids is not None and _restarts(position_ids, mask):
            raise packed_rows("position_ids that begin again within a row")
        if pad_left is None:
            pad_left = bool(mask[:, -1].all())
        starts = [0] * len(input_ids) if start_positions is None else list(start_positions)

        grids = self._grids(visual)
        places = check_places(visual, grids[VIDEO])
        whole = self._layout(input_ids, mask, starts, grids, visual.second_per_grid_ts, position_ids)
        rows = self._only(whole, grids, places)
        features: Features = {
            IMAGE: self.encode(IMAGE, visual.pixel_values, visual.image_grid_thw),
            VIDEO: self.encode(VIDEO, visual.pixel_values_videos, visual.video_grid_thw)
            if visual.video_features is None
            else self.check_features(VIDEO, visual.video_features, grids[VIDEO], places),
        }
        queries = self.query_embeds(input_ids, inputs_embeds, mask, selection)
        asked = None
        if (selection.selection or self.config.qtsplus_config.selection) == LM_ATTENTION:

            def layout(ids: torch.Tensor, mask: torch.Tensor, starts: Sequence[int]) -> list[PromptRow]:
                return self._only(self._layout(ids, mask, starts, grids, visual.second_per_grid_ts), grids, places)

            asked = self.asked_prompt(whole, rows, input_ids, inputs_embeds, mask, starts, selection, earlier, layout)
            asked.places = asked.places if looking is None else list(looking)
        shapes = {modality: [[grid] for grid in own] for modality, own in grids.items()}
        if places is not None:
            shapes[VIDEO] = [_runs(own, grid) for own, grid in zip(places, grids[VIDEO], strict=True)]
        selected, qtsplus = self._select(rows, shapes, features, queries, selection, sample_gate, asked)
        return self._splice_rows(input_ids, inputs_embeds, rows, features, selected, qtsplus, pad_left, starts)

    def candidates(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, visual: VisualInputs
    ) -> list[torch.Tensor]:
        """Per row `[M_b]`, where among its real tokens those stand that compete for its budget."""
        starts = [0] * len(input_ids)
        rows = self._layout(input_ids, attention_mask, starts, self._grids(visual), visual.second_per_grid_ts)
        return [row.candidates for row in rows]

    def _grids(self, visual: VisualInputs) -> Grids:
        return {
            IMAGE: self.check_grids(IMAGE, visual.pixel_values, visual.image_grid_thw),
            VIDEO: self.check_grids(VIDEO, visual.pixel_values_videos, visual.video_grid_thw, visual.video_features),
        }

    @property
    def _candidate_modalities(self) -> tuple[int, ...]:
        return (IMAGE, VIDEO) if self.config.qtsplus_config.select_images else (VIDEO,)

    def _layout(
        self, input_ids, mask, starts: Sequence[int], grids: Grids, second_per_grid_ts, position_ids=None
    ) -> list[PromptRow]:
        """The rows of the full prompt: which tokens are whose, and where they stand."""
        seconds = [1] * len(grids[VIDEO]) if second_per_grid_ts is None else second_per_grid_ts
        if len(seconds) != len(grids[VIDEO]):
            raise ValueError(f"{len(seconds)} second_per_grid_ts: expected one per video ({len(grids[VIDEO])}).")
        columns = [row.nonzero()[:, 0] for row in mask]
        types = [row[real] for row, real in zip(self.token_types(input_ids), columns, strict=True)]
        spans = find_spans(types, {modality: self.visual_spans(modality, grids[modality]) for modality in MODALITIES})
        given = None if position_ids is None else self.language_axes(position_ids)
        rows = []
        for b, real in enumerate(columns):
            positions = self.row_positions(spans[b], len(real), starts[b], seconds, input_ids.device)
            language = self.language_positions(spans[b], starts[b], positions)
            chosen_spans = [span for span in spans[b] if span.modality in self._candidate_modalities]
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

    def _only(self, rows: list[PromptRow], grids: Grids, places: list[torch.Tensor] | None) -> list[PromptRow]:
        """The rows with nothing of their videos but the tokens at these places; as they are if `None`."""
        if places is None:
            return rows
        present = {
            modality: [torch.ones(t * h * w, dtype=torch.bool) for t, h, w in own] for modality, own in grids.items()
        }
        for tokens, own in zip(present[VIDEO], places, strict=True):
            tokens.fill_(False)[own] = True
        narrowed = []
        for row in rows:
            parts = [present[span.modality][span.index] for span in _whole(row.spans, self._candidate_modalities)]
            found = _join(parts, torch.zeros(0, dtype=torch.bool)).nonzero()[:, 0]
            narrowed.append(row.only(found.to(row.columns.device)))
        return narrowed

    def _select(
        self,
        rows: list[PromptRow],
        shapes: Shapes,
        features: Features,
        queries: list[torch.Tensor],
        selection: SelectionInputs,
        sample_gate: bool | None,
        asked: AskedPrompt | None,
    ) -> tuple[list[torch.Tensor], QTSplusOutput]:
        """Per row the kept tokens `[n_b, token_width]`, and how they were chosen."""
        nothing = self.no_features(rows[0].columns.device)
        width = self.get_input_embeddings().embedding_dim
        competing = [_whole(row.spans, self._candidate_modalities) for row in rows]
        sources = [
            [features[span.modality][span.index].to(nothing.device) for span in spans] or [nothing]
            for spans in competing
        ]
        grids = [[grid for span in spans for grid in shapes[span.modality][span.index]] for spans in competing]
        scores = None
        if asked is not None:
            pairs = enumerate(zip(sources, grids, strict=True))
            scores = [partial(self.attention_relevance, asked, row, *pair, features) for row, pair in pairs]
        selected, qtsplus = self.qtsplus(
            [[part[:, :width] for part in parts] for parts in sources],
            queries,
            [row.positions[:, row.candidates] for row in rows],
            grids,
            retention=selection.retention,
            max_visual_tokens=selection.max_visual_tokens,
            selection=selection.selection,
            reencode=selection.reencode,
            sample_gate=sample_gate,
            scores=scores,
        )
        if self.token_width > width:
            triples = zip(selected, sources, qtsplus.kept_indices, strict=True)
            selected = [
                torch.cat([tokens, take_rows([part[:, width:] for part in parts], kept)], dim=1)
                for tokens, parts, kept in triples
            ]
        return selected, qtsplus

    def _splice_rows(self, input_ids, inputs_embeds, rows, features, selected, qtsplus, pad_left, starts):
        """The shortened prompt: what was no candidate, and of the candidates the kept ones."""
        nothing = self.no_features(input_ids.device)
        columns, positions = [], []
        row_features: dict[str, list[torch.Tensor]] = {name: [] for name in MODALITIES.values()}
        for row, tokens, kept_indices in zip(rows, selected, qtsplus.kept_indices, strict=True):
            keep = row.keep(kept_indices.to(row.columns.device))
            columns.append(row.columns[keep])
            positions.append(row.language_positions[:, keep])
            tokens, types = self._with_line_ends(row, keep, tokens)
            for modality, name in MODALITIES.items():
                if modality in self._candidate_modalities:
                    alone = len(self._candidate_modalities) == 1
                    row_features[name].append(tokens if alone else tokens[types == modality])
                else:
                    untouched = [features[modality][span.index] for span in row.spans if span.modality == modality]
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
        """The kept tokens `[k, d]` with the newlines that stay among them, and the modality of each."""
        is_token = torch.zeros_like(keep)
        is_token[row.candidates] = True
        competes = torch.isin(row.types, torch.tensor(self._candidate_modalities, device=keep.device))
        types, is_token = row.types[keep & competes], is_token[keep & competes].to(tokens.device)
        if len(is_token) > len(tokens):
            spread = self.line_end.to(tokens.device, tokens.dtype).expand(len(is_token), -1).clone()
            spread[is_token] = tokens
            tokens = spread
        return tokens, types.to(tokens.device)


def check_places(visual: VisualInputs, grids: Sequence[tuple[int, int, int]]) -> list[torch.Tensor] | None:
    """`video_places` as tensors on the CPU, `[k]` each; `None` without."""
    if visual.video_places is None:
        return None
    if visual.video_features is None:
        raise ValueError("Got video_places without video_features: they say which tokens the features are of.")
    if len(visual.video_places) != len(grids):
        raise ValueError(f"{len(visual.video_places)} video_places: expected one row per video ({len(grids)}).")
    checked = []
    for index, (given, (t, h, w)) in enumerate(zip(visual.video_places, grids, strict=True)):
        own = torch.as_tensor(given, device="cpu")
        fits = own.ndim == 1 and len(own) > 0 and not own.is_floating_point() and bool((own.diff() > 0).all())
        if not fits or not 0 <= int(own[0]) <= int(own[-1]) < t * h * w:
            raise ValueError(
                f"video_places {index} is {_in_short(own.tolist())}: expected some of the {t * h * w} tokens of the "
                f"grid, {t} x {h} x {w}, by their indices, ascending."
            )
        checked.append(own.long())
    return checked


def _in_short(values: Any) -> str:
    if not isinstance(values, list) or len(values) <= 8:
        return str(values)
    return f"[{', '.join(map(str, values[:3]))}, ..., {values[-1]}], {len(values)} numbers"


def _runs(places: torch.Tensor, grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """
    Places in a grid as grids of their own, in turn: (steps, 1, tokens) for each run of steps in time that have the same
    places of the frame, so that a method finds one step's tokens at the places of the step before.
    """
    _, height, width = grid
    _, counts = torch.unique_consecutive(places // (height * width), return_counts=True)
    steps = [step.tolist() for step in (places % (height * width)).split(counts.tolist())]
    return [(len(list(run)), 1, len(step)) for step, run in itertools.groupby(steps)]


def packed_rows(sign: str) -> ValueError:
    """What is said of rows that hold several sequences, as padding-free training makes them."""
    return ValueError(
        f"Got several sequences packed into one row ({sign}) together with images or videos: expected one sequence in "
        "each row, padded, since every sequence is shortened by its own question."
    )


def _restarts(position_ids: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether positions `[B, S]`, `[3, B, S]` or `[4, B, S]` begin again at 0 behind a row's first real token."""
    # Along several axes an image or video goes back too, but only the first token of a sequence to 0 on all of them.
    highest = position_ids if position_ids.ndim == 2 else position_ids.amax(0)
    return bool(((highest == 0) & mask.bool() & (mask.cumsum(-1) > 1)).any())


def _whole(spans: list[VisualSpan], modalities: Sequence[int]) -> list[VisualSpan]:
    """The first span of each image or video of these modalities."""
    return [span for span in spans if span.modality in modalities and not span.frame]


def _join(parts: list[torch.Tensor], nothing: torch.Tensor) -> torch.Tensor:
    """Concatenates; one part is not copied."""
    if not parts:
        return nothing
    return parts[0] if len(parts) == 1 else torch.cat(parts)


__all__ = ["QTSplusCompressionMixin", "packed_rows"]
