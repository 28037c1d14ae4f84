"""The cost model: what each stage must compute and move, and the least time in which a device can do it."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..lm_attention_qtsplus import FrameGroups, attention_layer
from ..selection_qtsplus import LM_ATTENTION
from ..selector_qtsplus import kept_count
from .clock import now


@dataclass(frozen=True)
class Cost:
    """
    Attributes:
        flops: floating-point operations of the matrix products, two for each multiply-add.
        bytes: the least that has to be moved: weights once, what comes in, what goes out.
    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Device:
    """The most that a device does: floating-point operations and bytes per second."""

    name: str
    flops: float
    bandwidth: float

    def floor(self, cost: Cost) -> float:
        """Seconds: the longer of computing and moving, each at full speed."""
        return max(cost.flops / self.flops, cost.bytes / self.bandwidth)


# Dense bfloat16 and memory bandwidth, from the makers' data sheets.
DATA_SHEETS = (Device("A100 80 GB SXM", 312e12, 2.039e12), Device("H100 SXM", 989e12, 3.35e12))


def stage_costs(
    config: Any,
    grid: tuple[int, int, int],
    text_tokens: int,
    question_tokens: int,
    retention: float,
    bytes_per_value: int = 2,
    stock_text_tokens: int | None = None,
    selection: str = "qtsplus",
) -> dict[str, dict[str, Cost]]:
    """
    Costs of one question about one video, by side and stage.

    Args:
        config: of our side, with a vision tower in [`_VISION`].
        grid: (time, height, width) in visual tokens.
        text_tokens: of the prompt, beside the visual ones.
        stock_text_tokens: of stock's prompt, where it is another one.
        question_tokens: of them, those that the selection goes by.
        bytes_per_value: of weights, activations and cache.
        selection: `"qtsplus"` or `"lm_attention"`, of our side. The latter has one stage, and re-encodes nothing.
    """
    num_tokens = math.prod(grid)
    kept = kept_count(retention, num_tokens, config.qtsplus_config.n_max)
    vision = _VISION[config.vision_config.model_type](config, grid, bytes_per_value)
    stock_length = (text_tokens if stock_text_tokens is None else stock_text_tokens) + num_tokens
    our_length = text_tokens + kept
    if selection == LM_ATTENTION:
        stages = {"relevance": _attention_relevance(config, grid, text_tokens, bytes_per_value)}
    else:
        stages = {
            "relevance": _relevance(config, num_tokens, question_tokens, bytes_per_value),
            # Budget, entropy and top-n pass over M float32 values a few times; log r and r are written once.
            "gate": Cost(0.0, 4 * 4 * num_tokens),
            "re-encode": _reencode(config, kept, bytes_per_value),
        }
    return {
        "stock": {
            "vision": vision,
            "prefill": _prefill(config.text_config, stock_length, bytes_per_value),
            "per_token": _one_token(config.text_config, stock_length, bytes_per_value),
        },
        "ours": {
            "vision": vision,
            **stages,
            "prefill": _prefill(config.text_config, our_length, bytes_per_value),
            "per_token": _one_token(config.text_config, our_length, bytes_per_value),
        },
    }


def _windows(config, grid: tuple[int, int, int], width: int) -> Cost:
    """The whole tower: windows of `window_size` pixels in most blocks, whole frames in the others."""
    vision, (time_steps, rows, columns) = config.vision_config, grid
    merge = vision.spatial_merge_size
    patches, per_frame = math.prod(grid) * merge**2, rows * columns * merge**2
    side = vision.window_size // merge // vision.patch_size
    windows = [
        min(side, rows - top) * min(side, columns - left) * merge**2
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    d, inner, full = vision.hidden_size, vision.intermediate_size, len(vision.fullatt_block_indexes)
    patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    merged = d * merge**2
    block_weights, merger_weights = 4 * d**2 + 3 * d * inner, merged**2 + merged * vision.out_hidden_size
    pairs = (vision.depth - full) * sum(length**2 for length in windows) + full * per_frame**2
    flops = 2 * patches * (patch_values * d + vision.depth * block_weights)
    flops += 4 * d * time_steps * pairs + 2 * math.prod(grid) * merger_weights
    weights = patch_values * d + vision.depth * block_weights + merger_weights
    moved = weights + patches * patch_values + math.prod(grid) * vision.out_hidden_size
    return Cost(flops, width * moved)


def _frames(config, grid: tuple[int, int, int], width: int, merge: int, class_tokens: int) -> Cost:
    """A ViT that looks at square frames, one by one, and a projector of two layers over `merge` x `merge` patches."""
    vision, out = config.vision_config, config.text_config.hidden_size
    side, patch = (size if isinstance(size, int) else size[0] for size in (vision.image_size, vision.patch_size))
    patches, projector = (side // patch) ** 2, vision.hidden_size * merge**2 * out + out**2
    frame = _vit(vision, vision.num_hidden_layers, patches, 3 * patch**2, class_tokens)
    return _projected(frame, projector, patches // merge**2, out, grid, width)


def _deepstack(config, grid: tuple[int, int, int], width: int) -> Cost:
    """A ViT that looks at whole frames of any size; its last layer and some earlier ones have a merger each."""
    vision, (_, rows, columns) = config.vision_config, grid
    merged, mergers = vision.hidden_size * vision.spatial_merge_size**2, 1 + len(vision.deepstack_visual_indexes)
    projector, out = mergers * (merged**2 + merged * vision.out_hidden_size), mergers * vision.out_hidden_size
    patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    frame = _vit(vision, vision.depth, rows * columns * vision.spatial_merge_size**2, patch_values, 0)
    return _projected(frame, projector, rows * columns, out, grid, width)


@dataclass(frozen=True)
class _Frame:
    """What one frame takes: floating-point operations, values of its patches, and the weights for all frames."""

    flops: int
    values: int
    weights: int


def _vit(vision, depth: int, patches: int, patch_values: int, class_tokens: int) -> _Frame:
    """Attention within a frame, feed-forward blocks of two layers."""
    d, length = vision.hidden_size, patches + class_tokens
    block = 4 * d**2 + 2 * d * vision.intermediate_size
    flops = 2 * patches * patch_values * d + depth * (2 * length * block + 4 * d * length**2)
    return _Frame(flops, patches * patch_values, patch_values * d + depth * block)


def _projected(frame: _Frame, projector: int, times: int, out: int, grid: tuple[int, int, int], width: int) -> Cost:
    """All frames, each with the projector's weights `times` over, and `out` values for every token."""
    flops = grid[0] * (frame.flops + 2 * times * projector)
    return Cost(flops, width * (frame.weights + projector + grid[0] * frame.values + math.prod(grid) * out))


# By the type of the vision tower.
_VISION: dict[str, Callable[..., Cost]] = {
    "qwen2_5_vl": _windows,
    "qwen2_5_vl_vision": _windows,
    "internvl_vision": functools.partial(_frames, merge=2, class_tokens=1),
    "siglip_vision_model": functools.partial(_frames, merge=1, class_tokens=0),
    "qwen3_vl": _deepstack,
    "qwen3_vl_vision": _deepstack,
}


def _text_sizes(text) -> tuple[int, int, int]:
    """Hidden size, key/value size, weights of one layer."""
    d = text.hidden_size
    key_value = d // text.num_attention_heads * text.num_key_value_heads
    return d, key_value, 2 * d**2 + 2 * d * key_value + 3 * d * text.intermediate_size


def _prefill(text, length: int, width: int) -> Cost:
    """All layers over the prompt, causal attention, and the logits of the last position."""
    d, key_value, layer = _text_sizes(text)
    head, depth = d * text.vocab_size, text.num_hidden_layers
    flops = depth * (2 * length * layer + 2 * d * length**2) + 2 * head
    return Cost(flops, width * (depth * (layer + 2 * length * key_value) + head + length * d))


def _one_token(text, length: int, width: int) -> Cost:
    """One step of decoding behind a prompt: reads all weights and the whole cache."""
    d, key_value, layer = _text_sizes(text)
    head, depth = d * text.vocab_size, text.num_hidden_layers
    flops = depth * (2 * layer + 4 * d * length) + 2 * head
    return Cost(flops, width * (depth * (layer + 2 * length * key_value) + head))


def _relevance(config, num_tokens: int, question_tokens: int, width: int) -> Cost:
    """Keys of all tokens, then their scores: for a log-sum-exp, and for a maximum or a mean once more."""
    d, key_value, _ = _text_sizes(config.text_config)
    passes = 1 if config.qtsplus_config.reduction == "logsumexp" else 2
    projection, scores = d * key_value, d * question_tokens
    flops = 2 * num_tokens * (projection + passes * scores) + 2 * question_tokens * d**2
    return Cost(flops, width * (num_tokens * d + projection + d**2) + 4 * num_tokens)


def _attention_relevance(config, grid: tuple[int, int, int], text_tokens: int, width: int) -> Cost:
    """The first layers over every group with the text, the projections of the layer that is read, a row of scores."""
    text, selector = config.text_config, config.qtsplus_config
    d, key_value, layer = _text_sizes(text)
    depth, groups = attention_layer(text, selector.attention_layer), FrameGroups.deal([grid], selector.attention_group)
    projections = 2 * d**2 + 2 * d * key_value
    flops, moved = 0, 4 * math.prod(grid)
    for group in range(groups.count):
        length = len(groups.tokens(group)) + text_tokens
        flops += depth * (2 * length * layer + 2 * d * length**2) + 2 * length * projections + 2 * d * length
        moved += width * (depth * layer + projections + length * d)
    return Cost(flops, moved)


def _reencode(config, kept: int, width: int) -> Cost:
    """Bidirectional attention over the kept tokens, and a feed-forward block four times as wide."""
    d, key_value, _ = _text_sizes(config.text_config)
    layer, depth = 2 * d**2 + 2 * d * key_value + 8 * d**2, config.qtsplus_config.reencode_layers
    return Cost(depth * (2 * kept * layer + 4 * d * kept**2), width * (depth * layer + 2 * kept * d))


# --------------------------------------------------------------------------------------------------------------------
# Devices
# --------------------------------------------------------------------------------------------------------------------


def probe(device: str, dtype: torch.dtype, size: int | None = None) -> Device:
    """
    What this device reaches: a large matrix product, and a copy that no cache holds. The best of five.

    Args:
        size: of the product, `[size, 2 size]` by `[2 size, size]`. `None` is 2048, and 8192 on a GPU, which is done
            with the smaller one before a launch and a wait are small beside it.
    """
    size = size or (8192 if torch.device(device).type == "cuda" else 2048)
    left, right = (torch.randn(size, 2 * size, device=device).to(dtype) for _ in range(2))
    values = torch.zeros(size * size * 16, device=device)
    copy = torch.empty_like(values)
    product = _best(lambda: left @ right.T, device)
    moved = _best(lambda: copy.copy_(values), device)
    return Device("this device", 4 * size**3 / product, 2 * values.nbytes / moved)


def _best(work, device: str) -> float:
    work()
    seconds = []
    for _ in range(5):
        began = now(device)
        work()
        seconds.append(now(device) - began)
    return min(seconds)


def faster_dtype(device: str) -> torch.dtype:
    """bfloat16 or float32, whichever multiplies faster here: CPUs without bfloat16 instructions are slow in it."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16
    return max((torch.bfloat16, torch.float32), key=lambda dtype: probe(device, dtype, size=512).flops)


def cost_table(costs: dict[str, dict[str, Cost]], devices: Sequence[Device]) -> str:
    """Markdown: a row for each stage of either side, with the floor on each device."""
    heads = ["side", "stage", "TFLOP", "GB", *(f"{device.name}, s" for device in devices)]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for side, stages in costs.items():
        for stage, cost in stages.items():
            floors = (f"{device.floor(cost):.3g}" for device in devices)
            cells = [side, stage.replace("_", " "), f"{cost.flops / 1e12:.3g}", f"{cost.bytes / 1e9:.3g}", *floors]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
