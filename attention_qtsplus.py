"""Attention of the vision tower: all windows of a layer in a few calls.

Qwen2.5-VL attends within windows, and in some layers within whole frames. Without the flash-attn package, stock
Transformers calls attention once per window: about 340,000 calls for 600 frames. Here a layer's windows are handed over
together ([`attend_together`]) to an attention function that is registered with Transformers as `"qtsplus_varlen"`.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.utils import logging

try:  # torch 2.10 and newer
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

VARLEN_ATTENTION = "qtsplus_varlen"


def varlen_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Bidirectional attention within each of many sequences that lie one behind the other.

    On a GPU in half precision this is one call of torch's own variable-length attention, where torch has it. Otherwise
    sequences of one length are a batch: as many calls of scaled dot-product attention as there are different lengths,
    without a mask and without padding.

    Args:
        query, key, value: `[1, heads, N, head_dim]`.
        cu_seq_lens_q: `[sequences + 1]` int32, where each sequence begins, and N; one sequence if `None`.

    Returns:
        `[1, N, heads, head_dim]`, and `None` in the place of the attention weights.

    Raises:
        ValueError: asked for causal or masked attention, as by a language model.
    """
    if getattr(module, "is_causal", False) or attention_mask is not None:
        raise ValueError(
            f"{VARLEN_ATTENTION!r} is for the vision tower: pass attn_implementation="
            f'{{"vision_config": "{VARLEN_ATTENTION}"}}, and another one for the language model.'
        )
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.tensor([0, query.shape[2]], dtype=torch.int32, device=query.device)
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended: Any
    if _torch_has_varlen_for(query, scaling, dropout):
        longest = int(cu_seq_lens_q.diff().max())
        attended = varlen_attn(query, key, value, cu_seq_lens_q, cu_seq_lens_q, longest, longest)
    else:
        attended = attend_by_length(query, key, value, cu_seq_lens_q, scaling, dropout)
    return attended.unsqueeze(0), None


def _torch_has_varlen_for(query: torch.Tensor, scaling: float, dropout: float) -> bool:
    if not query.is_cuda:
        return False
    if varlen_attn is None:
        reason = f"torch {torch.__version__} has no torch.nn.attention.varlen"
    elif query.dtype not in (torch.float16, torch.bfloat16):
        reason = f"it does not take {query.dtype}"
    elif torch.cuda.get_device_capability(query.device) < (8, 0):
        reason = "the GPU is older than it supports"
    elif query.shape[-1] % 8 or scaling != query.shape[-1] ** -0.5 or dropout:
        reason = "of the head size, the scaling or dropout"
    else:
        return True
    logger.warning_once(f"The vision tower batches windows instead of torch's variable-length attention: {reason}.")
    return False


def attend_by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """`[N, heads, head_dim]` each -> the same: sequences of one length attend as a batch."""
    starts, lengths = cu_seq_lens[:-1], cu_seq_lens.diff()
    distinct = lengths.unique().tolist()

    def attend(states: list[torch.Tensor], length: int) -> torch.Tensor:
        query, key, value = (heads.unflatten(0, (-1, length)).transpose(1, 2) for heads in states)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling)
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


def attend_together(attention: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """
    Hook before Qwen2.5-VL's vision attention: has it call [`varlen_attention_forward`] once, for all sequences.

    For attention functions other than flash-attn's, the stock module cuts its input at `cu_seqlens` and calls the
    function for each piece. It is told of one piece; where the sequences begin goes to the function.
    """
    if attention.config._attn_implementation == VARLEN_ATTENTION:
        cu_seqlens = kwargs["cu_seqlens"]
        # Made on the CPU, so that reading it does not wait for the GPU.
        one_piece = torch.tensor(
            [0, len(args[0] if args else kwargs["hidden_states"])], dtype=torch.int32, device="cpu"
        )
        kwargs = {**kwargs, "cu_seqlens": one_piece, "cu_seq_lens_q": cu_seqlens}
    return args, kwargs


AttentionInterface.register(VARLEN_ATTENTION, varlen_attention_forward)
