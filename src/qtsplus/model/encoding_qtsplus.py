"""Encoding images and videos in chunks, so that memory does not grow with a video beyond its features; and steps that
repeat the one before once, as in slides, screen recordings and films of fixed cameras.

At the end stands what makes the vision towers of the Qwen-VL models fast: a first layer that is one matrix product, and
in Qwen2.5-VL all windows of a layer in a few calls of attention. Without the flash-attn package, stock Transformers
calls attention once per window: about 340,000 calls for 600 frames.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention, apply_rotary_pos_emb_vision

from .configuration_qtsplus import PATCHES_PER_CHUNK
from .layout_qtsplus import QTSplusBackboneMixin
from .prompt_qtsplus import IMAGE, MODALITIES, VIDEO, Features, Grid, VisualInputs

# Few rows fill a CPU, and their memory is used again. The C library maps what is larger than 32 MB anew each time: the
# page faults, and caches that hold nothing, cost a third of the vision tower's time.
PATCHES_PER_CHUNK_ON_CPU = 2048


def encode_visual(model: QTSplusBackboneMixin, visual: VisualInputs, grids: dict[int, list[Grid]]) -> Features:
    """Per modality the features of every image and video, `[k, token_width]`; the caller's own where there are some."""
    if visual.video_features is None:
        videos = encode_modality(model, VIDEO, visual.pixel_values_videos, visual.video_grid_thw)
    else:
        videos = _checked(model, visual.video_features, grids[VIDEO])
    return {IMAGE: encode_modality(model, IMAGE, visual.pixel_values, visual.image_grid_thw), VIDEO: videos}


def encode_modality(
    model: QTSplusBackboneMixin,
    modality: int,
    pixels: torch.Tensor | None,
    grid_thw: torch.Tensor | None,
    frames_per_chunk: int | None = None,
    device: torch.device | str | None = None,
) -> list[torch.Tensor]:
    """`[k, token_width]` features of each image or video; none without pixels."""
    if pixels is None or grid_thw is None:
        return []
    patches = model.pixel_rows(grid_thw)
    distinct_steps = []
    is_new = []
    for rows, count in zip(pixels.split(patches), grid_thw[:, 0].tolist(), strict=True):
        steps = rows.unflatten(0, (count, -1))
        new = new_steps(steps)
        is_new.append(new)
        distinct_steps.append(steps if new.all() else steps[new])
    features = _encode_steps(model, modality, grid_thw, distinct_steps, frames_per_chunk, device)
    return [_repeat_steps(piece, new) for piece, new in zip(features, is_new, strict=True)]


def _repeat_steps(features: torch.Tensor, is_new: torch.Tensor) -> torch.Tensor:
    """The features of all steps of a video, from those of the steps that are new."""
    if is_new.all():
        return features
    by_step = features.unflatten(0, (int(is_new.sum()), -1))
    return by_step[is_new.cumsum(0) - 1].flatten(0, 1)


def new_steps(steps: torch.Tensor) -> torch.Tensor:
    """
    `[T]` bool, whether a step of a video, `[T, ...]` pixel values, has to be encoded: it differs from the one before.

    A step is what the vision tower sees by itself: a temporal patch (two frames) in Qwen-VL, a frame in the others. It
    learns nothing of the time, so steps of the same pixels have the same features, up to rounding.
    """
    is_new = [True]
    for before, now in pairwise(steps):
        is_new.append(not torch.equal(before, now))
    return torch.tensor(is_new)


def _encode_steps(
    model: QTSplusBackboneMixin,
    modality: int,
    grid_thw: torch.Tensor,
    steps: Sequence[torch.Tensor],
    frames_per_chunk: int | None,
    device: torch.device | str | None,
) -> list[torch.Tensor]:
    """As [`encode_modality`], of the steps of each image and video."""
    grids = []
    for own_steps, (_, height, width) in zip(steps, grid_thw.tolist(), strict=True):
        grids.append([len(own_steps), height, width])
    features = [torch.empty(0) for _ in steps]
    filled = [0 for _ in steps]  # steps of each image and video that are encoded
    for chunk in _chunks(model, grids, steps, frames_per_chunk):
        parts = []
        for index, (count, _, _) in chunk:
            first = filled[index]
            parts.append(steps[index][first : first + count].flatten(0, 1))
        grid = grid_thw.new_tensor([piece_grid for _, piece_grid in chunk])
        pixels = parts[0] if len(parts) == 1 else torch.cat(parts)  # one is not copied
        encoded = model.encode_pixels(modality, pixels.to(grid.device), grid)
        for (index, (count, _, _)), piece, part in zip(chunk, encoded, parts, strict=True):
            _check_encoded(piece, part, modality, index)
            where = device or piece.device
            if count == len(steps[index]):
                features[index] = piece.to(where)
                continue
            cells = len(piece) // count
            if not filled[index]:
                # Filled piece by piece: joining the pieces afterwards would hold them twice.
                features[index] = piece.new_empty(cells * len(steps[index]), piece.shape[-1], device=where)
            start = cells * filled[index]
            features[index][start : start + cells * count] = piece
            filled[index] += count
    return features


def _check_encoded(features: torch.Tensor, pixels: torch.Tensor, modality: int, index: int) -> None:
    """Raises `ValueError` for features that are not finite."""
    if _is_finite(features):
        return
    blame = "its pixel values"
    if _is_finite(pixels):
        blame = "its features (the weights or the dtype overflow)"
    raise ValueError(f"NaN or infinity in {blame} of {MODALITIES[modality]} {index}: expected finite ones.")


def _chunks(
    model: QTSplusBackboneMixin, grids: Sequence[list[int]], steps: Sequence[torch.Tensor], frames_per_chunk: int | None
) -> Iterable:
    if frames_per_chunk is not None:
        is_whole = not isinstance(frames_per_chunk, bool) and frames_per_chunk == int(frames_per_chunk)
        if not is_whole or frames_per_chunk < 1:
            raise ValueError(f"frames_per_chunk={frames_per_chunk!r}: expected a whole number, at least 1.")
        frames = getattr(model.config.vision_config, "temporal_patch_size", 1)
        return chunk_grids(grids, frames_per_chunk, [frames] * len(grids))
    if model.training and torch.is_grad_enabled():
        # Gradients would keep every chunk's activations, and ranks that share weights must call them equally often.
        return [list(enumerate(grids))]
    capacity = PATCHES_PER_CHUNK_ON_CPU if model.device.type == "cpu" else PATCHES_PER_CHUNK
    patches = [rows.shape[1] * model.patches_per_row for rows in steps]
    return chunk_grids(grids, capacity, patches)


def _checked(model: QTSplusBackboneMixin, given: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
    """`[k, token_width]` features of videos that the caller had encoded."""
    if len(given) != len(grids):
        raise ValueError(f"{len(given)} video_features: expected one per video ({len(grids)}).")
    dtype = model.get_input_embeddings().weight.dtype
    checked: set[int] = set()  # questions about one video share its features
    for index, (tokens, (t, h, w)) in enumerate(zip(given, grids, strict=True)):
        expected = (t * h * w, model.token_width)
        if tokens.shape != expected:
            raise ValueError(
                f"video_features {index} has shape {tuple(tokens.shape)}: expected {expected}, the merged "
                f"tokens of its grid, {t} x {h} x {w}, by the model's width."
            )
        if id(tokens) not in checked and not _is_finite(tokens):
            raise ValueError(f"NaN or infinity in video_features {index}: expected finite numbers.")
        checked.add(id(tokens))
    return [tokens.to(dtype) for tokens in given]


def chunk_grids(grids: Sequence[list[int]], capacity: int, costs: list[int]) -> Iterator[list[tuple[int, list[int]]]]:
    """
    Cuts images and videos of (time, height, width) along time, in order, into chunks of `capacity`, or of one step.
    Per chunk its pieces: the index of an image or video and the piece's own grid.

    Args:
        costs: of one step in time of each.
    """
    chunk: list[tuple[int, list[int]]] = []
    room = capacity
    for index, ((left, height, width), cost) in enumerate(zip(grids, costs, strict=True)):
        while left:
            fits = min(left, room // cost)
            if fits < 1 and chunk:
                yield chunk
                chunk = []
                room = capacity
                continue
            fits = max(fits, 1)  # a step that is larger than a chunk is one of its own
            chunk.append((index, [fits, height, width]))
            left -= fits
            room -= fits * cost
    if chunk:
        yield chunk


def _is_finite(values: torch.Tensor) -> bool:
    """By the extremes, which unlike a sum in float32 need no wider copy of 16-bit values."""
    extremes = torch.stack(values.detach().aminmax())
    return bool(extremes.isfinite().all())


# --- The towers ---


class PatchProjection(nn.Conv3d):
    """
    The vision tower's first layer, `[N, channels, time, height, width]` -> `[N, d, 1, 1, 1]`. Its kernel covers a whole
    patch, so it is one matrix product, which in bfloat16 on a CPU takes a 46th of the convolution's time. In float32 it
    stays a convolution, stock's result bit for bit. Stock's own layer becomes one: PEFT makes adapters by its class.
    """

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        if patches.dtype == torch.float32:
            return super().forward(patches)
        projected = nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return projected[..., None, None, None]


class WindowsTogether(Qwen2_5_VLVisionAttention):
    """
    Qwen2.5-VL's vision attention, whose `"sdpa"` attends in all windows of a layer together. With another
    `attn_implementation` it is stock's.

    Args:
        stock: the attention in whose place it stands, with its weights.
    """

    def __init__(self, stock: Qwen2_5_VLVisionAttention):
        with torch.device("meta"):
            super().__init__(stock.config)
        self.qkv = stock.qkv
        self.proj = stock.proj

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """`[N, d]`, and `[sequences + 1]` int32 where each sequence begins -> `[N, d]`."""
        if self.config._attn_implementation != "sdpa":
            return super().forward(hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        states = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1))
        query, key, value = states.unbind(1)
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        attended = attend_within(query, key, value, cu_seqlens)
        return self.proj(attended.flatten(1))


def attend_within(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """
    Bidirectional attention within each of many sequences that lie one behind the other, without a mask and without
    padding: `[N, heads, head_dim]` each -> the same. Sequences of one length attend as a batch.
    """
    lengths = bounds.diff()
    distinct = lengths.unique().tolist()
    if len(distinct) == 1:
        return _attend_in_batch(query, key, value, distinct[0])
    attended = torch.empty_like(query)
    for length in distinct:
        starts = bounds[:-1][lengths == length]
        rows = (starts[:, None] + torch.arange(length, device=query.device)).flatten()
        # Not `query[rows]`: on a CPU that copies number by number what this copies row by row.
        selected = _attend_in_batch(
            query.index_select(0, rows), key.index_select(0, rows), value.index_select(0, rows), length
        )
        attended.index_copy_(0, rows, selected)
    return attended


def _attend_in_batch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int) -> torch.Tensor:
    """As [`attend_within`], of sequences that all have one length."""
    query, key, value = (states.unflatten(0, (-1, length)).transpose(1, 2) for states in (query, key, value))
    attended = nn.functional.scaled_dot_product_attention(query, key, value)
    return attended.transpose(1, 2).flatten(0, 1)
