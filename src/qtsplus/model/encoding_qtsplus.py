"""Encoding images and videos in chunks, so that memory does not grow with a video beyond its features. Steps that
repeat the step before are encoded once, as in slides, screen recordings and videos of fixed cameras.

The end of the file makes the vision towers of the Qwen-VL models fast: the first layer is one matrix product, and
Qwen2.5-VL attends in all windows of a layer in a few calls. Without the flash-attn package, stock Transformers calls
attention once per window: about 340,000 calls for 600 frames.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention, apply_rotary_pos_emb_vision

from .configuration_qtsplus import PATCHES_PER_CHUNK
from .layout_qtsplus import QTSplusBackboneMixin
from .prompt_qtsplus import IMAGE, MODALITIES, VIDEO, Features, Grid, VisualInputs

# Few rows fill a CPU, and their memory is reused. The C library maps blocks above 32 MB anew each time: page faults and
# cold caches then cost a third of the vision tower's time.
PATCHES_PER_CHUNK_ON_CPU = 2048

Chunk = list[tuple[int, list[int]]]  # the index of each image or video in it, and the grid of its piece


def encode_visual(model: QTSplusBackboneMixin, visual: VisualInputs, grids: dict[int, list[Grid]]) -> Features:
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
    device: torch.device | str | None = None,
) -> list[Tensor]:
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


def _repeat_steps(features: Tensor, is_new: Tensor) -> Tensor:
    """The features of all steps of a video, from those of the steps that are new."""
    if is_new.all():
        return features
    by_step = features.unflatten(0, (int(is_new.sum()), -1))
    return by_step[is_new.cumsum(0) - 1].flatten(0, 1)


def new_steps(steps: Tensor) -> Tensor:
    """
    `[T]` bool, whether a step of a video, `[T, ...]` pixel values, has to be encoded: it differs from the one before.

    The vision tower encodes each step by itself: a temporal patch (two frames) in Qwen-VL, a frame in the others. It
    does not know the time, so steps with equal pixels have equal features, up to rounding.
    """
    is_new = [True]
    for before, now in pairwise(steps):
        is_new.append(not torch.equal(before, now))
    return torch.tensor(is_new)


def _encode_steps(
    model: QTSplusBackboneMixin,
    modality: int,
    grid_thw: Tensor,
    steps: Sequence[Tensor],
    frames_per_chunk: int | None,
    device: torch.device | str | None,
) -> list[Tensor]:
    """As [`encode_modality`], of the steps of each image and video."""
    grids = []
    for own_steps, (_, height, width) in zip(steps, grid_thw.tolist(), strict=True):
        grids.append([len(own_steps), height, width])
    features = [torch.empty(0) for _ in steps]
    num_encoded = [0] * len(steps)  # steps of each image and video
    for chunk in _chunks(model, grids, steps, frames_per_chunk):
        pieces = []
        for index, (count, _, _) in chunk:
            first = num_encoded[index]
            piece = steps[index][first : first + count]
            pieces.append(piece.flatten(0, 1))
        grid = grid_thw.new_tensor([piece_grid for _, piece_grid in chunk])
        pixels = pieces[0] if len(pieces) == 1 else torch.cat(pieces)  # a single piece is not copied
        encoded = model.encode_pixels(modality, pixels.to(grid.device), grid)
        for (index, (count, _, _)), tokens, piece in zip(chunk, encoded, pieces, strict=True):
            _check_encoded(tokens, piece, modality, index)
            total = len(steps[index])
            target = device or tokens.device
            if count == total:
                features[index] = tokens.to(target)
                continue
            per_step = len(tokens) // count
            first = num_encoded[index]
            if first == 0:
                # Joining all pieces at the end would hold them twice.
                features[index] = tokens.new_empty(per_step * total, tokens.shape[-1], device=target)
            features[index][per_step * first : per_step * (first + count)] = tokens
            num_encoded[index] += count
    return features


def _check_encoded(features: Tensor, pixels: Tensor, modality: int, index: int) -> None:
    """Raises `ValueError` for features that are not finite."""
    if _is_finite(features):
        return
    blame = "its pixel values"
    if _is_finite(pixels):
        blame = "its features (the weights or the dtype overflow)"
    raise ValueError(f"NaN or infinity in {blame} of {MODALITIES[modality]} {index}: expected finite ones.")


def _chunks(
    model: QTSplusBackboneMixin,
    grids: Sequence[list[int]],
    steps: Sequence[Tensor],
    frames_per_chunk: int | None,
) -> Iterable[Chunk]:
    """The chunks in which the steps are encoded: of so many frames, or as large as the device handles well."""
    if frames_per_chunk is not None:
        is_whole = not isinstance(frames_per_chunk, bool) and frames_per_chunk == int(frames_per_chunk)
        if not is_whole or frames_per_chunk < 1:
            raise ValueError(f"frames_per_chunk={frames_per_chunk!r}: expected a whole number, at least 1.")
        frames_per_step = getattr(model.config.vision_config, "temporal_patch_size", 1)
        return chunk_grids(grids, frames_per_chunk, [frames_per_step] * len(grids))
    if model.training and torch.is_grad_enabled():
        # Gradients keep every chunk's activations anyway, and ranks that share weights must call them equally often.
        return [list(enumerate(grids))]
    capacity = PATCHES_PER_CHUNK_ON_CPU if model.device.type == "cpu" else PATCHES_PER_CHUNK
    patches_per_step = [rows.shape[1] * model.patches_per_row for rows in steps]
    return chunk_grids(grids, capacity, patches_per_step)


def _checked(
    model: QTSplusBackboneMixin,
    video_features: Sequence[Tensor],
    grids: Sequence[Grid],
) -> list[Tensor]:
    """`[k, token_width]` features of videos that the caller has encoded before."""
    if len(video_features) != len(grids):
        raise ValueError(f"{len(video_features)} video_features: expected one per video ({len(grids)}).")
    checked: set[int] = set()  # questions about one video share its features
    for index, (tokens, (t, h, w)) in enumerate(zip(video_features, grids, strict=True)):
        expected = (t * h * w, model.token_width)
        if tokens.shape != expected:
            raise ValueError(
                f"video_features {index} has shape {tuple(tokens.shape)}: expected {expected}, the merged "
                f"tokens of its grid, {t} x {h} x {w}, by the model's width."
            )
        if id(tokens) not in checked and not _is_finite(tokens):
            raise ValueError(f"NaN or infinity in video_features {index}: expected finite numbers.")
        checked.add(id(tokens))
    dtype = model.get_input_embeddings().weight.dtype
    return [tokens.to(dtype) for tokens in video_features]


def chunk_grids(grids: Sequence[list[int]], capacity: int, costs: list[int]) -> Iterator[Chunk]:
    """
    Cuts images and videos of (time, height, width) along time, in order, into chunks of `capacity`, or of one step.

    Args:
        costs: of each image or video, how much of the capacity one of its steps takes.
    """
    chunk: Chunk = []
    room = capacity
    for index, ((left, height, width), cost) in enumerate(zip(grids, costs, strict=True)):
        while left:
            fits = min(left, room // cost)
            if fits < 1 and chunk:
                yield chunk
                chunk = []
                room = capacity
                continue
            fits = max(fits, 1)  # a step that is larger than a chunk gets a chunk of its own
            chunk.append((index, [fits, height, width]))
            left -= fits
            room -= fits * cost
    if chunk:
        yield chunk


def _is_finite(values: Tensor) -> bool:
    """Reads the extremes, because a sum in float32 would need a copy of 16-bit values."""
    extremes = torch.stack(values.detach().aminmax())
    return bool(extremes.isfinite().all())


# --- The towers ---


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
        weight = self.weight.flatten(1)
        projected = nn.functional.linear(patches.flatten(1), weight, self.bias)
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
        states = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1))
        query, key, value = states.unbind(1)
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        attended = attend_within(query, key, value, cu_seqlens)
        return self.proj(attended.flatten(1))


def attend_within(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """
    Bidirectional attention within each of many sequences that follow each other, without a mask and without padding:
    `[N, heads, head_dim]` each -> the same. Sequences of equal length attend as a batch.
    """
    lengths = bounds.diff()
    distinct = lengths.unique().tolist()
    if len(distinct) == 1:
        return _attend_in_batch(query, key, value, distinct[0])
    attended = torch.empty_like(query)
    for length in distinct:
        starts = bounds[:-1][lengths == length]
        offsets = torch.arange(length, device=query.device)
        rows = (starts[:, None] + offsets).flatten()
        # On a CPU, `query[rows]` copies number by number, `index_select` row by row.
        attended_rows = _attend_in_batch(
            query.index_select(0, rows),
            key.index_select(0, rows),
            value.index_select(0, rows),
            length,
        )
        attended.index_copy_(0, rows, attended_rows)
    return attended


def _attend_in_batch(query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
    """As [`attend_within`], of sequences that all have one length."""
    batches = []
    for states in (query, key, value):
        by_sequence = states.unflatten(0, (-1, length))
        batches.append(by_sequence.transpose(1, 2))
    attended = nn.functional.scaled_dot_product_attention(*batches)
    return attended.transpose(1, 2).flatten(0, 1)
