"""The layout of a prompt with images and videos: where their placeholders stand, and what selection leaves of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .selector_qtsplus import QTSplusOutput

TEXT, IMAGE, VIDEO = 0, 1, 2
KINDS = {IMAGE: "image", VIDEO: "video"}
# Encoded at a time without gradients: enough rows to fill a GPU, and a few hundred MB of activations in bfloat16.
PATCHES_PER_CHUNK = 16384
# Few rows fill a CPU, and their memory is used again. The C library maps what is larger than 32 MB anew each time: the
# page faults, and caches that hold nothing, cost a third of the vision tower's time.
PATCHES_PER_CHUNK_ON_CPU = 2048


@dataclass
class VisualSpan:
    """
    The placeholders of one image or video, or of one frame of it: `length` of a row's real tokens from `start` on.

    Most stand for a token of the encoder. With `line`, a separator (a newline) follows after every `line` of those.
    """

    kind: int
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
    token_types: Sequence[torch.Tensor],
    grids: dict[int, list[tuple[int, int, int]]],
    frames_apart: bool = False,
    line_length: Callable[[int, tuple[int, int, int]], int] | None = None,
) -> list[list[VisualSpan]]:
    """
    Pairs the placeholders of every row with the images and videos of the batch, in order.

    Args:
        token_types: per row `[S_b]`, TEXT, IMAGE or VIDEO for each real token.
        grids: per kind, (time, height, width) in tokens of every image or video of the batch.
        frames_apart: text stands between the frames of a video; each is a span by itself.
        line_length: from kind and grid, the `line` of a [`VisualSpan`].

    Raises:
        ValueError: the placeholders do not add up to the grids.
    """

    def pieces(kind):
        for index, (t, h, w) in enumerate(grids[kind]):
            line = 0 if line_length is None else line_length(kind, (t, h, w))
            if frames_apart and kind == VIDEO:
                yield from (VisualSpan(kind, index, 0, (1, h, w), frame, line) for frame in range(t))
            else:
                yield VisualSpan(kind, index, 0, (t, h, w), line=line)

    queues = {kind: pieces(kind) for kind in KINDS}
    rows = []
    for row, types in enumerate(token_types):
        spans: list[VisualSpan] = []
        for kind, start, stop in visual_runs(types):
            while start < stop:
                span = next(queues[kind], VisualSpan(kind, -1, start, (0, 0, 0)))
                span.start = start
                begun = not span.frame or any(other.kind == kind and other.index == span.index for other in spans[-1:])
                if span.index < 0 or start + span.length > stop or not begun:
                    raise ValueError(_mismatch(row, kind, stop - start, span, len(grids[kind])))
                spans.append(span)
                start += span.length
        rows.append(spans)
    for kind, queue in queues.items():
        left = len({span.index for span in queue})
        if left:
            raise ValueError(
                f"{len(grids[kind])} {KINDS[kind]}s were given, but the prompts have placeholders for only "
                f"{len(grids[kind]) - left}: give one block of placeholders per {KINDS[kind]}, as the processor does."
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
    """(kind, start, stop) of every run of placeholders."""
    bounds = [0, *((types[1:] != types[:-1]).nonzero()[:, 0] + 1).tolist(), len(types)]
    values = types[bounds[:-1]].tolist() if len(types) else []
    for value, start, stop in zip(values, bounds, bounds[1:], strict=False):
        if value != TEXT:
            yield value, start, stop


def chunk_grids(
    grids: Sequence[Sequence[int]], capacity: int, costs: Sequence[int]
) -> Iterator[list[tuple[int, list[int]]]]:
    """
    Cuts images and videos along time, in order, into chunks of bounded cost.

    Args:
        grids: (time, height, width) of each.
        capacity: the most that a chunk may cost; a step in time that costs more is a chunk by itself.
        costs: of one step in time of each.

    Returns:
        per chunk its pieces, each the index of an image or video and the piece's own grid.
    """
    chunk: list[tuple[int, list[int]]] = []
    room = capacity
    for index, ((left, height, width), cost) in enumerate(zip(grids, costs, strict=True)):
        while left:
            fits = min(left, max(room // cost, 0 if chunk else 1))
            if not fits:
                yield chunk
                chunk, room = [], capacity
                continue
            chunk.append((index, [fits, height, width]))
            left, room = left - fits, room - fits * cost
    if chunk:
        yield chunk


def _mismatch(row: int, kind: int, found: int, span: VisualSpan, given: int) -> str:
    name = KINDS[kind]
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
