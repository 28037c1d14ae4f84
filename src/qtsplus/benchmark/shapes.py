"""What is measured: models of a given size with random weights, ours and stock on the same ones, and their videos."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.initialization import no_init_weights
from transformers.utils import is_flash_attn_2_available

from ..configuration_qtsplus import Qwen2_5_VLQTSplusConfig
from ..data.clip import render_clip
from ..hub.files import hub_configs
from ..hub.publish import load_processor
from ..modeling_qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration
from ..processing_qtsplus import Qwen2_5_VLQTSplusProcessor

SIDES = ("stock", "ours")
FRAMES_PER_SECOND = 2  # looked at, as Qwen2.5-VL does
FRAME_BOUNDS = {"min_frames": 2, "max_frames": 10**6}  # no video is too long
QUESTION = (
    "What colour is the shape that moves to the left before the yellow circle appears? Choose one of the options. "
    "A. red B. blue C. green D. purple. Answer with the letter."
)
SECOND_QUESTION = "How many shapes can be seen at the end of the video?"
TINY = "qtsplus-tiny"  # its tokenizer serves every shape; the others have none here
_TOKEN_IDS = (
    *("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
    *("user_turn_token_ids", "turn_end_token_id", "special_token_ids"),
)
_TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, eq=False)
class Shape:
    """
    A model's size and the video that it is shown.

    Attributes:
        variant: folder of `hub_configs` whose configuration is taken.
        text, vision: what is changed in its two configurations.
        frames: frames looked at.
        size: (width, height) of the video in pixels, multiples of 28: one visual token for each 28 x 28 pixels of two
            frames.
        source_fps: frames per second of the file, all of which have to be decoded.
    """

    name: str
    variant: str
    frames: int
    size: tuple[int, int]
    source_fps: int = 24
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> tuple[int, int, int]:
        """(time, height, width) in visual tokens."""
        return self.frames // 2, self.size[1] // 28, self.size[0] // 28

    @property
    def visual_tokens(self) -> int:
        time, height, width = self.grid
        return time * height * width


# A quarter of the 3B model's depth at its full width, language and vision alike (9 of 36 layers, 8 of 32 blocks, one of
# them with attention over whole frames). The selector has its full depth, so it weighs four times what it does in 3B.
_QUARTER_TEXT = {"num_hidden_layers": 9, "max_window_layers": 9}
_QUARTER_VISION = {"depth": 8, "fullatt_block_indexes": [7]}

SHAPES = {
    "tiny": Shape("tiny", TINY, frames=8, size=(112, 112), source_fps=8),
    "cpu": Shape("cpu", "qtsplus-3b", frames=56, size=(448, 252), text=_QUARTER_TEXT, vision=_QUARTER_VISION),
    # An eighth of the width too: the paper's curve over the number of frames, on a CPU.
    "small": Shape(
        "small",
        "qtsplus-3b",
        frames=600,
        size=(224, 112),
        source_fps=8,
        text={
            **_QUARTER_TEXT,
            **{"hidden_size": 256, "intermediate_size": 1376, "num_attention_heads": 2, "num_key_value_heads": 1},
        },
        vision={
            **_QUARTER_VISION,
            **{"hidden_size": 160, "intermediate_size": 428, "num_heads": 2, "out_hidden_size": 256},
        },
    ),
    "3b": Shape("3b", "qtsplus-3b", frames=600, size=(840, 560)),
}


def find_shape(name: str) -> Shape:
    """
    Raises:
        ValueError: no such shape.
    """
    if name not in SHAPES:
        raise ValueError(f"There is no shape {name!r}; expected one of {', '.join(SHAPES)}.")
    return SHAPES[name]


def find_device(shape: Shape, device: str | None) -> str:
    """
    The device that was asked for, or else the shape's: a GPU for the whole 3B model, the CPU for the others.

    Raises:
        ValueError: it is not there.
    """
    device = device or ("cpu" if shape.text or shape.variant == TINY else "cuda")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"The device {device!r} cannot be used for the shape {shape.name!r}: {reason}") from error
    return device


# --------------------------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------------------------


def make_config(shape: Shape) -> Qwen2_5_VLQTSplusConfig:
    """
    The configuration of our side. Its special tokens are qtsplus-tiny's; so is its vocabulary, unless the model is
    whole: a CPU need not hold 150,000 embeddings that no prompt names.
    """
    fields = json.loads((hub_configs() / shape.variant / "config.json").read_text())
    tiny = json.loads((hub_configs() / TINY / "config.json").read_text())
    del fields["auto_map"]
    fields.update({name: tiny[name] for name in _TOKEN_IDS})
    fields["text_config"].update({name: tiny["text_config"][name] for name in _TEXT_IDS})
    if shape.text:
        fields["text_config"]["vocab_size"] = tiny["text_config"]["vocab_size"]
    fields["text_config"].update(shape.text)
    fields["vision_config"].update(shape.vision)
    return Qwen2_5_VLQTSplusConfig(**fields)


def stock_config(config: Any) -> Qwen2_5_VLConfig:
    """The configuration of the same model without a selector, from a [`Qwen2_5_VLQTSplusConfig`]."""
    ids = {name: getattr(config, name) for name in _TOKEN_IDS[:4]}
    return Qwen2_5_VLConfig(
        text_config=config.text_config.to_dict(),
        vision_config=config.vision_config.to_dict(),
        tie_word_embeddings=config.tie_word_embeddings,
        **ids,
    )


def build(shape: Shape, side: str, device: str, dtype: torch.dtype, attention: str | None = None) -> Any:
    """
    Builds one side with seeded random weights.

    Args:
        side: "stock" or "ours".
        attention: the language model's attention, and stock's vision attention; the default when `None`.
    """
    ours = make_config(shape)
    cls = Qwen2_5_VLQTSplusForConditionalGeneration if side == "ours" else Qwen2_5_VLForConditionalGeneration
    config = ours if side == "ours" else stock_config(ours)
    with no_init_weights(), torch.device(device):
        model: Any = cls._from_config(config, dtype=dtype, **_attention(side, attention))
    model.tie_weights()  # which belongs to the initialisation that was skipped
    _fill(model)
    return _ready(model, config)


def build_pair(shape: Shape, device: str, dtype: torch.dtype, attention: str | None = None) -> dict[str, Any]:
    """Both sides, on the same weights in memory."""
    ours = build(shape, "ours", device, dtype, attention)
    config = stock_config(ours.config)
    with no_init_weights(), torch.device("meta"):
        stock: Any = Qwen2_5_VLForConditionalGeneration._from_config(
            config, dtype=dtype, **_attention("stock", attention)
        )
    weights = {name: value for name, value in ours.state_dict().items() if ".qtsplus." not in name}
    stock.load_state_dict(weights, assign=True)
    stock.tie_weights()
    for name, buffer in ours.named_buffers():
        if ".qtsplus." not in name:
            folder, _, leaf = name.rpartition(".")
            stock.get_submodule(folder)._buffers[leaf] = buffer
    return {"stock": _ready(stock, config), "ours": ours}


def best_attention(device: str) -> str | None:
    """Stock's fastest attention here: flash-attn where it is installed, else `None` for the default (PyTorch's own)."""
    return "flash_attention_2" if torch.device(device).type == "cuda" and is_flash_attn_2_available() else None


def _attention(side: str, attention: str | None) -> dict[str, Any]:
    if attention is None:
        return {}
    return {"attn_implementation": attention if side == "stock" else {"text_config": attention}}


def _fill(model) -> None:
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                # Drawn in float32: a CPU draws bfloat16 one by one.
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=parameter.device).mul_(0.02))


def _ready(model, config) -> Any:
    # Random weights may end an answer at any token: the lengths that are compared have to be those that were asked for.
    model.generation_config.update(eos_token_id=None, pad_token_id=config.text_config.pad_token_id, do_sample=False)
    return model.eval()


# --------------------------------------------------------------------------------------------------------------------
# Videos and prompts
# --------------------------------------------------------------------------------------------------------------------


def make_processor(shape: Shape) -> Qwen2_5_VLQTSplusProcessor:
    """qtsplus-tiny's processor, set to look at this shape's videos as they are."""
    folder = hub_configs() / TINY
    processor = load_processor(folder, Qwen2_5_VLQTSplusConfig.from_pretrained(folder))
    video_processor = processor.video_processor
    video_processor.size = {"shortest_edge": 28 * 28, "longest_edge": shape.size[0] * shape.size[1]}
    video_processor.fps = FRAMES_PER_SECOND
    video_processor.min_frames, video_processor.max_frames = FRAME_BOUNDS.values()
    video_processor.max_video_tokens = 10**9
    return processor


def render_video(shape: Shape, frames: int, folder: Path) -> Path:
    """An mp4 of which `frames` frames are looked at; written once."""
    path = folder / f"{shape.name}-{frames}.mp4"
    if not path.exists():
        render_clip(path, seconds=frames / FRAMES_PER_SECOND, fps=shape.source_fps, size=shape.size, seed=0)
    return path


def prompt_text(processor: Any, question: str) -> str:
    """The chat prompt about one video, with one placeholder for it."""
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
