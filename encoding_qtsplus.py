"""Encoding images and videos in chunks, so that memory does not grow with a video beyond its features; and steps that
repeat the one before once, as in slides, screen recordings and films of fixed cameras.

At the end stands what makes the vision towers of the Qwen-VL models fast: a first layer that is one matrix product, and
in Qwen2.5-VL all windows of a layer in a few calls of attention. Without the flash-attn package, stock Transformers
calls attention once per window: about 340,000 calls for 600 frames.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
)

from .configuration_qtsplus import PATCHES_PER_CHUNK
from .layout_qtsplus import QTSplusBackboneMixin
from .methods_qtsplus import is_number
from .prompt_qtsplus import IMAGE, MODALITIES, VIDEO, Features, Grid, VisualInputs, join

# Few rows fill a CPU, and their memory is used again. The C library maps what is larger than 32 MB anew each time: the
# page faults, and caches that hold nothing, cost a third of the vision tower's time.
PATCHES_PER_CHUNK_ON_CPU = 2048


class Repeats:
    """
    What was encoded last, for the steps that come behind it.

    A step is what the vision tower sees by itself: a temporal patch (two frames) in Qwen-VL, a frame in the others. It
    learns nothing of the time, so steps of the same pixels have the same features, up to rounding.

    Args:
        tolerance: the most by which a pixel value of a step may differ from the one that was encoded last, for its
            features to be taken: in normalised values, where one of the 255 levels of a colour is about 0.015 (0.008
            with Qwen3-VL). 0 takes only those of equal steps; `None` encodes every step.

    Raises:
        ValueError: a tolerance below 0.
    """

    def __init__(self, tolerance: float | None = 0.0):
        if tolerance is not None and not (is_number(tolerance) and tolerance >= 0):
            raise ValueError(f"tolerance={tolerance!r}: expected 0 or more, or None to encode every step.")
        self.tolerance = tolerance
        self._size: list[int] = []
        self.pixels: torch.Tensor | None = None
        self._features = torch.empty(0)

    def sources(self, steps: torch.Tensor, size: list[int]) -> list[int]:
        """
        Which step has to be encoded for each step of a video: itself, one before it, or -1 for what was encoded last.

        Args:
            steps: `[T, ...]`, the pixel values.
            size: (height, width) of the video's grid.
        """
        tolerance = self.tolerance
        if tolerance is None:
            return list(range(len(steps)))
        if size != self._size:
            self._size, self.pixels = size, None
        sources: list[int] = []
        for index, step in enumerate(steps):
            last = self.pixels
            if last is not None and (
                bool((step - last).abs().max() <= tolerance) if tolerance else torch.equal(step, last)
            ):
                sources.append(sources[-1] if sources else -1)
            else:
                sources.append(index)
                self.pixels = step
        return sources

    def fill(self, features: torch.Tensor | None, sources: list[int]) -> torch.Tensor:
        """
        `[T * k, d]`: every step of a video with the features of its source.

        Args:
            features: `[T * k, d]`, right for the steps that are their own source, and written to; `None` where none is.
        """
        if features is None:  # all repeat what was encoded last
            return self._features.repeat(len(sources), 1)
        steps = features.unflatten(0, (len(sources), -1))
        for index, source in enumerate(sources):  # one by one: all at once would hold them twice
            if source != index:
                steps[index] = self._features if source < 0 else steps[source]
        self._features = steps[-1].clone()
        return features


def encode_visual(model: QTSplusBackboneMixin, visual: VisualInputs, grids: dict[int, list[Grid]]) -> Features:
    """Per modality the features of every image and video, `[k, token_width]`; the caller's own where there are some."""
    if visual.video_features is None:
        videos = encode_modality(model, VIDEO, visual.pixel_values_videos, visual.video_grid_thw)
    else:
        videos = _check_features(model, visual.video_features, grids[VIDEO])
    return {IMAGE: encode_modality(model, IMAGE, visual.pixel_values, visual.image_grid_thw), VIDEO: videos}


def encode_modality(
    model: QTSplusBackboneMixin,
    modality: int,
    pixels: torch.Tensor | None,
    grid_thw: torch.Tensor | None,
    frames_per_chunk: int | None = None,
    device: torch.device | str | None = None,
    repeats: Repeats | None = None,
) -> list[torch.Tensor]:
    """`[k, token_width]` features of each image or video; none without pixels."""
    if pixels is None or grid_thw is None:
        return []
    if repeats is None:
        repeats = Repeats(None if modality == IMAGE else 0.0)
    grids, patches = grid_thw.tolist(), model.pixel_rows(grid_thw)
    steps = [rows.unflatten(0, (t, -1)) for rows, (t, _, _) in zip(pixels.split(patches), grids, strict=True)]
    sources = [repeats.sources(video, size) for video, (_, *size) in zip(steps, grids, strict=True)]
    last, repeats.pixels = repeats.pixels, None  # if encoding fails, they have no features
    features = _encode_sources(model, modality, grid_thw, steps, sources, frames_per_chunk, device)
    repeats.pixels = None if last is None else last.clone()
    return [repeats.fill(features.get(index), video) for index, video in enumerate(sources)]


def _encode_sources(
    model: QTSplusBackboneMixin,
    modality: int,
    grid_thw: torch.Tensor,
    steps: Sequence[torch.Tensor],
    sources: Sequence[list[int]],
    frames_per_chunk: int | None,
    device: torch.device | str | None,
) -> dict[int, torch.Tensor]:
    """Features of the images and videos that have steps of their own to encode; those of other steps are empty."""
    waiting = [[index for index, source in enumerate(video) if source == index] for video in sources]
    grid_waiting = grid_thw.clone()
    grid_waiting[:, 0] = grid_thw.new_tensor([len(video) for video in waiting])
    features: dict[int, torch.Tensor] = {}
    for chunk in _chunks(model, grid_waiting, steps, frames_per_chunk):
        chosen, parts = [], []
        for index, (count, _, _) in chunk:
            numbers, waiting[index] = waiting[index][:count], waiting[index][count:]
            whole = len(numbers) == len(steps[index])
            chosen.append((index, numbers))
            parts.append((steps[index] if whole else steps[index][numbers]).flatten(0, 1))
        grid = grid_thw.new_tensor([piece for _, piece in chunk])
        encoded = model.encode_pixels(modality, join(parts, parts[0]).to(grid.device), grid)
        for (index, numbers), piece, part in zip(chosen, encoded, parts, strict=True):
            if not _is_finite(piece):
                blame = "its features (the weights or the dtype overflow)" if _is_finite(part) else "its pixel values"
                raise ValueError(
                    f"NaN or infinity in {blame} of {MODALITIES[modality]} {index}: expected finite numbers."
                )
            if len(numbers) == len(sources[index]):
                features[index] = piece.to(device or piece.device)
                continue
            if index not in features:
                # Filled piece by piece: joining the pieces afterwards would hold them twice.
                length = len(piece) // len(numbers) * len(sources[index])
                features[index] = piece.new_empty(length, piece.shape[-1], device=device or piece.device)
            filled = features[index].unflatten(0, (len(sources[index]), -1))
            filled[numbers] = piece.unflatten(0, (len(numbers), -1)).to(filled.device)
    return features


def _chunks(
    model: QTSplusBackboneMixin, grid_thw: torch.Tensor, steps: Sequence[torch.Tensor], frames_per_chunk: int | None
) -> Iterable:
    grids = grid_thw.tolist()
    if frames_per_chunk is not None:
        if isinstance(frames_per_chunk, bool) or frames_per_chunk != int(frames_per_chunk) or frames_per_chunk < 1:
            raise ValueError(f"frames_per_chunk={frames_per_chunk!r}: expected a whole number, at least 1.")
        frames = getattr(model.config.vision_config, "temporal_patch_size", 1)
        return chunk_grids(grids, frames_per_chunk, [frames] * len(grids))
    if model.training and torch.is_grad_enabled():
        # Gradients would keep every chunk's activations, and ranks that share weights must call them equally often.
        return [[(index, grid) for index, grid in enumerate(grids) if grid[0]]]
    capacity = PATCHES_PER_CHUNK_ON_CPU if model.device.type == "cpu" else PATCHES_PER_CHUNK
    patches = [rows.shape[1] * model.patches_per_row for rows in steps]
    return chunk_grids(grids, capacity, patches)


def _check_features(
    model: QTSplusBackboneMixin, features: Sequence[torch.Tensor], grids: Sequence[Grid]
) -> list[torch.Tensor]:
    """`[k, token_width]` features of videos that the caller had encoded."""
    if len(features) != len(grids):
        raise ValueError(f"{len(features)} video_features: expected one per video ({len(grids)}).")
    dtype, width = model.get_input_embeddings().weight.dtype, model.token_width
    checked: set[int] = set()  # questions about one video share its features
    for index, (tokens, (t, h, w)) in enumerate(zip(features, grids, strict=True)):
        if tokens.shape != (t * h * w, width):
            raise ValueError(
                f"video_features {index} has shape {tuple(tokens.shape)}: expected {(t * h * w, width)}, the merged "
                f"tokens of its grid, {t} x {h} x {w}, by the model's width."
            )
        if id(tokens) not in checked and not _is_finite(tokens):
            raise ValueError(f"NaN or infinity in video_features {index}: expected finite numbers.")
        checked.add(id(tokens))
    return [tokens.to(dtype) for tokens in features]


def chunk_grids(
    grids: Sequence[Sequence[int]], capacity: int, costs: Sequence[int]
) -> Iterator[list[tuple[int, list[int]]]]:
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
            fits = min(left, max(room // cost, 0 if chunk else 1))
            if not fits:
                yield chunk
                chunk, room = [], capacity
                continue
            chunk.append((index, [fits, height, width]))
            left, room = left - fits, room - fits * cost
    if chunk:
        yield chunk


def _is_finite(values: torch.Tensor) -> bool:
    """By the extremes, which unlike a sum in float32 need no wider copy of 16-bit values."""
    return bool(torch.stack(values.detach().aminmax()).isfinite().all())


# --- The towers ---


class PatchProjection(nn.Conv3d):
    """
    The vision tower's first layer, `[N, channels, time, height, width]` -> `[N, d, 1, 1, 1]`. Its kernel covers a whole
    patch, so it is one matrix product, which in bfloat16 on a CPU takes a 46th of the convolution's time. In float32 it
    stays a convolution, stock's result bit for bit.

    Args:
        stock: the layer in whose place it stands, with its weights.
    """

    def __init__(self, stock: nn.Conv3d):
        shape: Any = {"kernel_size": stock.kernel_size, "stride": stock.stride, "bias": stock.bias is not None}
        super().__init__(stock.in_channels, stock.out_channels, **shape, device="meta")
        self.weight, self.bias = stock.weight, stock.bias
        self._is_hf_initialized = getattr(stock, "_is_hf_initialized", False)

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
        self.qkv, self.proj = stock.qkv, stock.proj

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """`[N, d]`, and `[sequences + 1]` int32 where each sequence begins -> `[N, d]`."""
        if self.config._attn_implementation != "sdpa":
            return super().forward(hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        query, key, value = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        return self.proj(attend_within(query, key, value, cu_seqlens).flatten(1))


def attend_within(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """
    Bidirectional attention within each of many sequences that lie one behind the other, without a mask and without
    padding: `[N, heads, head_dim]` each -> the same. Sequences of one length attend as a batch.
    """
    lengths, attended = cu_seqlens.diff(), torch.empty_like(query)
    distinct = lengths.unique().tolist()
    for length in distinct:
        states, rows = [query, key, value], None
        if len(distinct) > 1:
            rows = (cu_seqlens[:-1][lengths == length, None] + torch.arange(length, device=query.device)).flatten()
            # Not `heads[rows]`: on a CPU that copies number by number what this copies row by row.
            states = [heads.index_select(0, rows) for heads in states]
        batch = (heads.unflatten(0, (-1, length)).transpose(1, 2) for heads in states)
        together = nn.functional.scaled_dot_product_attention(*batch).transpose(1, 2).flatten(0, 1)
        if rows is None:
            return together
        attended.index_copy_(0, rows, together)
    return attended
