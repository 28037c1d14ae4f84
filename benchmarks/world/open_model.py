"""The base that learns the world without a grid, with random weights, and its processor.

The shape of qtsplus-tiny, which it became. Its tower has four layers, since what it sees may lie anywhere in a patch.
`python -m benchmarks.world.open_model FOLDER [SEED]`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from qtsplus.hub.files import hub_configs
from qtsplus.model.modeling_qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration

from .openworld import STAYS
from .tokenizer import SPECIAL_TOKENS, build_processor, write_sentences


def make_open_model(folder: str | Path, seed: int = 0) -> tuple[Any, Any]:
    """
    Writes a model with random weights and its processor, and loads them.

    Args:
        folder: where to.
        seed: of the weights.

    Returns:
        model and processor.
    """
    words = [text for word in STAYS for text in (word, f" {word}")]
    processor = build_processor(folder, texts=[*write_sentences(), *words * 30])
    values = json.loads((hub_configs() / "qtsplus-tiny" / "config.json").read_text(encoding="utf-8"))
    ids = {name: processor.tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    values |= {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "user_turn_token_ids": processor.tokenizer("<|im_start|>user")["input_ids"],
        "turn_end_token_id": ids["<|im_end|>"],
        "special_token_ids": sorted(ids.values()),
        "tool_response_token_ids": processor.query_token_ids["tool_response_token_ids"],
    }
    values["text_config"] |= {
        "vocab_size": len(processor.tokenizer),
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLQTSplusForConditionalGeneration(Qwen2_5_VLQTSplusConfig.from_dict(values))
    model.save_pretrained(folder)
    return model, processor


if __name__ == "__main__":
    make_open_model(sys.argv[1], int((sys.argv[2:] or ["0"])[0]))
