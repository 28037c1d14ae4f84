"""The cost model: what each stage must compute and move, and the least time in which a device can do it."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qtsplus.hub.backbones import backbone_of
from qtsplus.model.budget_qtsplus import kept_count
from qtsplus.model.lm_attention_qtsplus import attention_layer, frame_groups

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
    if selection == "lm_attention":
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
    """A ViT that looks at whole frames of any size; its last layer and perhaps some earlier ones have a merger each."""
    vision, (_, rows, columns) = config.vision_config, grid
    merged = vision.hidden_size * vision.spatial_merge_size**2
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
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
    "qwen3_5_vision": _deepstack,
}


# Tokens that linear attention takes together, in Transformers as in its fast kernels.
_LINEAR_CHUNK = 64


@dataclass(frozen=True)
class _Mixer:
    """
    How the tokens of a layer of the language model learn of each other.

    Attributes:
        weights: of its projections.
        prompt: floating-point operations over a prompt of a length, beside those of the weights.
        step: the same in one step of decoding behind it.
        cached: bytes that the layer holds of it, at so many bytes a value.
    """

    weights: int
    prompt: Callable[[int], int]
    step: Callable[[int], int]
    cached: Callable[[int, int], int]


def _full_attention(text) -> _Mixer:
    """Causal attention to every token before; with a gate on its output where the model has one."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    queries, keys = text.num_attention_heads * head_dim, text.num_key_value_heads * head_dim
    gate = queries if "linear_attention" in _layer_types(text) else 0  # as in Qwen3.5
    return _Mixer(
        text.hidden_size * (2 * queries + gate + 2 * keys),
        prompt=lambda length: 2 * queries * length**2,
        step=lambda length: 4 * queries * length,
        cached=lambda length, width: width * 2 * keys * length,
    )


def _linear_attention(text) -> _Mixer:
    """The gated delta rule behind a short convolution: a state of one size, read and written token by token."""
    heads, key_dim, value_dim = text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
    keys, values = text.linear_num_key_heads * key_dim, heads * value_dim
    mixed, state = 2 * keys + values, heads * key_dim * value_dim
    # A chunk's tokens among themselves, two triangular systems among it, and what they read from the state, correct in
    # it and add to it.
    token = heads * _LINEAR_CHUNK * (5 * key_dim + 3 * value_dim) + 6 * state
    convolution = 2 * text.linear_conv_kernel_dim * mixed
    return _Mixer(
        text.hidden_size * (mixed + 2 * values + 2 * heads),
        prompt=lambda length: length * (token + convolution),
        step=lambda length: 6 * state + convolution,
        cached=lambda length, width: 4 * state,  # in float32, whatever the model has
    )


def _layer_types(text) -> list[str]:
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return ["linear_attention" if kind == "linear_attention" else "full_attention" for kind in types]


def _mixers(text) -> list[_Mixer]:
    """Of every layer."""
    made = {"full_attention": _full_attention(text)}
    if "linear_attention" in _layer_types(text):
        made["linear_attention"] = _linear_attention(text)
    return [made[kind] for kind in _layer_types(text)]


def mixing_flops(text: Any, length: int) -> int:
    """Floating-point operations by which the tokens of a prompt learn of each other, in all layers."""
    return sum(mixer.prompt(length) for mixer in _mixers(text))


def _language_model_weights(text) -> int:
    """Of all layers."""
    feed_forward = 3 * text.hidden_size * text.intermediate_size
    return sum(mixer.weights + feed_forward for mixer in _mixers(text))


def _cached(text, length: int, width: int) -> int:
    """Bytes of keys, values and states behind a prompt."""
    return sum(mixer.cached(length, width) for mixer in _mixers(text))


def _prefill(text, length: int, width: int) -> Cost:
    """All layers over the prompt, and the logits of the last position."""
    weights, head = _language_model_weights(text), text.hidden_size * text.vocab_size
    flops = 2 * length * weights + mixing_flops(text, length) + 2 * head
    return Cost(flops, width * (weights + head + length * text.hidden_size) + _cached(text, length, width))


def _one_token(text, length: int, width: int) -> Cost:
    """One step of decoding behind a prompt: reads all weights and the whole cache."""
    weights, head = _language_model_weights(text), text.hidden_size * text.vocab_size
    flops = 2 * weights + sum(mixer.step(length) for mixer in _mixers(text)) + 2 * head
    return Cost(flops, width * (weights + head) + _cached(text, length, width))


def _selector_sizes(text) -> tuple[int, int]:
    """Width of the selector, and of its keys; see `build_selector`."""
    d, heads = text.hidden_size, text.num_attention_heads
    return d, (text.head_dim if d % heads else d // heads) * text.num_key_value_heads


def _relevance(config, num_tokens: int, question_tokens: int, width: int) -> Cost:
    """
    Keys of all tokens, with the null token, then scores: of each word twice, for a sum once, as of one word. Before
    them a layer over the question, where there is one.
    """
    d, key_value = _selector_sizes(config.text_config)
    passes = 1 if config.qtsplus_config.reduction == "sum" else 2 * question_tokens
    projection, scores = d * key_value, d * passes
    scored = num_tokens + config.qtsplus_config.null_token
    flops: float = 2 * scored * (projection + scores) + 2 * question_tokens * d**2
    if config.qtsplus_config.query_states == "layer":
        flops += _layers(config, 1, question_tokens, width).flops
    return Cost(flops, width * (num_tokens * d + projection + d**2) + 4 * num_tokens)


def _attention_relevance(config, grid: tuple[int, int, int], text_tokens: int, width: int) -> Cost:
    """The first layers over every group with the text, the projections of the layer that is read, a row of scores."""
    text, selector = config.text_config, config.qtsplus_config
    d, depth = text.hidden_size, attention_layer(text, selector.attention_layer)
    groups, (*first, read) = frame_groups([grid], selector.attention_group), _mixers(text)[: depth + 1]
    weights = sum(mixer.weights + 3 * d * text.intermediate_size for mixer in first) + read.weights
    flops, moved = 0, 4 * math.prod(grid)
    for group in groups:
        length = len(group) + text_tokens
        flops += 2 * length * weights + sum(mixer.prompt(length) for mixer in first) + 2 * d * length
        moved += width * (weights + length * d)
    return Cost(flops, moved)


def _reencode(config, kept: int, width: int) -> Cost:
    return _layers(config, config.qtsplus_config.reencode_layers, kept, width)


def _layers(config, depth: int, length: int, width: int) -> Cost:
    """Layers of the selector: bidirectional attention among tokens, and a feed-forward block four times as wide."""
    d, key_value = _selector_sizes(config.text_config)
    layer = 2 * d**2 + 2 * d * key_value + 8 * d**2
    return Cost(depth * (2 * length * layer + 4 * d * length**2), width * (depth * layer + 2 * length * d))


# --------------------------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------------------------


def least_memory(config: Any, num_tokens: int, length: int) -> int:
    """
    Bytes that a question about a video takes at the least, in bfloat16.

    Args:
        config: of our side.
        num_tokens: visual tokens before the selection, whose features are held.
        length: of the prompt that the language model reads, whose cache is held.
    """
    width, text = 2, config.text_config
    with torch.device("meta"):
        model: Any = backbone_of(config.model_type).model(config)
    weights = sum(parameter.numel() for parameter in model.parameters())
    features, widest = num_tokens * model.model.token_width, length * (2 * text.intermediate_size + text.hidden_size)
    return width * (weights + features + widest) + _cached(text, length, width)


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
