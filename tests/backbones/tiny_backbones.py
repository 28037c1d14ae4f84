"""A tiny random model of every backbone, with its real processor around the tokenizer of qtsplus-tiny."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.llava_onevision.image_processing_llava_onevision import LlavaOnevisionImageProcessor

import qtsplus
from qtsplus.hub.files import hub_configs
from qtsplus.hub.loading import processor_of
from tiny import PAPER

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "max_position_embeddings": 8192,
}


_TURNS = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' %}IMAGE
{%- elif part.type == 'video' %}VIDEO
{%- else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def chat_template(image: str, video: str) -> str:
    """Turns as Qwen writes them, with a backbone's own placeholders."""
    return _TURNS.replace("IMAGE", image).replace("VIDEO", video)


def tiny_tokenizer(**special_tokens: str) -> transformers.Qwen2Tokenizer:
    """The tokenizer of qtsplus-tiny, with further special tokens by their names."""
    folder = hub_configs() / "qtsplus-tiny"
    return transformers.Qwen2Tokenizer.from_pretrained(folder, extra_special_tokens=special_tokens, padding_side="left")


@dataclass(frozen=True)
class Backbone:
    """
    What the contract needs to know of a backbone.

    Args:
        config: from the fields of `qtsplus_config` and the processor to a configuration.
        processor: makes the processor.
        stock_inputs: from our inputs to those of the stock model, `stock`.
    """

    name: str
    model: type
    stock: type
    config: Callable[..., Any]
    processor: Callable[[], Any]
    stock_inputs: Callable[[Any, dict], dict]

    @property
    def without_images(self) -> bool:
        return self.config is llava_config

    def build(self, processor, seed: int = 0, **selector):
        """Every parameter random and of a size that matters; a layer of the selector reads the question."""
        torch.manual_seed(seed)
        model = self.model(self.config(processor, {**PAPER, "query_states": "layer", **selector}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                centre = 1.0 if parameter.ndim == 1 and "norm" in name and name.endswith("weight") else 0.0
                parameter.normal_(centre, 0.12)
        return model.eval()

    def stock_twin(self, model):
        """The stock model with the same weights."""
        config = model.config.to_dict()
        for name in ("qtsplus_config", "video_newline"):
            config.pop(name, None)
        stock = self.stock(self.stock.config_class(**{**config, "model_type": self.stock.config_class.model_type}))
        stock.load_state_dict({name: value for name, value in model.state_dict().items() if ".qtsplus." not in name})
        return stock.eval()


def text_config(processor, **fields) -> dict:
    tokenizer = processor.tokenizer
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {**TEXT, **special, "vocab_size": len(tokenizer), **fields}


# --------------------------------------------------------------------------------------------------------------------


FRAME_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
}


def internvl_processor() -> qtsplus.InternVLQTSplusProcessor:
    tokenizer = tiny_tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    size = {"height": 32, "width": 32}
    return qtsplus.InternVLQTSplusProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, max_patches=2),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(size=size),
        image_seq_length=16,
        chat_template=chat_template("<IMG_CONTEXT>", "<video>"),
    )


def internvl_config(processor, selector) -> qtsplus.InternVLQTSplusConfig:
    return qtsplus.InternVLQTSplusConfig(
        text_config={**text_config(processor), "model_type": "qwen2"},
        vision_config={**FRAME_VISION, "image_size": 32},
        image_seq_length=16,
        qtsplus_config=selector,
        image_token_id=processor.image_token_id,
        **processor.query_token_ids,
    )


def internvl_stock_inputs(model, inputs) -> dict:
    """Tiles and frames in the order of the prompts, all under the placeholder of an image."""
    inputs = dict(inputs)
    config = model.config
    ids = inputs["input_ids"]
    tiles = list(inputs.pop("pixel_values", torch.empty(0)))
    frames = list(inputs.pop("pixel_values_videos", torch.empty(0)))
    pixels = []
    for row in ids:
        for kind in row[(row == config.image_token_id) | (row == config.video_token_id)].view(-1, 16)[:, 0]:
            pixels.append((frames if kind == config.video_token_id else tiles).pop(0))
    stock = {"input_ids": ids.masked_fill(ids == config.video_token_id, config.image_token_id)}
    if pixels:
        stock["pixel_values"] = torch.stack(pixels)
    return {**stock, "attention_mask": inputs["attention_mask"]}


INTERNVL = Backbone(
    "internvl",
    qtsplus.InternVLQTSplusForConditionalGeneration,
    transformers.InternVLForConditionalGeneration,
    internvl_config,
    internvl_processor,
    internvl_stock_inputs,
)

# --------------------------------------------------------------------------------------------------------------------


def llava_processor(video_newline: str) -> qtsplus.LlavaOnevisionQTSplusProcessor:
    size = {"height": 20, "width": 20}
    return qtsplus.LlavaOnevisionQTSplusProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=[[20, 40], [40, 20], [40, 40]]),
        tokenizer=tiny_tokenizer(image_token="<image>", video_token="<video>"),
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=25,
        vision_feature_select_strategy="full",
        chat_template=chat_template("<image>", "<video>"),
        video_newline=video_newline,
    )


def llava_config(processor, selector) -> qtsplus.LlavaOnevisionQTSplusConfig:
    return qtsplus.LlavaOnevisionQTSplusConfig(
        text_config={**text_config(processor), "model_type": "qwen2"},
        vision_config={"model_type": "siglip_vision_model", **FRAME_VISION, "image_size": 20, "vision_use_head": False},
        image_grid_pinpoints=processor.image_processor.image_grid_pinpoints,
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        video_newline=processor.video_newline,
        qtsplus_config=selector,
        **processor.query_token_ids,
    )


def llava_stock_inputs(model, inputs) -> dict:
    """Videos of one length."""
    stock = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    if "pixel_values_videos" in inputs:
        frames = inputs["video_grid_thw"][:, 0]
        stock["pixel_values_videos"] = inputs["pixel_values_videos"].unflatten(0, (len(frames), int(frames[0])))
    return stock


class LlavaVideo(transformers.LlavaOnevisionForConditionalGeneration):
    """What LLaVA-Video's own code does to a video: a newline behind every row of every frame, and none at the end."""

    def __init__(self, config):
        super().__init__(config)
        side = 3  # tokens along a side of a pooled frame

        def with_rows_ended(pixel_values_videos, **kwargs):
            output = transformers.LlavaOnevisionModel.get_video_features(self.model, pixel_values_videos, **kwargs)
            count = pixel_values_videos.shape[1] * side * side
            tokens = output.pooler_output[:, :count].unflatten(1, (-1, side))
            newline = self.model.image_newline.expand(*tokens.shape[:2], 1, -1)
            rows = torch.cat([tokens, newline], dim=2).flatten(1, 2)
            # Below Transformers 5.18 it is `forward` that puts the last newline.
            output.pooler_output = rows if output.pooler_output.shape[1] > count else rows[:, :-1]
            return output

        self.model.get_video_features = with_rows_ended


LLAVA_ONEVISION, LLAVA_VIDEO = (
    Backbone(
        name,
        qtsplus.LlavaOnevisionQTSplusForConditionalGeneration,
        stock,
        llava_config,
        lambda newline=newline: llava_processor(newline),
        llava_stock_inputs,
    )
    for name, newline, stock in (
        ("llava_onevision", "video", transformers.LlavaOnevisionForConditionalGeneration),
        ("llava_video", "row", LlavaVideo),
    )
)

# --------------------------------------------------------------------------------------------------------------------


def qwen_stock_inputs(model, inputs) -> dict:
    names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    stock = {name: inputs[name] for name in names if name in inputs}
    return {**stock, "mm_token_type_ids": model.model.token_types(inputs["input_ids"])}


PIXELS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
FRAME = {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 12}
WHOLE_VIDEO = {"shortest_edge": 64, "longest_edge": 64 * 96}
QWEN3_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}


def qwen_processor(cls, video_processor, size):
    triple = "<|vision_start|><|{}_pad|><|vision_end|>"
    return cls(
        image_processor=transformers.Qwen2VLImageProcessor(size=FRAME, **PIXELS),
        tokenizer=tiny_tokenizer(),
        video_processor=video_processor(size=size, **PIXELS),
        chat_template=chat_template(triple.format("image"), triple.format("video")),
    )


def qwen_token_ids(processor) -> dict:
    token_id = processor.tokenizer.convert_tokens_to_ids
    vision = {f"vision_{end}_token_id": token_id(f"<|vision_{end}|>") for end in ("start", "end")}
    return {"image_token_id": processor.image_token_id, **vision, **processor.query_token_ids}


def qwen3_config(processor, selector) -> qtsplus.Qwen3VLQTSplusConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return qtsplus.Qwen3VLQTSplusConfig(
        text_config=text_config(processor, num_hidden_layers=3, head_dim=16, rope_parameters=rope),
        vision_config={**QWEN3_VISION, "depth": 3, "deepstack_visual_indexes": [0, 1]},
        qtsplus_config=selector,
        **qwen_token_ids(processor),
    )


QWEN3_VL = Backbone(
    "qwen3_vl",
    qtsplus.Qwen3VLQTSplusForConditionalGeneration,
    transformers.Qwen3VLForConditionalGeneration,
    qwen3_config,
    lambda: qwen_processor(qtsplus.Qwen3VLQTSplusProcessor, transformers.Qwen3VLVideoProcessor, WHOLE_VIDEO),
    qwen_stock_inputs,
)


def qwen3_5_config(processor, selector) -> qtsplus.Qwen3_5QTSplusConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }
    linear = {"key_head_dim": 8, "value_head_dim": 16, "num_key_heads": 2, "num_value_heads": 4}
    return qtsplus.Qwen3_5QTSplusConfig(
        text_config=text_config(
            processor,
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            head_dim=16,
            rope_parameters=rope,
            **{f"linear_{name}": value for name, value in linear.items()},
        ),
        vision_config={**QWEN3_VISION, "depth": 2},
        qtsplus_config=selector,
        **qwen_token_ids(processor),
    )


QWEN3_5 = Backbone(
    "qwen3_5",
    qtsplus.Qwen3_5QTSplusForConditionalGeneration,
    transformers.Qwen3_5ForConditionalGeneration,
    qwen3_5_config,
    lambda: qwen_processor(qtsplus.Qwen3_5QTSplusProcessor, transformers.Qwen3VLVideoProcessor, WHOLE_VIDEO),
    qwen_stock_inputs,
)


def qwen2_config(processor, selector) -> qtsplus.Qwen2VLQTSplusConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return qtsplus.Qwen2VLQTSplusConfig(
        text_config=text_config(processor, rope_parameters=rope),
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
        qtsplus_config=selector,
        video_token_id=processor.video_token_id,
        **qwen_token_ids(processor),
    )


QWEN2_VL = Backbone(
    "qwen2_vl",
    qtsplus.Qwen2VLQTSplusForConditionalGeneration,
    transformers.Qwen2VLForConditionalGeneration,
    qwen2_config,
    lambda: qwen_processor(qtsplus.Qwen2VLQTSplusProcessor, transformers.Qwen2VLVideoProcessor, FRAME),
    qwen_stock_inputs,
)


def qwen2_5_processor():
    folder = hub_configs() / "qtsplus-tiny"
    return processor_of(folder, qtsplus.Qwen2_5_VLQTSplusConfig.from_pretrained(folder))


def qwen2_5_config(processor, selector) -> qtsplus.Qwen2_5_VLQTSplusConfig:
    settings = qtsplus.Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / "qtsplus-tiny").to_dict()
    for name in ("qtsplus_config", "model_type", "auto_map", "architectures", "dtype"):
        settings.pop(name, None)
    return qtsplus.Qwen2_5_VLQTSplusConfig(**settings, qtsplus_config=selector)


def qwen2_5_stock_inputs(model, inputs) -> dict:
    stock = qwen_stock_inputs(model, inputs)
    return {**stock, **{name: inputs[name] for name in ("second_per_grid_ts",) if name in inputs}}


QWEN2_5_VL = Backbone(
    "qwen2_5_vl",
    qtsplus.Qwen2_5_VLQTSplusForConditionalGeneration,
    transformers.Qwen2_5_VLForConditionalGeneration,
    qwen2_5_config,
    qwen2_5_processor,
    qwen2_5_stock_inputs,
)

BACKBONES = (QWEN2_5_VL, INTERNVL, LLAVA_ONEVISION, LLAVA_VIDEO, QWEN3_VL, QWEN2_VL, QWEN3_5)
# The other two differ from these by a vision tower, by positions in time and by where newlines stand alone, which the
# comparisons with stock look at: for what asks of none of that.
UNLIKE = tuple(one for one in BACKBONES if one.name not in ("qwen2_vl", "llava_onevision"))
each_unlike = pytest.mark.parametrize("backbone", UNLIKE, ids=lambda one: one.name, indirect=True, scope="session")
