"""How many frames, tokens and bytes a video will take, before it is read."""

from dataclasses import dataclass
from math import prod

import psutil
import torch

from ..common.files import counted, size
from ..model.budget_qtsplus import kept_count
from ..model.fields_qtsplus import QTSplusConfig
from ..model.methods_qtsplus import MethodOrName, check_budget
from ..model.video_qtsplus import VideoChunks

_TEXT = 512  # tokens of a prompt and an answer
_VALUES = 3 * 2 * 28**2  # the most pixel values that become one token
_BYTES_OF_PIXELS = 3 * (1 + 4)  # while a chunk is encoded, its pixels exist three times as bytes and in float32


@dataclass(frozen=True)
class Forecast:
    """What reading a video and answering one question about it will take; memory by the sizes of the layers."""

    frames: int
    seconds_of_video: float
    largest_gap: float  # seconds from a frame that is looked at to the next, or to the end
    trained_seconds: float | None  # the longest video of the model's training, where this one is longer
    visual_tokens: int  # M
    kept_tokens: int  # n, at most
    features: int  # bytes that stay for the next question
    memory: int  # bytes at most beside the weights, features included
    weights: int  # bytes

    def __str__(self) -> str:
        frames = counted(self.frames, "frame")
        gap = round(self.largest_gap, 2)
        exceeded = say_exceeded(self.trained_seconds)
        return (
            f"{frames} of {self.seconds_of_video:,.1f} s, at most {gap:,g} s apart{exceeded}; "
            f"{self.visual_tokens:,} visual tokens, of which at most {self.kept_tokens:,} are kept; "
            f"about {size(self.memory)} of memory beside {size(self.weights)} of weights"
        )

    def require_memory(self, device: str | torch.device) -> None:
        """Raises `ValueError` where a device has no room for the features alone."""
        free = psutil.virtual_memory().available
        if torch.device(device).type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
        if self.features > free:
            raise ValueError(
                f"The features of {self.frames:,} frames are {self.visual_tokens:,} tokens, {size(self.features)}, and "
                f"{device} has {size(free)} free: look at fewer frames (fps, max_frames) or fewer pixels (max_pixels)."
            )


def trained_seconds_below(seconds: float, config: QTSplusConfig) -> float | None:
    """The longest video of the model's training, in seconds, if one of so many seconds is longer."""
    if config.trained_seconds is None or seconds <= config.trained_seconds:
        return None
    return config.trained_seconds


def say_exceeded(trained_seconds: float | None) -> str:
    """The end of a sentence about a video that is longer than those of the training."""
    if trained_seconds is None:
        return ""
    return f", longer than the {trained_seconds:,g} s that the model was trained on"


def forecast(
    model,
    chunks: VideoChunks,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: MethodOrName | None = None,
) -> Forecast:
    """
    What a video will take that a processor's `video_chunks` has opened, by its size; nothing is decoded.

    Args:
        retention, max_visual_tokens, selection: as for `session.ask`.
    """
    config = model.config.qtsplus_config
    (grid,) = model.model.merged_grid(chunks.video_grid_thw)
    tokens = prod(grid)
    method = selection or config.selection
    (fraction,) = check_budget(method, [retention], max_visual_tokens)
    kept_tokens = tokens
    if method != "all":
        most = int(min(max_visual_tokens or config.n_max, config.n_max))
        kept_tokens = kept_count(fraction or config.rho_max, tokens, most)

    text = model.config.get_text_config()
    default_head_dim = text.hidden_size // text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or default_head_dim
    cache_per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim
    layer_per_token = 6 * text.hidden_size + 3 * text.intermediate_size
    values = (cache_per_token + layer_per_token) * (kept_tokens + _TEXT)

    pixels_of_chunk = _BYTES_OF_PIXELS * _VALUES * tokens // len(chunks)
    features = tokens * model.model.token_width * model.dtype.itemsize
    about = chunks.about
    return Forecast(
        frames=about.frames,
        seconds_of_video=about.length,
        largest_gap=about.largest_gap,
        trained_seconds=trained_seconds_below(about.length, config),
        visual_tokens=tokens,
        kept_tokens=kept_tokens,
        features=features,
        memory=features + values * model.dtype.itemsize + pixels_of_chunk + 3 * prod(chunks.shape[1:]),
        weights=sum(weight.nbytes for weight in model.parameters()),
    )
