"""Qwen2.5-VL, Qwen2-VL, Qwen3-VL and Qwen3.5 (dense) with the query-aware selector between the visual merger and the
language model. Each has only what differs from layout_qtsplus.py.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMLP,
    Qwen2_5_VLModel,
    Qwen2_5_VLRMSNorm,
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration, Qwen2VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration, Qwen3VLModel
from transformers.utils import logging

from .configuration_qtsplus import (
    Qwen2_5_VLQTSplusConfig,
    Qwen2VLQTSplusConfig,
    Qwen3_5QTSplusConfig,
    Qwen3VLQTSplusConfig,
)
from .mixin_qtsplus import (
    QTSplusCausalLMOutputWithPast,
    QTSplusHeadMixin,
    QTSplusModelMixin,
    QTSplusModelOutputWithPast,
)
from .prompt_qtsplus import IMAGE, TEXT, VIDEO, VisualSpan
from .saving_qtsplus import QTSplusPreTrainedMixin

try:  # torch 2.10 and newer
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

SILU = type(ACT2FN["silu"])
ROWS_IN_CACHE = 128  # of queries and keys in float32: about 1 MB


# --- Qwen2.5-VL ---


class PatchProjection(nn.Conv3d):
    """
    The vision tower's first layer, `[N, channels, time, height, width]` -> `[N, d, 1, 1, 1]`. Its kernel covers a whole
    patch, so it is one matrix product, which in bfloat16 on a CPU takes a 46th of the convolution's time. In float32 it
    stays a convolution, stock's result bit for bit.
    """

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        if patches.dtype == torch.float32:
            return super().forward(patches)
        projected = nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return projected[..., None, None, None]


class QwenVLQTSplusModelMixin(QTSplusModelMixin):
    """What the Qwen-VL models have in common."""

    visual: Any

    def __init__(self, config: Any):
        super().__init__(config)
        self.visual.patch_embed.proj.__class__ = PatchProjection  # the same weights, by the same names

    def merged_grid(self, grid_thw: torch.Tensor, modality: int = VIDEO) -> list[tuple[int, int, int]]:
        merge = self.config.vision_config.spatial_merge_size
        return [(t, h // merge, w // merge) for t, h, w in grid_thw.tolist()]


class Qwen2_5_VLQTSplusModel(QwenVLQTSplusModelMixin, QTSplusPreTrainedMixin, Qwen2_5_VLModel):
    """Qwen2.5-VL without a head, with a [`QTSplusSelector`] as `qtsplus`."""

    config: Qwen2_5_VLQTSplusConfig
    _no_split_modules = [*Qwen2_5_VLModel._no_split_modules, "QTSplusSelector"]

    def __init__(self, config: Qwen2_5_VLQTSplusConfig):
        super().__init__(config)
        for module in self.visual.modules():
            module.__class__ = IN_CACHE.get(type(module), type(module))

    @property
    def tokens_per_second(self) -> float:
        return self.config.vision_config.tokens_per_second

    @property
    def tile_side(self) -> int:
        """A window of attention. Only layers over whole frames tell it of other tiles."""
        vision = self.config.vision_config
        return vision.window_size // vision.patch_size // vision.spatial_merge_size


class Qwen2_5_VLQTSplusForConditionalGeneration(
    QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen2_5_VLForConditionalGeneration
):
    """Qwen2.5-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen2_5_VLQTSplusConfig
    stock_class = Qwen2_5_VLForConditionalGeneration
    model_class = Qwen2_5_VLQTSplusModel
    backbone_name = "Qwen2.5-VL"


# --- The vision tower of Qwen2.5-VL: all windows of a layer in a few calls ---
#
# It attends within windows, and in some layers within whole frames. Without the flash-attn package, stock Transformers
# calls attention once per window: about 340,000 calls for 600 frames.


class WindowsTogether(Qwen2_5_VLVisionAttention):
    """
    Qwen2.5-VL's vision attention, whose `"sdpa"` attends in all windows of a layer together, and without gradients on a
    CPU rotates queries and keys where they lie. With another `attn_implementation` it is stock's.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """`[N, d]`, and `[sequences + 1]` int32 where each sequence begins -> `[N, d]`."""
        if self.config._attn_implementation != "sdpa":
            return super().forward(hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        states = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1))
        query, key = rotate(states[:, :2], *position_embeddings)
        return self.proj(attend_within(query, key, states[:, 2], cu_seqlens).flatten(1))


class BiasWithin(nn.Linear):
    """Stock's, which in bfloat16 on a CPU without gradients adds its bias within the product: 5% less time."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and not torch.compiler.is_compiling()
        if not (plain and input.dtype == weight.dtype == torch.bfloat16 and _multiplies_bfloat16()):
            return super().forward(input)
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether oneDNN is there and has bfloat16 on this processor; then torch multiplies with it, too."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class GatedInPlace(Qwen2_5_VLMLP):
    """Stock's, which without gradients writes into its activations: fewer of them pass through the cache."""

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not isinstance(self.act_fn, SILU):
            return super().forward(hidden_state)
        gate = nn.functional.silu(self.gate_proj(hidden_state), inplace=True)
        return self.down_proj(gate.mul_(self.up_proj(hidden_state)))


class RMSNormInCache(Qwen2_5_VLRMSNorm):  # Transformers knows a norm by its name
    """Stock's, which without gradients on a CPU takes a block of rows through all of its steps in the cache."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or hidden_states.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(hidden_states)
        normed = torch.empty_like(hidden_states)
        for block, rows in zip(hidden_states.split(ROWS_IN_CACHE), normed.split(ROWS_IN_CACHE), strict=True):
            block = block.to(torch.float32, copy=True)
            block *= torch.rsqrt(block.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            rows.copy_(block).mul_(self.weight)
        return normed


IN_CACHE = {
    Qwen2_5_VLVisionAttention: WindowsTogether,
    nn.Linear: BiasWithin,
    Qwen2_5_VLMLP: GatedInPlace,
    Qwen2_5_VLRMSNorm: RMSNormInCache,
}


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    Queries and keys `[N, 2, heads, head_dim]` with rotary positions, `[N, heads, head_dim]` each. Without gradients on
    a CPU in their own memory, block by block in its cache, with the same rounding: 0.4 times stock's time.
    """
    if states.requires_grad or states.device.type != "cpu" or torch.compiler.is_compiling():
        query, key = states.unbind(1)
        return apply_rotary_pos_emb_vision(query, key, cos, sin)
    half = states.shape[-1] // 2
    cos, sin = (angles.float()[:, None, None] for angles in (cos, sin))
    for block, c, s in zip(*(tensor.split(ROWS_IN_CACHE) for tensor in (states, cos, sin)), strict=True):
        block_float = block.float()
        first, second = block_float.split(half, dim=-1)
        rotated = block_float * c
        rotated[..., :half] -= second * s[..., :half]
        rotated[..., half:] += first * s[..., half:]
        block.copy_(rotated)
    return states.unbind(1)


def attend_within(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """
    Bidirectional attention within each of many sequences that lie one behind the other, without a mask and without
    padding: `[N, heads, head_dim]` each -> the same.

    On a GPU in half precision this is one call of torch's own variable-length attention, where torch has it. Otherwise
    as many calls of scaled dot-product attention as there are different lengths.
    """
    if not _torch_has_varlen_for(query):
        return attend_by_length(query, key, value, cu_seqlens)
    longest = int(cu_seqlens.diff().max())
    attended: Any = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest)
    return attended


def _torch_has_varlen_for(query: torch.Tensor) -> bool:
    if not query.is_cuda:
        return False
    fits = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0
    if varlen_attn is not None and fits and torch.cuda.get_device_capability(query.device) >= (8, 0):
        return True
    logger.warning_once(
        f"The vision tower batches windows by their size in {query.dtype}: torch's variable-length attention, which is "
        "faster, needs torch 2.10, half precision, an Ampere GPU and heads of a multiple of 8."
    )
    return False


def attend_by_length(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens: torch.Tensor
) -> torch.Tensor:
    """[`attend_within`] where sequences of one length attend as a batch."""
    starts, lengths = cu_seq_lens[:-1], cu_seq_lens.diff()
    distinct = lengths.unique().tolist()

    def attend(states: list[torch.Tensor], length: int) -> torch.Tensor:
        query, key, value = (heads.unflatten(0, (-1, length)).transpose(1, 2) for heads in states)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return attended.transpose(1, 2).flatten(0, 1)

    states = [query, key, value]
    if len(distinct) == 1:
        return attend(states, distinct[0])
    attended = torch.empty_like(query)
    for length in distinct:
        rows = (starts[lengths == length, None] + torch.arange(length, device=starts.device)).flatten()
        # Not `heads[rows]`: on a CPU that copies number by number what this copies row by row.
        attended.index_copy_(0, rows, attend([heads.index_select(0, rows) for heads in states], length))
    return attended


# --- Qwen2-VL, Qwen3-VL, Qwen3.5 ---


class Qwen2VLQTSplusModel(QwenVLQTSplusModelMixin, QTSplusPreTrainedMixin, Qwen2VLModel):
    """Qwen2-VL without a head, with a [`QTSplusSelector`] as `qtsplus`."""

    config: Qwen2VLQTSplusConfig
    _no_split_modules = [*Qwen2VLModel._no_split_modules, "QTSplusSelector"]

    @property
    def tile_side(self) -> int:
        """As large as a window of Qwen2.5-VL; here every layer would tell it of other tiles."""
        return 4

    def language_positions(self, spans: list[VisualSpan], start: int, positions: torch.Tensor) -> torch.Tensor:
        """One position per temporal patch, as along an image, where Qwen2.5-VL measures seconds."""
        images = [replace(span, modality=IMAGE) for span in spans]
        return self.row_positions(images, positions.shape[1], start, [], positions.device)


class Qwen2VLQTSplusForConditionalGeneration(QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen2VLForConditionalGeneration):
    """Qwen2-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen2VLQTSplusConfig
    stock_class = Qwen2VLForConditionalGeneration
    model_class = Qwen2VLQTSplusModel
    backbone_name = "Qwen2-VL"


class Qwen3QTSplusModelMixin(QwenVLQTSplusModelMixin):
    """Every temporal patch of a video has its time as text ("<0.5 seconds>") in front."""

    frames_apart = True

    def language_positions(self, spans: list[VisualSpan], start: int, positions: torch.Tensor) -> torch.Tensor:
        """Time is text here: every frame stands like an image."""
        images = [replace(span, modality=IMAGE, frame=0) for span in spans]
        return self.row_positions(images, positions.shape[1], start, [], positions.device)


class Qwen3VLQTSplusModel(Qwen3QTSplusModelMixin, QTSplusPreTrainedMixin, Qwen3VLModel):
    """
    Qwen3-VL without a head, with a [`QTSplusSelector`] as `qtsplus`. The features of earlier vision layers, which it
    adds to the first layers of the language model (DeepStack), stand behind the features of every token.
    """

    config: Qwen3VLQTSplusConfig
    _no_split_modules = [*Qwen3VLModel._no_split_modules, "QTSplusSelector"]

    @property
    def token_width(self) -> int:
        return super().token_width * (1 + len(self.config.vision_config.deepstack_visual_indexes))

    def encode_pixels(self, modality: int, pixels: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        encoded = self.get_image_features(pixels, grid_thw, return_dict=True)  # videos are encoded the same way
        sizes = [len(tokens) for tokens in encoded.pooler_output]
        # Split by image from Transformers 5.18 on, whole before.
        deeper = [layer if torch.is_tensor(layer) else torch.cat(layer) for layer in encoded.deepstack_features]
        return list(torch.cat([torch.cat(encoded.pooler_output), *deeper], dim=1).split(sizes))

    def language_inputs(
        self, inputs_embeds: torch.Tensor, input_ids: torch.Tensor, features: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, Any]:
        width = inputs_embeds.shape[-1]
        wide = nn.functional.pad(inputs_embeds, (0, self.token_width - width))
        wide = self.splice(wide, input_ids, features)
        visual = self.token_types(input_ids) != TEXT
        return {
            "inputs_embeds": wide[..., :width],
            "visual_pos_masks": visual,
            "deepstack_visual_embeds": list(wide[visual][:, width:].split(width, dim=1)),
        }


class Qwen3VLQTSplusForConditionalGeneration(QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen3VLForConditionalGeneration):
    """Qwen3-VL that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen3VLQTSplusConfig
    stock_class = Qwen3VLForConditionalGeneration
    model_class = Qwen3VLQTSplusModel
    backbone_name = "Qwen3-VL"


class Qwen3_5QTSplusModel(Qwen3QTSplusModelMixin, QTSplusPreTrainedMixin, Qwen3_5Model):
    """
    Qwen3.5 without a head, with a [`QTSplusSelector`] as `qtsplus`. There is no DeepStack, and most layers of the
    language model are linear attention: they carry a state from token to token, without keys.
    """

    config: Qwen3_5QTSplusConfig
    _no_split_modules = [*Qwen3_5Model._no_split_modules, "QTSplusSelector"]
    recurrent = True


class Qwen3_5QTSplusForConditionalGeneration(QTSplusHeadMixin, QTSplusPreTrainedMixin, Qwen3_5ForConditionalGeneration):
    """Qwen3.5 that reads a video through a [`QTSplusSelector`]; used as the stock class is."""

    config: Qwen3_5QTSplusConfig
    stock_class = Qwen3_5ForConditionalGeneration
    model_class = Qwen3_5QTSplusModel
    backbone_name = "Qwen3.5"
    projections = rf"{QTSplusHeadMixin.projections}|linear_attn\.(in_proj_(qkv|z|a|b)|out_proj)"


__all__ = [
    "QTSplusCausalLMOutputWithPast",
    "QTSplusModelOutputWithPast",
    "Qwen2VLQTSplusForConditionalGeneration",
    "Qwen2VLQTSplusModel",
    "Qwen2_5_VLQTSplusForConditionalGeneration",
    "Qwen2_5_VLQTSplusModel",
    "Qwen3VLQTSplusForConditionalGeneration",
    "Qwen3VLQTSplusModel",
    "Qwen3_5QTSplusForConditionalGeneration",
    "Qwen3_5QTSplusModel",
]
