"""What a video will take, before it is read: frames, tokens and memory."""

from dataclasses import dataclass
from math import prod
from typing import Any

import psutil
import torch

from ..common.files import counted, size
from ..model.selector_qtsplus import kept_count

_TEXT = 512  # tokens of a prompt and an answer
_VALUES = 3 * 2 * 28**2  # pixel values that become one token, at most


@dataclass(frozen=True)
class Forecast:
    """What reading a video and answering one question about it will take; memory by the sizes of the layers."""

    frames: int
    seconds_of_video: float
    visual_tokens: int  # M
    kept_tokens: int  # n, at most
    features: int  # bytes that stay for the next question
    memory: int  # bytes at most beside the weights, features included
    weights: int  # bytes

    def __str__(self) -> str:
        tokens = f"{self.visual_tokens:,} visual tokens, of which at most {self.kept_tokens:,} are kept"
        memory = f"about {size(self.memory)} of memory beside {size(self.weights)} of weights"
        return f"{counted(self.frames, 'frame')} of {self.seconds_of_video:,.1f} s; {tokens}; {memory}"

    def require_memory(self, device: Any) -> None:
        """Raises `ValueError` where a device has no room for the features alone."""
        cuda = torch.device(device).type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if cuda else psutil.virtual_memory().available
        if self.features > free:
            raise ValueError(
                f"The features of {self.frames:,} frames are {self.visual_tokens:,} tokens, {size(self.features)}, and "
                f"{device} has {size(free)} free: look at fewer frames (fps, max_frames) or fewer pixels (max_pixels)."
            )


def forecast(
    model: Any, chunks: Any, retention: float | None = None, max_visual_tokens: int | None = None, selection: Any = None
) -> Forecast:
    """
    What the video will take that a processor's `video_chunks` has opened, by its size; nothing is decoded.

    Args:
        retention, max_visual_tokens, selection: as for `session.ask`.
    """
    config, text = model.config.qtsplus_config, model.config.get_text_config()
    selection = selection or config.selection
    tokens, width = sum(map(prod, model.model.merged_grid(chunks.video_grid_thw))), model.dtype.itemsize
    rho = 1.0 if selection == "all" else retention or config.rho_max
    kept = kept_count(rho, tokens, min(max_visual_tokens or config.n_max, config.n_max))
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = 2 * text.num_hidden_layers * text.num_key_value_heads * head * (kept + _TEXT)
    group = min(tokens, config.attention_group) if selection == "lm_attention" else 0  # that is read at a time
    read = _TEXT + max(group, kept)
    features = tokens * model.model.token_width * width
    layer = read * (6 * text.hidden_size + 3 * text.intermediate_size)
    # While one of them is encoded, thrice as bytes and thrice in float32; and a frame of the film's own size.
    pieces = 3 * (1 + 4) * _VALUES * tokens // len(chunks) + 3 * prod(chunks.shape[1:])
    return Forecast(
        frames=len(chunks.metadata.frames_indices),
        seconds_of_video=chunks.metadata.total_num_frames / chunks.metadata.fps,
        visual_tokens=tokens,
        kept_tokens=kept,
        features=features,
        memory=features + width * (cache + layer) + pieces,
        weights=sum(weight.numel() * weight.element_size() for weight in model.parameters()),
    )
