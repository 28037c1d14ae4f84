"""What is measured: models of a given size with random weights, ours and stock on the same ones, and their videos."""

import json
import tempfile
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.clips import write_mp4
from transformers import Qwen2Tokenizer
from transformers.initialization import no_init_weights
from transformers.utils import is_flash_attn_2_available
from transformers.video_utils import VideoMetadata

from qtsplus.hub.backbones import Backbone, backbone_of
from qtsplus.hub.files import hub_configs
from qtsplus.hub.loading import load_config, load_processor

SIDES = ("stock", "ours")
FRAMES_PER_SECOND = 2  # looked at, as Qwen2.5-VL does
FRAME_BOUNDS = {"min_frames": 2, "max_frames": 10**6}  # no video is too long
QUESTION = (
    "What colour is the shape that moves to the left before the yellow circle appears? Choose one of the options. "
    "A. red B. blue C. green D. purple. Answer with the letter."
)
SECOND_QUESTION = "How many shapes can be seen at the end of the video?"
TINY = "qtsplus-tiny"  # its tokenizer serves every shape; the others have none here
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"  # of its chat template
_TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, eq=False)
class Shape:
    """
    A model's size and the video that it is shown.

    Attributes:
        variant: folder of `hub_configs` whose configuration is taken.
        text, vision: what is changed in its two configurations.
        frames: frames looked at.
        size: (width, height) of the video in pixels; with Qwen-VL multiples of 28 (Qwen3-VL: 32), for one visual token
            for each 28 x 28 pixels of two frames.
        sweep: numbers of frames of the curve over them, fewest first.
        sweep_shape: the shape that the curve is taken with in place of this one.
        source_fps: frames per second of the file, all of which have to be decoded.
        tokens: special tokens that the backbone's processor asks its tokenizer for.
    """

    name: str
    variant: str
    frames: int
    size: tuple[int, int]
    sweep: tuple[int, ...] = ()
    sweep_shape: str | None = None
    source_fps: int = 24
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether it is a model that is used, meant for a GPU."""
        return not self.text and self.variant != TINY

    @property
    def backbone(self) -> Backbone:
        return backbone_of(_read(self.variant, "config")["model_type"])

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """(time, height, width) in visual tokens."""
        processor, (width, height) = make_processor(self), self.size
        merge = processor.video_processor.merge_size
        time, height, width = processor.grid_of(self.frames, height, width)[0].tolist()
        return time, height // merge, width // merge

    @property
    def visual_tokens(self) -> int:
        time, height, width = self.grid
        return time * height * width


# A quarter of the 3B model's depth at its full width, language and vision alike (9 of 36 layers, 8 of 32 blocks, one of
# them with attention over whole frames). The selector has its full depth, so it weighs four times what it does in 3B.
_QUARTER_TEXT = {"num_hidden_layers": 9, "max_window_layers": 9}
_QUARTER_VISION = {"depth": 8, "fullatt_block_indexes": [7]}
# An eighth of its width.
_EIGHTH_TEXT = {"hidden_size": 256, "intermediate_size": 1376, "num_attention_heads": 2, "num_key_value_heads": 1}
_EIGHTH_VISION = {"hidden_size": 160, "intermediate_size": 428, "num_heads": 2, "out_hidden_size": 256}

# As many frames as fit into the language models' 32,768 positions.
_INTERNVL = Shape(
    "internvl2.5-8b",
    "internvl2.5-8b",
    frames=120,
    size=(840, 560),
    sweep=(8, 32, 64, 120),
    tokens={
        **{"start_image_token": "<img>", "end_image_token": "</img>"},
        **{"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
    },
)
_LLAVA_VIDEO = Shape(
    "llava-video-7b",
    "llava-video-7b",
    frames=150,
    size=(840, 560),
    sweep=(8, 32, 64, 150),
    tokens={"image_token": "<image>", "video_token": "<video>"},
)
# As many tokens as the 3B's, 32 x 32 pixels of two frames each.
_QWEN3_VL = Shape("qwen3-vl-8b", "qwen3-vl-8b", frames=600, size=(960, 640), sweep=(8, 64, 200, 400, 600))
_QWEN3_5 = replace(_QWEN3_VL, name="qwen3.5-9b", variant="qwen3.5-9b")

_NARROW = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_NARROW_TEXT = {**_NARROW, "hidden_size": 256, "num_key_value_heads": 1, "head_dim": 128}
_NARROW_QWEN = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 256}


def _narrow(shape: Shape, vision: dict[str, Any]) -> Shape:
    """With two narrow layers on either side; where a frame's size does not count, it has as many tokens as ever."""
    name, size = f"{shape.name}-tiny", (96, 128)
    return replace(shape, name=name, frames=4, sweep=(2,), source_fps=8, size=size, text=_NARROW_TEXT, vision=vision)


MODEL_SHAPES = {
    "tiny": Shape("tiny", TINY, frames=8, size=(112, 112), sweep=(4, 8), source_fps=8),
    "cpu": Shape(
        "cpu",
        "qtsplus-3b",
        frames=56,
        size=(448, 252),
        sweep_shape="small",
        text=_QUARTER_TEXT,
        vision=_QUARTER_VISION,
    ),
    # An eighth of the width too: the paper's curve over the number of frames, on a CPU.
    "small": Shape(
        "small",
        "qtsplus-3b",
        frames=600,
        size=(224, 112),
        sweep=(8, 64, 200, 600, 1200),
        source_fps=8,
        text={**_QUARTER_TEXT, **_EIGHTH_TEXT},
        vision={**_QUARTER_VISION, **_EIGHTH_VISION},
    ),
    # The same with every layer of the 3B, so that the selector weighs beside them what it weighs there.
    "deep": Shape("deep", "qtsplus-3b", frames=64, size=(224, 112), text=_EIGHTH_TEXT, vision=_EIGHTH_VISION),
    # Two layers of the 3B, for times that are scaled to all of them.
    "layers": Shape(
        "layers",
        "qtsplus-3b",
        frames=8,
        size=(224, 112),
        text={"num_hidden_layers": 2, "max_window_layers": 2},
        vision={"depth": 1, "fullatt_block_indexes": [0]},
    ),
    "3b": Shape("3b", "qtsplus-3b", frames=600, size=(840, 560), sweep=(8, 64, 200, 400, 600, 900)),
    "internvl2.5-8b": _INTERNVL,
    "llava-video-7b": _LLAVA_VIDEO,
    "qwen3-vl-8b": _QWEN3_VL,
    "qwen3.5-9b": _QWEN3_5,
    # A quarter of the depth of these, as in "cpu".
    "internvl2.5-8b-cpu": replace(
        _INTERNVL,
        name="internvl2.5-8b-cpu",
        frames=16,
        size=(448, 252),
        sweep=(4, 8, 16),
        text={"num_hidden_layers": 8},
        vision={"num_hidden_layers": 6},
    ),
    "llava-video-7b-cpu": replace(
        _LLAVA_VIDEO,
        name="llava-video-7b-cpu",
        frames=20,
        size=(448, 252),
        sweep=(4, 10, 20),
        text={"num_hidden_layers": 7},
        vision={"num_hidden_layers": 7},  # of 26
    ),
    "qwen3-vl-8b-cpu": replace(
        _QWEN3_VL,
        name="qwen3-vl-8b-cpu",
        frames=56,
        size=(512, 288),
        sweep=(4, 20, 56),
        text={"num_hidden_layers": 9},
        vision={"depth": 7, "deepstack_visual_indexes": [2, 4, 6]},  # of 27
    ),
    "qwen3.5-9b-cpu": replace(
        _QWEN3_5,
        name="qwen3.5-9b-cpu",
        frames=56,
        size=(512, 288),
        sweep=(4, 20, 56),
        text={"num_hidden_layers": 8},  # 6 of linear and 2 of full attention
        vision={"depth": 7},  # of 27
    ),
    # For tests, as "tiny".
    "internvl2.5-8b-tiny": _narrow(_INTERNVL, _NARROW),
    "llava-video-7b-tiny": _narrow(_LLAVA_VIDEO, _NARROW),
    "qwen3-vl-8b-tiny": _narrow(_QWEN3_VL, {**_NARROW_QWEN, "deepstack_visual_indexes": [0]}),
    "qwen3.5-9b-tiny": replace(
        _narrow(_QWEN3_5, _NARROW_QWEN),
        text={
            **{**_NARROW_TEXT, "head_dim": 256, "layer_types": ["linear_attention", "full_attention"]},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        },
    ),
}


def find_shape(name: str) -> Shape:
    """
    Raises:
        ValueError: no such shape.
    """
    if name not in MODEL_SHAPES:
        raise ValueError(f"There is no shape {name!r}; expected one of {', '.join(MODEL_SHAPES)}.")
    return MODEL_SHAPES[name]


def find_device(shape: Shape, device: str | None) -> str:
    """
    The device that was asked for, or else the shape's: a GPU for a whole model, the CPU for the others.

    Raises:
        ValueError: it is not there.
    """
    device = device or ("cuda" if shape.whole else "cpu")
    if device == "meta":
        raise ValueError("The device 'meta' holds no values; expected one that computes, such as 'cuda' or 'cpu'.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"The device {device!r} cannot be used for the shape {shape.name!r}: {reason}") from error
    return device


# --------------------------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------------------------


def make_config(shape: Shape) -> Any:
    """
    The configuration of our side. Its special tokens are those of the shape's processor; so is its vocabulary, unless
    the model is whole: a CPU need not hold 150,000 embeddings that no prompt names.
    """
    fields, tiny, processor = _read(shape.variant, "config"), _read(TINY, "config"), make_processor(shape)
    del fields["auto_map"]
    ids = {name: tiny[name] for name in ("vision_start_token_id", "vision_end_token_id")}
    for kind, placeholder in zip(("image", "video"), processor.placeholder_ids, strict=True):
        ids |= dict.fromkeys((f"{kind}_token_id", f"{kind}_token_index"), placeholder)
    ids |= processor.query_token_ids
    fields.update({name: value for name, value in ids.items() if name in fields})
    fields["text_config"].update({name: tiny["text_config"][name] for name in _TEXT_IDS})
    if shape.text:
        fields["text_config"]["vocab_size"] = len(processor.tokenizer)
        fields["text_config"].pop("layer_types", None)
    fields["text_config"].update(shape.text)
    fields["vision_config"].update(shape.vision)
    return shape.backbone.config.from_dict(fields)


def stock_config(config: Any) -> Any:
    """The configuration of the same model without a selector."""
    kind = backbone_of(config.model_type).stock_model.config_class
    known = {field.name for field in fields(kind)} - {"model_type", "architectures", "transformers_version"}
    return kind(**{name: value for name, value in config.to_dict().items() if name in known})


def stock_processor(kind: type) -> Any:
    """The class of Transformers that one of our classes of processors derives from."""
    return next(parent for parent in kind.__mro__ if parent.__module__.startswith("transformers."))


def write_stock(source: Path, out: Path) -> Path:
    """The model and the processor of one of our folders as Transformers' own, in `out`."""
    config, processor = load_config(source), load_processor(source)
    backbone = backbone_of(config.model_type)
    stock = backbone.stock_model.from_pretrained(source, config=stock_config(config), dtype="auto")
    stock.save_pretrained(out, save_original_format=False)
    parts = {name: getattr(processor, name) for name in (*processor.get_attributes(), "chat_template")}
    stock_processor(backbone.processor)(**parts).save_pretrained(out)
    return out


def build(shape: Shape, side: str, device: str, dtype: torch.dtype, attention: str | None = None) -> Any:
    """
    Builds one side with seeded random weights.

    Args:
        side: "stock" or "ours".
        attention: the language model's attention, and stock's vision attention; the default when `None`.
    """
    ours = make_config(shape)
    cls = shape.backbone.model if side == "ours" else shape.backbone.stock_model
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
        stock = shape.backbone.stock_model._from_config(config, dtype=dtype, **_attention("stock", attention))
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


def make_processor(shape: Shape) -> Any:
    """The variant's processor around qtsplus-tiny's tokenizer, set to look at this shape's videos as they are."""
    # Ids are another tokenizer's.
    settings = {name: value for name, value in _read(shape.variant, "processor_config").items() if name[-3:] != "_id"}
    tokenizer = Qwen2Tokenizer.from_pretrained(hub_configs() / TINY, extra_special_tokens=shape.tokens)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        Path(folder, "processor_config.json").write_text(json.dumps(settings))
        processor = shape.backbone.processor.from_pretrained(folder)
    template = (hub_configs() / TINY / "chat_template.jinja").read_text()
    processor.chat_template = template.replace(_VIDEO, _VIDEO if not shape.tokens else processor.video_token)
    video_processor = processor.video_processor
    video_processor.fps = FRAMES_PER_SECOND
    video_processor.min_frames, video_processor.max_frames = FRAME_BOUNDS.values()
    if processor.native_resolution:
        video_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 10**12}  # of a frame, or of a video
        video_processor.max_video_tokens = 10**9
    return processor


def make_stock_processor(shape: Shape) -> Any:
    """The processor of Transformers with the same settings."""
    with tempfile.TemporaryDirectory() as folder:
        make_processor(shape).save_pretrained(folder)
        return stock_processor(shape.backbone.processor).from_pretrained(folder)


def _read(variant: str, name: str) -> dict[str, Any]:
    return json.loads((hub_configs() / variant / f"{name}.json").read_text())


def render_video(shape: Shape, frames: int, folder: Path) -> Path:
    """An mp4 of which `frames` frames are looked at, no two alike: stock would encode equal ones too; written once."""
    path = folder / f"{shape.name}-{frames}.mp4"
    if not path.exists():
        width, height = shape.size
        y, x = np.mgrid[:height, :width]
        diagonal = np.arange(height + width)  # as few sines as there are values of x + y
        moving = (
            (128 + 100 * np.sin((diagonal + 5 * index) / 20))[x + y]
            for index in range(frames * shape.source_fps // FRAMES_PER_SECOND)
        )
        write_mp4(path, (np.repeat(wave[..., None].astype(np.uint8), 3, -1) for wave in moving), shape.source_fps)
    return path


def video_inputs(shape: Shape, side: str) -> dict[str, torch.Tensor]:
    """
    What a side's processor makes of the question and a grey video. Pixels are on the meta device, without values:
    [`fill_pixels`] draws them.
    """
    processor = make_processor(shape) if side == "ours" else make_stock_processor(shape)
    width, height = shape.size
    frames = np.full((shape.frames, height, width, 3), 128, dtype=np.uint8)
    metadata = VideoMetadata(total_num_frames=len(frames), fps=FRAMES_PER_SECOND, frames_indices=[*range(len(frames))])
    inputs = processor(
        text=[prompt_text(processor, QUESTION)],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    return {name: torch.as_tensor(value, device="meta" if "pixel" in name else None) for name, value in inputs.items()}


def fill_pixels(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same inputs with random pixels, on the CPU."""
    return {name: torch.randn(value.shape) if value.is_meta else value for name, value in inputs.items()}


def prompt_text(processor: Any, question: str) -> str:
    """The chat prompt about one video, with one placeholder for it."""
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
