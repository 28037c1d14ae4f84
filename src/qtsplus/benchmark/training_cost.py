"""The cost model of training with attention distillation: what is done once, and what a step computes and holds."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..backbones import backbone_of
from ..selector_qtsplus import kept_count
from ..training.freezing import part_of
from .cost import DATA_SHEETS, Cost, mixing_flops, stage_costs

# Trained weights are held in float32, with a gradient and two moments of AdamW.
TRAINED_BYTES, FROZEN_BYTES = 16, 2


@dataclass(frozen=True)
class TrainingCosts:
    """
    One question about one video, the selector trained and all else frozen, in bfloat16.

    Attributes:
        visual_tokens, kept: before and behind the selection.
        vision: encoding the video.
        teacher: the language model over all tokens, forward.
        step: selection and the language model over the kept tokens, forward and backward.
        resting: bytes of weights, gradients and the optimizer.
        reading, stepping: the least bytes of activations, while the teacher reads and in a step.
        features: bytes of the video's tokens.
    """

    visual_tokens: int
    kept: int
    vision: float
    teacher: float
    step: float
    resting: float
    reading: float
    stepping: float
    features: float


def training_costs(
    config: Any, grid: tuple[int, int, int], text_tokens: int, question_tokens: int, retention: float
) -> TrainingCosts:
    """
    What training a selector takes, with gradient checkpointing.

    Args:
        config: as for [`stage_costs`].
        grid: (time, height, width) in visual tokens.
        text_tokens: of prompt and answer, beside the visual ones. The logits of the last one alone are counted.
        question_tokens: of them, those that the selection goes by.
    """
    costs = stage_costs(config, grid, text_tokens, question_tokens, retention)
    stock, ours, text = costs["stock"], costs["ours"], config.text_config
    num_tokens = math.prod(grid)
    kept = kept_count(retention, num_tokens, config.qtsplus_config.n_max)
    length, whole = text_tokens + kept, text_tokens + num_tokens
    step = 3 * (ours["relevance"].flops + ours["re-encode"].flops) + language_model_step(text, ours["prefill"], length)
    with torch.device("meta"):
        model: Any = backbone_of(config.model_type).model(config)
    resting = sum(
        weight.numel() * (TRAINED_BYTES if part_of(name) == "selector" else FROZEN_BYTES)
        for name, weight in model.named_parameters()
    )
    features = FROZEN_BYTES * num_tokens * model.model.token_width
    states = FROZEN_BYTES * text.hidden_size
    return TrainingCosts(
        visual_tokens=num_tokens,
        kept=kept,
        vision=stock["vision"].flops,
        teacher=stock["prefill"].flops,
        step=step,
        resting=float(resting),
        reading=float(_layer_bytes(text, whole) + features),
        stepping=float(_layer_bytes(text, length) + text.num_hidden_layers * length * states + features),
        features=float(features),
    )


def language_model_step(text: Any, forward: Cost, length: int) -> float:
    """
    Forward, forward again from the checkpoints, and backward to the inputs of a frozen language model.

    A product with frozen weights has one gradient, one of two tokens two. The output head is not run again, nor is a
    layer's last product.
    """
    mixing = mixing_flops(text, length)
    last = text.num_hidden_layers * 2 * length * text.hidden_size * text.intermediate_size
    head = 2 * text.hidden_size * text.vocab_size
    return 3 * (forward.flops - mixing - head) - last + 4 * mixing + 2 * head


def _layer_bytes(text: Any, length: int) -> int:
    """What one layer holds at its widest: the two inner states of the feed-forward block, and the residual."""
    return FROZEN_BYTES * length * (2 * text.intermediate_size + text.hidden_size)


def training_table(costs: dict[str, tuple[TrainingCosts, TrainingCosts]]) -> str:
    """
    Markdown: a row for each model, its first stage from features and its second from pixels.

    Args:
        costs: by the model's name, those of either stage.
    """
    device = DATA_SHEETS[-1]
    heads = [
        *("model", "visual tokens", "features of a clip, MB", "encoding, TFLOP", "teacher, TFLOP"),
        *("first stage's step, TFLOP", f"s a question on {device.name}", "memory, GB"),
        *("second stage's step with encoding, TFLOP", f"s on {device.name}", "memory, GB"),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for name, (first, second) in costs.items():
        whole = second.vision + second.step
        cells = [
            *(name, f"{first.visual_tokens:,}", f"{first.features / 1e6:.0f}"),
            *(f"{value / 1e12:.3g}" for value in (first.vision, first.teacher, first.step)),
            f"{(first.teacher + first.step) / device.flops:.2g}",
            f"{(first.resting + max(first.reading, first.stepping)) / 1e9:.1f}",
            *(f"{whole / 1e12:.3g}", f"{whole / device.flops:.2g}"),
            f"{(second.resting + second.stepping) / 1e9:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
