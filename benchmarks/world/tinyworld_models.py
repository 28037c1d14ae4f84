"""Models of other backbones, large enough to learn TinyWorld.

`python -m benchmarks.world.tinyworld_models FOLDER [MODEL]` writes FOLDER/internvl and FOLDER/llava_onevision, each
with its processor, one frame of 36 visual tokens per second and the widths of qtsplus-tiny. Their weights are random,
but for a language model that may come from MODEL, a folder with a qtsplus-tiny. What a layer of the vision tower adds
starts out small in both: InternVL has a scale for it, 0.1 at the start; SigLIP has none. benchmarks/notebook.md
says how they are trained.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import InternVLVideoProcessor, LlavaOnevisionVideoProcessor, Qwen2Tokenizer
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.llava_onevision.image_processing_llava_onevision import LlavaOnevisionImageProcessor

from qtsplus.hub.files import hub_configs
from qtsplus.modeling_qtsplus_frames import (
    InternVLQTSplusConfig,
    InternVLQTSplusForConditionalGeneration,
    InternVLQTSplusProcessor,
    LlavaOnevisionQTSplusConfig,
    LlavaOnevisionQTSplusForConditionalGeneration,
    LlavaOnevisionQTSplusProcessor,
)

_FRAME = {"height": 168, "width": 168}
_SELECTOR = {"rho_min": 0.05, "rho_max": 0.2}
_TEXT = {
    **{"model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "initializer_range": 0.06},
}
_VISION = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 168, "patch_size": 14, "initializer_range": 0.08},
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


def tiny_tokenizer(**special_tokens: str) -> Qwen2Tokenizer:
    """The tokenizer of qtsplus-tiny, with further special tokens by their names."""
    folder = hub_configs() / "qtsplus-tiny"
    return Qwen2Tokenizer.from_pretrained(folder, extra_special_tokens=special_tokens, padding_side="left")


def _text_config(tokenizer: Any) -> dict[str, Any]:
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {**_TEXT, **special, "vocab_size": len(tokenizer)}


def make_internvl() -> tuple[Any, Any]:
    """An InternVL with random weights, and its processor."""
    processor: Any = InternVLQTSplusProcessor(
        image_processor=GotOcr2ImageProcessor(size=_FRAME, max_patches=2),
        tokenizer=tiny_tokenizer(
            start_image_token="<img>",
            end_image_token="</img>",
            context_image_token="<IMG_CONTEXT>",
            video_token="<video>",
        ),
        video_processor=InternVLVideoProcessor(size=_FRAME, fps=1),
        image_seq_length=36,
        chat_template=chat_template("<IMG_CONTEXT>", "<video>"),
    )
    config = InternVLQTSplusConfig(
        text_config=_text_config(processor.tokenizer),
        vision_config=_VISION,
        image_seq_length=36,
        qtsplus_config=_SELECTOR,
        image_token_id=processor.image_token_id,
        **processor.query_token_ids,
    )
    return _with_random_weights(InternVLQTSplusForConditionalGeneration, config), processor


def make_llava_onevision() -> tuple[Any, Any]:
    """A LLaVA-OneVision with random weights, and its processor."""
    pinpoints = [[20, 40], [40, 20], [40, 40]]
    processor: Any = LlavaOnevisionQTSplusProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=_FRAME, image_grid_pinpoints=pinpoints),
        tokenizer=tiny_tokenizer(image_token="<image>", video_token="<video>"),
        video_processor=LlavaOnevisionVideoProcessor(size=_FRAME, fps=1),
        num_image_tokens=144,
        vision_feature_select_strategy="full",
        chat_template=chat_template("<image>", "<video>"),
        video_newline="video",
    )
    config = LlavaOnevisionQTSplusConfig(
        text_config=_text_config(processor.tokenizer),
        vision_config={**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_grid_pinpoints=pinpoints,
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        video_newline="video",
        qtsplus_config=_SELECTOR,
        **processor.query_token_ids,
    )
    model = _with_random_weights(LlavaOnevisionQTSplusForConditionalGeneration, config)
    _start_small(model.model.vision_tower)
    return model, processor


def _with_random_weights(model_class: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class(config)


@torch.no_grad()
def _start_small(siglip: Any) -> None:
    """Scales what every layer adds by 0.1, as InternVL does: the model learns sooner, and directions at all."""
    for layer in siglip.encoder.layers:
        layer.self_attn.out_proj.weight.mul_(0.1)
        layer.mlp.fc2.weight.mul_(0.1)


@torch.no_grad()
def _take_language_model(model: Any, source: Mapping[str, torch.Tensor]) -> None:
    """Copies the weights of qtsplus-tiny's language model. The special tokens of a backbone's own stay random."""
    for name, weight in model.model.language_model.state_dict().items():
        given = source["model.language_model." + name]
        weight[: len(given)] = given
    model.lm_head.weight.copy_(model.get_input_embeddings().weight)


def write_tinyworld_models(folder: str | Path, language_model: str | Path | None = None) -> list[Path]:
    """
    Writes both models with their processors; the same weights every time.

    Args:
        language_model: a folder with a qtsplus-tiny, whose language model both start from.

    Returns:
        the folders `internvl` and `llava_onevision` in `folder`.
    """
    folders = []
    source = None if language_model is None else load_file(Path(language_model, "model.safetensors"))
    for name, make in (("internvl", make_internvl), ("llava_onevision", make_llava_onevision)):
        folders.append(Path(folder, name))
        model, processor = make()
        if source is not None:
            _take_language_model(model, source)
        for part in (model, processor):
            part.save_pretrained(folders[-1])
    return folders


__all__ = ["chat_template", "make_internvl", "make_llava_onevision", "tiny_tokenizer", "write_tinyworld_models"]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m benchmarks.world.tinyworld_models FOLDER [MODEL]")
    for written in write_tinyworld_models(*sys.argv[1:]):
        print(f"Wrote {written}")
