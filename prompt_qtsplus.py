"""A call as data: what it brings, where its question, images and videos stand in the prompt, and what selection leaves.
layout_qtsplus.py fills these from the hooks of a backbone.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling

from .methods_qtsplus import Method
from .selector_qtsplus import QTSplusOutput

T = TypeVar("T", bound=Callable[..., Any])

TEXT, IMAGE, VIDEO = 0, 1, 2
MODALITIES = {IMAGE: "image", VIDEO: "video"}

Grid = tuple[int, int, int]  # (time, height, width)

# As Transformers names the key/value cache in calls and outputs: `cache` since 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"

# --- What a call brings beside its text ---
# Each of these arguments is named here alone: `forward` and `generate` take them as keywords, and hand them on.


@dataclass
class VisualInputs:
    """Images and videos, as the processor returns them."""

    pixel_values: torch.Tensor | None = None  # of all images
    image_grid_thw: torch.Tensor | None = None  # [images, 3]
    pixel_values_videos: torch.Tensor | None = None  # of all videos
    video_grid_thw: torch.Tensor | None = None  # [videos, 3]
    second_per_grid_ts: torch.Tensor | Sequence[float] | None = None  # [videos], seconds per temporal patch
    # Per video [k, d], as `encode_videos` returns them, in place of its pixels; on any device.
    video_features: Sequence[torch.Tensor] | None = None

    @property
    def given(self) -> bool:
        """Whether there is anything to look at."""
        return any(values is not None for values in (self.pixel_values, self.pixel_values_videos, self.video_features))


@dataclass
class SelectionInputs:
    """How one call selects; what is left out is as the configuration has it."""

    query_mask: torch.Tensor | None = None  # [B, S], 1 on the question's tokens; found in `input_ids` if None
    query_input_ids: torch.Tensor | None = None  # [B, L], a question that does not stand in the prompt
    query_attention_mask: torch.Tensor | None = None  # [B, L]
    retention: float | Sequence[float] | None = None  # the fraction to keep, in (0, 1]; for all rows, or for each
    max_visual_tokens: int | None = None  # the most tokens to keep
    selection: str | Method | None = None  # a name of `methods_qtsplus.METHODS`, or a function like those
    reencode: bool = True  # False hands the kept tokens on as they are (the paper's nREENC)


# Read once: a `forward` that is compiled cannot ask a dataclass for its fields.
_VISUAL, _SELECTION = (tuple(field.name for field in fields(kind)) for kind in (VisualInputs, SelectionInputs))
NAMES = _VISUAL + _SELECTION


def take_inputs(kwargs: dict[str, Any]) -> tuple[VisualInputs, SelectionInputs]:
    """Takes the arguments that are named here out of a call's `kwargs`."""
    visual = {name: kwargs.pop(name) for name in _VISUAL if name in kwargs}
    selection = {name: kwargs.pop(name) for name in _SELECTION if name in kwargs}
    return VisualInputs(**visual), SelectionInputs(**selection)


def take_cache(kwargs: dict[str, Any]) -> Cache | None:
    """Takes the key/value cache, by its old name or its new one, out of the keywords of a call."""
    given = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
    return next((cache for cache in given if cache is not None), None)


def names_inputs(forward: T) -> T:
    """
    Puts the arguments that are named here into the signature of a `forward` that takes them as `**kwargs`. What the
    signature does not name, the Trainer drops from a batch, and `generate` refuses.
    """
    signature = inspect.signature(forward)
    *stock, rest = signature.parameters.values()
    named = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for kind in (VisualInputs, SelectionInputs)
        for field in fields(kind)
    ]
    forward.__signature__ = signature.replace(parameters=[*stock, *named, rest])  # type: ignore[attr-defined]
    return forward


# --- The question ---


def find_query_mask(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    user_turn_token_ids: list[int],
    turn_end_token_id: int,
    special_token_ids: list[int],
    video_token_id: int | None = None,
    frame_text_token_ids: list[int] | tuple[int, ...] = (),
) -> torch.Tensor:
    """
    Marks the question in a chat prompt: the text of the last user turn, without its header, special and vision tokens.
    `[B, S]` int64, 1 on the question's tokens; a row without a user turn is all 0.

    Args:
        input_ids, attention_mask: `[B, S]`, of prompts made with the chat template.
        user_turn_token_ids: the ids that open a user's turn; the one token after them (the line break) is skipped.
        turn_end_token_id: the id that closes a turn.
        special_token_ids: ids that are never part of a question.
        video_token_id, frame_text_token_ids: the placeholder of a video, and the ids that open the text in front of
            every frame ("Frame1: ", "<0.5 seconds>"), which is no part of a question either.
    """
    special = torch.tensor(special_token_ids, device=input_ids.device)
    eligible = ~torch.isin(input_ids, special)
    if attention_mask is not None:
        eligible &= attention_mask.bool()

    header = torch.tensor(user_turn_token_ids, device=input_ids.device)
    mask = torch.zeros_like(input_ids)
    if input_ids.shape[1] < len(header):
        return mask
    opens = (input_ids.unfold(1, len(header), 1) == header).all(-1)
    for row in range(input_ids.shape[0]):
        starts = opens[row].nonzero()
        if len(starts) == 0:
            continue
        start = int(starts[-1]) + len(header) + 1
        ends = (input_ids[row, start:] == turn_end_token_id).nonzero()
        stop = start + int(ends[0]) if len(ends) else input_ids.shape[1]
        mask[row, start:stop] = eligible[row, start:stop].long()
        if frame_text_token_ids:
            ids = input_ids[row, start:stop].tolist()
            for first, last in _frame_texts(ids, video_token_id, frame_text_token_ids):
                mask[row, start + first : start + last] = 0
    return mask


def _frame_texts(ids: list[int], video_token_id: int | None, openers, longest: int = 16):
    """(start, stop) of the text in front of every frame; it ends with the one token that opens the frame's tokens."""
    frames = [i for i in range(1, len(ids)) if ids[i] == video_token_id != ids[i - 1]]
    for frame in frames:
        start = next((i for i in range(frame - 1, max(frame - longest, 0) - 1, -1) if ids[i] in openers), frame)
        if start < frame and video_token_id in ids[max(start - 3, 0) : start]:
            start -= 1  # the line break behind the frame before, or the token that closes it
        yield start, frame


def given_queries(selection: SelectionInputs, rows: int) -> list[torch.Tensor] | None:
    """Per row the ids of a question that does not stand in the prompt."""
    ids, mask = selection.query_input_ids, selection.query_attention_mask
    if ids is None:
        return None
    if len(ids) != rows:
        raise ValueError(f"{len(ids)} rows of query_input_ids: expected one per prompt ({rows}).")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"query_attention_mask {tuple(mask.shape)}: expected query_input_ids' shape, {tuple(ids.shape)}."
        )
    return list(ids) if mask is None else [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]


def tokenize_query(tokenizer: Any, query: str | list[str], rows: int | None, like: Any) -> dict[str, Any]:
    queries = [query] * (rows or 1) if isinstance(query, str) else list(query)
    if rows is not None and len(queries) != rows:
        raise ValueError(f"Got {len(queries)} queries for {rows} rows of text; expected one per row, or a str.")
    tokens = tokenizer(queries, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for row, ids in enumerate(tokens):
        if not ids or not queries[row].strip():
            raise ValueError(f"The query {queries[row]!r} of row {row} has no token; expected a question.")
    length = max(map(len, tokens))
    padded = {
        "query_input_ids": [ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids in tokens],
        "query_attention_mask": [[1] * len(ids) + [0] * (length - len(ids)) for ids in tokens],
    }
    return {name: torch.tensor(values) for name, values in padded.items()} if torch.is_tensor(like) else padded


# --- Images and videos ---


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


@dataclass
class PromptRow:
    """
    One row of the caller's prompt without its padding, `S_b` tokens.

    Separators are tokens that are never scored and go with others: a token, and the first and last + 1 of the
    candidates of which one has to be kept for it to stay.
    """

    columns: torch.Tensor  # [S_b], the caller's
    types: torch.Tensor  # [S_b], TEXT, IMAGE or VIDEO
    spans: list[VisualSpan]
    positions: torch.Tensor  # [3, S_b], (time, height, width) in the full prompt
    language_positions: torch.Tensor  # [1 or 3, S_b], what the language model takes for them
    candidates: torch.Tensor  # [M_b], the tokens among which the selector chooses
    separators: torch.Tensor  # [3, K]

    def _counts_before(self, kept_indices: torch.Tensor) -> torch.Tensor:
        """`[M_b + 1]`: how many of these candidates stand in front of each, and of the end."""
        is_kept = torch.zeros(len(self.candidates) + 1, dtype=torch.long, device=self.columns.device)
        is_kept[kept_indices + 1] = 1
        return is_kept.cumsum(0)

    def keep(self, kept_indices: torch.Tensor) -> torch.Tensor:
        """`[S_b]` bool: the tokens that stay when these of the candidates do."""
        before, (separators, first, stop) = self._counts_before(kept_indices), self.separators
        keep = torch.ones_like(self.columns, dtype=torch.bool)
        keep[self.candidates] = before.diff().bool()
        keep[separators] = before[stop] > before[first]
        return keep

    def only(self, present: torch.Tensor) -> "PromptRow":
        """The row without the candidates that are not among `present` `[k]`, and without what goes with them."""
        keep, before = self.keep(present), self._counts_before(present)
        place = keep.cumsum(0) - 1
        separators, first, stop = self.separators[:, keep[self.separators[0]]]
        return replace(
            self,
            columns=self.columns[keep],
            types=self.types[keep],
            positions=self.positions[:, keep],
            language_positions=self.language_positions[:, keep],
            candidates=place[self.candidates[present]],
            separators=torch.stack([place[separators], before[first], before[stop]]),
        )


@dataclass
class Layout:
    """The prompts of a batch: which token is whose, and where it stands."""

    input_ids: torch.Tensor  # [B, S]
    mask: torch.Tensor  # [B, S], 1 on real tokens
    rows: list[PromptRow]  # without their padding
    starts: list[int]  # per row, the position of its first token
    grids: dict[int, list[Grid]]  # per modality, in tokens of every image or video of the batch
    seconds: Any  # per video, seconds per temporal patch
    modalities: tuple[int, ...]  # whose tokens compete
    present: list[torch.Tensor] | None = None  # per video [k], ascending, which of its tokens are there; all if `None`

    def competing(self, row: PromptRow) -> list[VisualSpan]:
        """The first span of each image or video whose tokens compete for the budget of a row."""
        return [span for span in row.spans if span.modality in self.modalities and not span.frame]

    def grids_of(self, span: VisualSpan) -> list[Grid]:
        """
        The grid of an image or video; of a part of one in turn (steps, 1, tokens) for each run of steps in time that
        have the same places of the frame.
        """
        grid = self.grids[span.modality][span.index]
        if self.present is None or span.modality == IMAGE:
            return [grid]
        _, height, width = grid
        tokens = self.present[span.index]
        _, counts = torch.unique_consecutive(tokens // (height * width), return_counts=True)
        steps = [step.tolist() for step in (tokens % (height * width)).split(counts.tolist())]
        return [(len(list(run)), 1, len(step)) for step, run in itertools.groupby(steps)]

    def narrow(self, present: Sequence[torch.Tensor]) -> "Layout":
        """As if of each video only the tokens `present` `[k]`, ascending, had been kept; they stay at their places."""
        flags = {
            modality: [torch.ones(t * h * w, dtype=torch.bool) for t, h, w in grids]
            for modality, grids in self.grids.items()
        }
        for flag, indices in zip(flags[VIDEO], present, strict=True):
            flag.fill_(False)[indices] = True
        rows = []
        for row in self.rows:
            parts = [flags[span.modality][span.index] for span in self.competing(row)]
            left = join(parts, torch.zeros(0, dtype=torch.bool)).nonzero()[:, 0]
            rows.append(row.only(left.to(row.columns.device)))
        return replace(self, rows=rows, present=list(present))


@dataclass
class CompactPrompt:
    """What the language model sees, `[B, S']`."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    features: dict[str, list[torch.Tensor]]  # "image" and "video": per row [k, d], in place of its placeholders
    columns: torch.Tensor  # the caller's column behind each column here, -1 on padding
    next_position: torch.Tensor  # [B], the first one after the prompt
    source_ids: torch.Tensor  # [B, S], the caller's prompt
    source_mask: torch.Tensor
    counts: dict[int, list[int]]  # per modality and row, its images and videos
    qtsplus: QTSplusOutput

    @property
    def selected(self) -> "dict[str, SelectedFeatures]":
        """The features as `mm_encoder_outputs`."""
        return {name: SelectedFeatures(pooler_output=tuple(rows)) for name, rows in self.features.items()}


def find_spans(
    token_types: Sequence[torch.Tensor], unplaced: Mapping[int, Sequence[VisualSpan]]
) -> list[list[VisualSpan]]:
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
        spans: list[VisualSpan] = []
        for modality, start, stop in visual_runs(types):
            while start < stop:
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


def visual_runs(types: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(modality, start, stop) of every run of placeholders."""
    bounds = [0, *((types[1:] != types[:-1]).nonzero()[:, 0] + 1).tolist(), len(types)]
    values = types[bounds[:-1]].tolist() if len(types) else []
    for value, start, stop in zip(values, bounds, bounds[1:], strict=False):
        if value != TEXT:
            yield value, start, stop


def _mismatch(row: int, modality: int, placeholders: int, span: VisualSpan, count: int) -> str:
    name = MODALITIES[modality]
    if span.index < 0:
        expected = f"only {count} {name}(s) were given"
    else:
        t, h, w = span.grid
        newlines = f" and {span.length - span.tokens} newlines" if span.line else ""
        expected = f"{name} {span.index} has {t} x {h} x {w} = {span.tokens} tokens{newlines}"
    return (
        f"Row {row}: {placeholders} {name} placeholder(s) in a row, but {expected}. Make input_ids and "
        f"{name}_grid_thw with the same processor call, and give every one of them its pixels."
    )


def full_mask(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """`[B, S]`, 1 on real tokens: the caller's `attention_mask`, checked; all real if `None`."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(mask.shape)}: expected input_ids' shape, {tuple(input_ids.shape)}.")
    return mask


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


def join(parts: list[torch.Tensor], nothing: torch.Tensor) -> torch.Tensor:
    """Concatenates; one part is not copied."""
    if not parts:
        return nothing
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def alone_with_ids() -> ValueError:
    """What is said of images or videos beside something in place of a prompt's ids."""
    return ValueError("Images and videos come with input_ids alone: leave out inputs_embeds and mm_encoder_outputs.")


def restarts(position_ids: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether positions `[B, S]`, `[3, B, S]` or `[4, B, S]` begin again at 0 behind a row's first real token."""
    # Along several axes an image or video goes back too, but only the first token of a sequence to 0 on all of them.
    highest = position_ids if position_ids.ndim == 2 else position_ids.amax(0)
    return bool(((highest == 0) & mask.bool() & (mask.cumsum(-1) > 1)).any())


@dataclass
class SelectedFeatures(BaseModelOutputWithPooling):
    """Features that [`QTSplusModelMixin.compress`] has selected; `pooler_output` has `[k_b, d]` for each row."""

    pooler_output: Any = None
