"""The layout of a prompt: where its question, its images and its videos stand, and what selection leaves of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .selector_qtsplus import QTSplusOutput

TEXT, IMAGE, VIDEO = 0, 1, 2
MODALITIES = {IMAGE: "image", VIDEO: "video"}

# --------------------------------------------------------------------------------------------------------------------
# The question
# --------------------------------------------------------------------------------------------------------------------


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

    Args:
        input_ids: `[B, S]` token ids of prompts made with the chat template.
        attention_mask: `[B, S]`, 1 on real tokens, or `None`.
        user_turn_token_ids: the ids that open a user's turn; the one token after them (the line break) is skipped.
        turn_end_token_id: the id that closes a turn.
        special_token_ids: ids that are never part of a question.
        video_token_id, frame_text_token_ids: the placeholder of a video, and the ids that open the text which some
            backbones write in front of every frame ("Frame1: ", "<0.5 seconds>"); it is no part of a question either.

    Returns:
        `[B, S]` int64, 1 on the question's tokens. A row without a user turn is all 0.
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


# --------------------------------------------------------------------------------------------------------------------
# Images and videos
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class VisualSpan:
    """
    The placeholders of one image or video, or of one frame of it: `length` of a row's real tokens from `start` on.

    Most stand for a token of the encoder. With `line`, a separator (a newline) follows after every `line` of those.
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

    `columns` `[S_b]` are the caller's; `types` `[S_b]` TEXT, IMAGE or VIDEO; `positions` `[3, S_b]` (time, height,
    width) in the full prompt, and `language_positions` `[1 or 3, S_b]` what the language model takes for them;
    `candidates` `[M_b]` the tokens among which the selector chooses. `separators` `[3, K]` are tokens that are never
    scored and go with others: a token, and the first and last + 1 of the candidates of which one has to be kept for it
    to stay.
    """

    columns: torch.Tensor
    types: torch.Tensor
    spans: list[VisualSpan]
    positions: torch.Tensor
    language_positions: torch.Tensor
    candidates: torch.Tensor
    separators: torch.Tensor

    def keep(self, kept_indices: torch.Tensor) -> torch.Tensor:
        """`[S_b]` bool: the tokens that stay when these of the candidates do."""
        kept = torch.zeros(len(self.candidates) + 1, dtype=torch.long, device=self.columns.device)
        kept[kept_indices + 1] = 1
        keep = torch.ones_like(self.columns, dtype=torch.bool)
        keep[self.candidates] = kept[1:].bool()
        separators, first, stop = self.separators
        so_far = kept.cumsum(0)
        keep[separators] = so_far[stop] > so_far[first]
        return keep

    def only(self, present: torch.Tensor) -> "PromptRow":
        """The row without the candidates that are not among `present` `[k]`, and without what goes with them."""
        keep = self.keep(present)
        place = keep.cumsum(0) - 1
        is_present = torch.zeros(len(self.candidates) + 1, dtype=torch.long, device=keep.device)
        is_present[present + 1] = 1
        separators, first, stop = self.separators[:, keep[self.separators[0]]]
        so_far = is_present.cumsum(0)
        return replace(
            self,
            columns=self.columns[keep],
            types=self.types[keep],
            positions=self.positions[:, keep],
            language_positions=self.language_positions[:, keep],
            candidates=place[self.candidates[present]],
            separators=torch.stack([place[separators], so_far[first], so_far[stop]]),
        )


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
    token_types: Sequence[torch.Tensor], unplaced: Mapping[int, Sequence[VisualSpan]]
) -> list[list[VisualSpan]]:
    """
    Pairs the placeholders of every row with the images and videos of the batch, in order.

    Args:
        token_types: per row `[S_b]`, TEXT, IMAGE or VIDEO for each real token.
        unplaced: per modality the spans of all images or videos of the batch, whose `start` is still to be found.

    Returns:
        per row its spans, in the order of their placeholders.

    Raises:
        ValueError: the placeholders do not add up to the spans.
    """
    given = {modality: len({span.index for span in spans}) for modality, spans in unplaced.items()}
    queues = {modality: iter(spans) for modality, spans in unplaced.items()}
    rows = []
    for row, types in enumerate(token_types):
        spans: list[VisualSpan] = []
        for modality, start, stop in visual_runs(types):
            while start < stop:
                span = next(queues[modality], VisualSpan(modality, -1, 0, (0, 0, 0)))
                begun = not span.frame or any(
                    before.modality == modality and before.index == span.index for before in spans[-1:]
                )
                if span.index < 0 or start + span.length > stop or not begun:
                    raise ValueError(_mismatch(row, modality, stop - start, span, given[modality]))
                spans.append(replace(span, start=start))
                start += span.length
        rows.append(spans)
    for modality, queue in queues.items():
        left = len({span.index for span in queue})
        if left:
            name = MODALITIES[modality]
            raise ValueError(
                f"{given[modality]} {name}s were given, but the prompts have placeholders for only "
                f"{given[modality] - left}: give one block of placeholders per {name}, as the processor does."
            )
    return rows


def find_separators(spans: Sequence[VisualSpan], length: int) -> torch.Tensor:
    """
    The tokens of a row that go unless something is kept of what they end or announce, `[3, K]` as in [`PromptRow`].

    A newline goes with its line. From its second frame on, a frame that is a span by itself goes with the text in front
    of it and the one token behind it; the first frame's text is the prompt's own and stays, for it has no beginning
    that could be told from the question.

    Args:
        spans: those among whose tokens the selector chooses.
        length: tokens of the row.
    """
    found = [torch.zeros(3, 0, dtype=torch.long)]
    first, before = 0, None
    for span in spans:
        if span.line:
            ends, lines = span.line_ends(), first + torch.arange(span.tokens // span.line) * span.line
            found.append(torch.stack([ends, lines, lines + span.line]))
        if span.frame and before is not None:
            stop = span.start + span.length
            text = [*range(before.start + before.length + 1, span.start), *range(stop, min(stop + 1, length))]
            found.append(torch.tensor([text, [first] * len(text), [first + span.tokens] * len(text)]))
        first, before = first + span.tokens, span
    return torch.cat(found, dim=1)


def visual_runs(types: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(modality, start, stop) of every run of placeholders."""
    bounds = [0, *((types[1:] != types[:-1]).nonzero()[:, 0] + 1).tolist(), len(types)]
    values = types[bounds[:-1]].tolist() if len(types) else []
    for value, start, stop in zip(values, bounds, bounds[1:], strict=False):
        if value != TEXT:
            yield value, start, stop


def _mismatch(row: int, modality: int, found: int, span: VisualSpan, given: int) -> str:
    name = MODALITIES[modality]
    if span.index < 0:
        expected = f"only {given} {name}(s) were given"
    else:
        t, h, w = span.grid
        newlines = f" and {span.length - span.tokens} newlines" if span.line else ""
        expected = f"{name} {span.index} has {t} x {h} x {w} = {span.tokens} tokens{newlines}"
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


@dataclass
class SelectedFeatures(BaseModelOutputWithPooling):
    """Features that [`QTSplusModelMixin.compress`] has selected; `pooler_output` has `[k_b, d]` for each row."""

    pooler_output: Any = None
