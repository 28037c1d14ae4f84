"""Encoding images and videos in chunks, so that memory does not grow with a video beyond its features. Steps that
repeat the step before are encoded once, as in slides, screen recordings and videos of fixed cameras.

The end of the file makes the vision towers of the Qwen-VL models fast: the first layer is one matrix product, and
Qwen2.5-VL attends in all windows of a layer in a few calls. Without the flash-attn package, stock Transformers calls
attention once per window: about 340,000 calls for 600 frames.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention, apply_rotary_pos_emb_vision
from transformers.utils.generic import is_flash_attention_requested
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from .configuration_qtsplus import PATCHES_PER_CHUNK
from .layout_qtsplus import QTSplusBackboneMixin
from .methods_qtsplus import TensorSequence, is_finite
from .numbers_qtsplus import require_count
from .prompt_qtsplus import IMAGE, MODALITIES, VIDEO, Features, Grid, Grids, VisualInputs

# Few rows fill a CPU, and their memory is reused. The C library maps blocks above 32 MB anew each time: page faults and
# cold caches then cost a third of the vision tower's time.
PATCHES_PER_CHUNK_ON_CPU = 2048
STEPS_COMPARED = 32  # at a time with the steps before them


@dataclass(frozen=True)
class Piece:
    """Steps in time of an image or video, which are encoded together with other pieces, as one chunk."""

    index: int  # of the image or video
    first: int
    stop: int

    @property
    def steps(self) -> int:
        return self.stop - self.first


Chunk = list[Piece]
Device = torch.device | str | None


def encode_visual(model: QTSplusBackboneMixin, visual: VisualInputs, grids: Grids) -> Features:
    """Per modality the features of every image and video, `[k, token_width]`; the caller's own features if given."""
    if visual.video_features is None:
        videos = encode_modality(model, VIDEO, visual.pixel_values_videos, visual.video_grid_thw)
    else:
        videos = _checked(model, visual.video_features, grids[VIDEO])
    images = encode_modality(model, IMAGE, visual.pixel_values, visual.image_grid_thw)
    return {IMAGE: images, VIDEO: videos}


def encode_modality(
    model: QTSplusBackboneMixin,
    modality: int,
    pixels: Tensor | None,
    grid_thw: Tensor | None,
    frames_per_chunk: int | None = None,
    device: Device = None,
) -> list[Tensor]:
    """`[k, token_width]` features of each image or video; none without pixels."""
    if pixels is None or grid_thw is None:
        return []
    home = grid_thw.device
    if home.type == "cpu":
        home = model.device
    grid_thw = grid_thw.cpu()
    pixels_of_each = pixels.split(model.pixel_rows(grid_thw))
    if not pixels_of_each:
        return []
    counts = grid_thw[:, 0].tolist()
    steps_of_each = [rows.unflatten(0, (count, -1)) for rows, count in zip(pixels_of_each, counts, strict=True)]
    is_new = new_steps(steps_of_each)
    by_video = zip(steps_of_each, is_new, strict=True)
    distinct_steps = [steps if new.all() else steps[new.nonzero()[:, 0]] for steps, new in by_video]
    features = _encode_steps(model, modality, grid_thw, home, distinct_steps, frames_per_chunk, device)
    return list(map(_repeat_steps, features, is_new))


def _repeat_steps(features: Tensor, is_new: Tensor) -> Tensor:
    """The features of all steps of a video, from those of the steps that are new."""
    if is_new.all():
        return features
    by_step = features.unflatten(0, (int(is_new.sum()), -1))
    return by_step[is_new.cumsum(0) - 1].flatten(0, 1)


def new_steps(videos: TensorSequence) -> TensorSequence:
    """
    Per video `[T]` bool on the host, which of its steps, `[T, ...]` pixel values, have to be encoded: those that differ
    from the one before. The host waits once for all comparisons.

    The vision tower encodes each step by itself: a temporal patch (two frames) in Qwen-VL, a frame in the others. It
    does not know the time, so steps with equal pixels have equal features, up to rounding.
    """
    is_new = []
    for steps in videos:
        is_new.append(steps.new_ones(1, dtype=torch.bool))
        pairs = zip(steps[:-1].split(STEPS_COMPARED), steps[1:].split(STEPS_COMPARED), strict=True)
        is_new += [(before != now).flatten(1).any(1) for before, now in pairs]
    return torch.cat(is_new).cpu().split(list(map(len, videos)))


def _encode_steps(
    model: QTSplusBackboneMixin,
    modality: int,
    grid_thw: Tensor,
    home: torch.device,
    steps: TensorSequence,
    frames_per_chunk: int | None,
    device: Device,
) -> list[Tensor]:
    """As [`encode_modality`], of the steps of each image and video; the grids are on the host, the model at home."""
    features = [torch.empty(0) for _ in steps]
    for chunk in _chunks(model, steps, frames_per_chunk):
        pixels = [steps[piece.index][piece.first : piece.stop].flatten(0, 1) for piece in chunk]
        grid = grid_thw[[piece.index for piece in chunk]]
        grid[:, 0] = grid.new_tensor([piece.steps for piece in chunk])
        encoded = model.encode_pixels(torch.cat(pixels).to(home), grid)
        for piece, tokens in zip(chunk, encoded, strict=True):
            index = piece.index
            total = len(steps[index])
            target = device or tokens.device
            if piece.steps == total:
                features[index] = tokens.to(target)
                continue
            per_step = len(tokens) // piece.steps
            if piece.first == 0:
                # Joining all pieces at the end would hold them twice.
                features[index] = tokens.new_empty(per_step * total, tokens.shape[-1], device=target)
            begin = per_step * piece.first
            end = begin + len(tokens)
            features[index][begin:end] = tokens
    # The host waits once for all of them.
    are_finite = torch.stack(list(map(is_finite, features))).tolist()
    if not all(are_finite):
        raise ValueError(
            f"NaN or infinity in the features of {MODALITIES[modality]} {are_finite.index(False)}: expected finite "
            "pixel values, and weights whose dtype does not overflow."
        )
    return features


def _chunks(
    model: QTSplusBackboneMixin,
    steps: TensorSequence,
    frames_per_chunk: int | None,
) -> Iterator[Chunk]:
    """The chunks in which the steps are encoded: of so many frames, or as large as the device handles well."""
    counts = list(map(len, steps))
    if frames_per_chunk is not None:
        frames_per_chunk = require_count("frames_per_chunk", frames_per_chunk)
        frames_per_step = getattr(model.config.vision_config, "temporal_patch_size", 1)
        return chunk_steps(counts, frames_per_chunk, [frames_per_step] * len(counts))
    patches_per_step = [rows.shape[1] * model.patches_per_row for rows in steps]
    capacity = PATCHES_PER_CHUNK
    if model.training and torch.is_grad_enabled():
        # Gradients keep every chunk's activations anyway, and ranks that share weights must call them equally often.
        capacity = sys.maxsize
    elif model.device.type == "cpu":
        capacity = PATCHES_PER_CHUNK_ON_CPU
    return chunk_steps(counts, capacity, patches_per_step)


def _checked(
    model: QTSplusBackboneMixin,
    video_features: TensorSequence,
    grids: Sequence[Grid],
) -> list[Tensor]:
    """`[k, token_width]` features of videos that the caller has encoded before."""
    if len(video_features) != len(grids):
        raise ValueError(f"{len(video_features)} video_features: expected one per video ({len(grids)}).")
    for index, tokens in enumerate(video_features):
        given = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        expected = (math.prod(grids[index]), model.token_width)
        if given != expected:
            raise ValueError(
                f"video_features {index} is {given}: expected a tensor {expected}, the merged tokens of its grid by "
                "the model's width."
            )
        if not tokens.is_floating_point():
            raise ValueError(f"video_features {index} is of {tokens.dtype}: expected floating-point numbers.")
    return [tokens.to(model.dtype) for tokens in video_features]


def chunk_steps(counts: Sequence[int], capacity: int, costs: Sequence[int]) -> Iterator[Chunk]:
    """
    Cuts images and videos along time, in order, into chunks of `capacity`, or of a single step that is larger.

    Args:
        counts: steps in time of each image or video.
        costs: of each image or video, how much of the capacity one of its steps takes.
    """
    chunk: Chunk = []
    room = capacity
    for index, (count, cost) in enumerate(zip(counts, costs, strict=True)):
        first = 0
        while first < count:
            fits = min(count - first, room // cost)
            if fits < 1 and chunk:
                yield chunk
                chunk = []
                room = capacity
                continue
            stop = first + max(fits, 1)
            piece = Piece(index, first, stop)
            chunk.append(piece)
            room -= piece.steps * cost
            first = stop
    if chunk:
        yield chunk


def stored_parts(weight: Tensor) -> list[Tensor]:
    """The tensors that hold a weight: itself, or the numbers and scales of a quantized one, which cannot be summed."""
    if not is_traceable_wrapper_subclass(weight):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    parts = []
    for name in names:
        parts += stored_parts(getattr(weight, name))
    return parts


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where its weights are or, if they are offloaded, where Accelerate's hooks bring them."""
    device = next(module.parameters()).device
    if device.type == "meta":
        for part in module.modules():
            place = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
            if place is not None:
                return torch.device(place)
    return device


# --- Vision towers ---


def tower_inputs(tower: Any, grid_thw: Tensor) -> dict[str, Any]:
    """
    What the vision tower of a Qwen-VL model would compute from its grids, with a wait for the host in each layer:
    computed on the host, where the grids are, and sent to the tower's device.
    """
    merge = tower.spatial_merge_size
    bounds = {"cu_seqlens": get_vision_cu_seqlens(grid_thw)}
    indices = {"position_ids": get_vision_position_ids(grid_thw, merge)}
    if hasattr(tower, "window_size"):
        order, window_bounds = get_vision_window_index(grid_thw, merge, tower.window_size, tower.patch_size)
        bounds["cu_window_seqlens"] = window_bounds
        indices["window_index"] = order
    if hasattr(tower, "num_grid_per_side"):
        positions, weights = get_vision_interpolation_indices_and_weights(
            grid_thw,
            tower.num_grid_per_side,
            tower.interpolation_mode,
            tower.interpolation_align_corners,
            merge,
        )
        indices["interp_indices"] = positions
        indices["interp_weights"] = weights
    if is_flash_attention_requested(tower.config):
        indices |= bounds  # Its kernels read them; the other implementations of attention read them on the host.
    device = device_of(tower)
    on_device = {name: values.to(device, non_blocking=True) for name, values in indices.items()}
    return bounds | on_device


class PatchProjection(nn.Conv3d):
    """
    The vision tower's first layer, `[N, channels, time, height, width]` -> `[N, d, 1, 1, 1]`. Its kernel covers a whole
    patch, so it is one matrix product, which in bfloat16 on a CPU takes a 46th of the convolution's time. In float32 it
    stays a convolution, with stock's result bit for bit. Stock's layer object changes its class to this one, because
    PEFT chooses adapters by class.
    """

    def forward(self, patches: Tensor) -> Tensor:
        if patches.dtype == torch.float32:
            return super().forward(patches)
        projected = nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return projected[..., None, None, None]


class WindowsTogether(Qwen2_5_VLVisionAttention):
    """
    Qwen2.5-VL's vision attention, which attends in all windows of a layer together with `"sdpa"`. With another
    `attn_implementation` it is stock's.

    Args:
        stock: the attention that it replaces; they share weights.
    """

    def __init__(self, stock: Qwen2_5_VLVisionAttention):
        with torch.device("meta"):
            super().__init__(stock.config)
        self.qkv = stock.qkv
        self.proj = stock.proj

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs,
    ) -> Tensor:
        """`[N, d]`, and `[sequences + 1]` int32 where each sequence begins -> `[N, d]`."""
        if self.config._attn_implementation != "sdpa":
            return super().forward(hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        by_head = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1))
        query, key, value = by_head.unbind(1)
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        return self.proj(attend_within(query, key, value, cu_seqlens).flatten(1))


def attend_within(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """
    Bidirectional attention within each of many sequences that follow each other, without a mask and without padding:
    `[N, heads, head_dim]` each -> the same. Sequences of equal length attend as a batch.
    """
    rows_by_length = _rows_by_length(bounds, query.device)
    if len(rows_by_length) == 1:
        return _attend_in_batch(query, key, value, *rows_by_length)
    attended = torch.empty_like(query)
    for length, rows in rows_by_length.items():
        # On a CPU, `query[rows]` copies number by number, `index_select` row by row.
        attended_rows = _attend_in_batch(
            query.index_select(0, rows),
            key.index_select(0, rows),
            value.index_select(0, rows),
            length,
        )
        attended.index_copy_(0, rows, attended_rows)
    return attended


_known_rows = WeakTensorKeyDictionary()


def _rows_by_length(bounds: Tensor, device: torch.device) -> dict[int, Tensor]:
    """
    Per length of the sequences, the rows on a device of those that have it, ascending. All layers of a vision tower get
    the same `bounds`, so they are read for the first.
    """
    if bounds not in _known_rows:
        on_host = bounds.cpu()
        lengths = on_host.diff()
        rows = {}
        for length in lengths.unique().tolist():
            has_length = lengths == length
            starts = on_host[:-1][has_length]
            rows_of_each = starts[:, None] + torch.arange(length, device="cpu")
            rows[length] = rows_of_each.flatten().to(device)
        _known_rows[bounds] = rows
    return _known_rows[bounds]


def _attend_in_batch(query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
    """As [`attend_within`], of sequences that all have one length."""
    batches = [states.unflatten(0, (-1, length)).transpose(1, 2) for states in (query, key, value)]
    by_sequence = nn.functional.scaled_dot_product_attention(*batches).transpose(1, 2)
    return by_sequence.flatten(0, 1)
