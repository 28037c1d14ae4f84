"""A tiny random model of every backbone, with its real processor around the tokenizer of qtsplus-tiny."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import InternVLForConditionalGeneration, InternVLVideoProcessor, Qwen2Tokenizer
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor

from qtsplus.hub.files import hub_configs
from qtsplus.modeling_qtsplus_internvl import (
    InternVLQTSplusConfig,
    InternVLQTSplusForConditionalGeneration,
    InternVLQTSplusProcessor,
)

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "max_position_embeddings": 8192,
}

TURNS = """\
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

    def build(self, processor, seed: int = 0, **selector):
        """Every parameter random and of a size that matters."""
        torch.manual_seed(seed)
        model = self.model(self.config(processor, selector))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                centre = 1.0 if parameter.ndim == 1 and "norm" in name and name.endswith("weight") else 0.0
                parameter.normal_(centre, 0.12)
        return model.eval()

    def stock_twin(self, model):
        """The stock model with the same weights."""
        config = model.config.to_dict()
        config.pop("qtsplus_config")
        stock = self.stock(self.stock.config_class(**{**config, "model_type": self.stock.config_class.model_type}))
        stock.load_state_dict({name: value for name, value in model.state_dict().items() if ".qtsplus." not in name})
        return stock.eval()


def tiny_tokenizer(**named) -> Qwen2Tokenizer:
    """The tokenizer of qtsplus-tiny, with further special tokens by their names."""
    folder = hub_configs() / "qtsplus-tiny"
    return Qwen2Tokenizer.from_pretrained(folder, extra_special_tokens=named, padding_side="left")


def text_config(processor, **fields) -> dict:
    tokenizer = processor.tokenizer
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {**TEXT, **special, "vocab_size": len(tokenizer), **fields}


# --------------------------------------------------------------------------------------------------------------------


def internvl_processor() -> InternVLQTSplusProcessor:
    tokenizer = tiny_tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    size = {"height": 32, "width": 32}
    return InternVLQTSplusProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, max_patches=2),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=16,
        chat_template=TURNS.replace("IMAGE", "<IMG_CONTEXT>").replace("VIDEO", "<video>"),
    )


def internvl_config(processor, selector) -> InternVLQTSplusConfig:
    return InternVLQTSplusConfig(
        text_config={**text_config(processor), "model_type": "qwen2"},
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 4,
        },
        image_seq_length=16,
        qtsplus_config=selector,
        image_token_id=processor.image_token_id,
        **processor.query_token_ids,
    )


def internvl_stock_inputs(model, inputs) -> dict:
    """Tiles and frames in the order of the prompts, all under the placeholder of an image."""
    inputs = dict(inputs)
    config, ids = model.config, inputs["input_ids"]
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
    InternVLQTSplusForConditionalGeneration,
    InternVLForConditionalGeneration,
    internvl_config,
    internvl_processor,
    internvl_stock_inputs,
)

BACKBONES = (INTERNVL,)
