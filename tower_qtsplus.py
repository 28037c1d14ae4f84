"""What makes the vision towers of the Qwen-VL models fast: a first layer that is one matrix product, and in Qwen2.5-VL
all windows of a layer in a few calls of attention.

Qwen2.5-VL's tower attends within windows, and in some layers within whole frames. Without the flash-attn package, stock
Transformers calls attention once per window: about 340,000 calls for 600 frames.
"""

import functools
from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
)
from transformers.utils import logging

try:  # torch 2.10 and newer
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)


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


class WindowsTogether(Qwen2_5_VLVisionAttention):
    """
    Qwen2.5-VL's vision attention, whose `"sdpa"` attends in all windows of a layer together. With another
    `attn_implementation` it is stock's.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """`[N, d]`, and `[sequences + 1]` int32 where each sequence begins -> `[N, d]`."""
        if self.config._attn_implementation != "sdpa":
            return super().forward(hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        query, key, value = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
        return self.proj(attend_within(query, key, value, cu_seqlens).flatten(1))


class BiasWithin(nn.Linear):
    """Stock's, which in bfloat16 on a CPU without gradients adds its bias within the product: 3% less time."""

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


# By a layer of Qwen2.5-VL's tower the one with the same weights that takes its place.
FASTER: dict[type[nn.Module], type[nn.Module]] = {Qwen2_5_VLVisionAttention: WindowsTogether, nn.Linear: BiasWithin}


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
