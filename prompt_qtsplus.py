"""The layout of a prompt with images and videos: where their placeholders stand, and what selection leaves of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .selector_qtsplus import QTSplusOutput

TEXT, IMAGE, VIDEO = 0, 1, 2
KINDS = {IMAGE: "image", VIDEO: "video"}
# Encoded at a time without gradients: enough rows to fill a device, and a few hundred MB of activations in bfloat16.
PATCHES_PER_CHUNK = 16384


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


@dataclass
class PromptRow:
    """
    One row of the caller's prompt without its padding, `S_b` tokens.

    `columns` `[S_b]` are the caller's; `types` `[S_b]` TEXT, IMAGE or VIDEO; `positions` `[3, S_b]` those of the full
    prompt; `candidates` `[M_b]` the tokens among which the selector chooses.
    """

    columns: torch.Tensor
    types: torch.Tensor
    spans: list[VisualSpan]
    positions: torch.Tensor
    candidates: torch.Tensor


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
        for kind, start, stop in visual_runs(types):
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


def visual_runs(types: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(kind, start, stop) of every run of placeholders."""
    bounds = [0, *((types[1:] != types[:-1]).nonzero()[:, 0] + 1).tolist(), len(types)]
    values = types[bounds[:-1]].tolist() if len(types) else []
    for value, start, stop in zip(values, bounds, bounds[1:], strict=False):
        if value != TEXT:
            yield value, start, stop


def chunk_grids(
    grids: Sequence[Sequence[int]], capacity: int, cost: Callable[[int, int], int]
) -> Iterator[list[tuple[int, list[int]]]]:
    """
    Cuts images and videos along time, in order, into chunks of bounded cost.

    Args:
        grids: (time, height, width) in patches of each.
        capacity: the most that a chunk may cost; a temporal patch that costs more is a chunk by itself.
        cost: of one temporal patch, from its height and width.

    Returns:
        per chunk its pieces, each the index of an image or video and the piece's own grid.
    """
    chunk: list[tuple[int, list[int]]] = []
    room = capacity
    for index, (left, height, width) in enumerate(grids):
        while left:
            fits = min(left, max(room // cost(height, width), 0 if chunk else 1))
            if not fits:
                yield chunk
                chunk, room = [], capacity
                continue
            chunk.append((index, [fits, height, width]))
            left, room = left - fits, room - fits * cost(height, width)
    if chunk:
        yield chunk


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


@dataclass
class SelectedFeatures(BaseModelOutputWithPooling):
    """Features that [`QTSplusModelMixin.compress`] has selected; `pooler_output` has `[k_b, d]` for each row."""
