"""Starting points of a fresh selector."""

from typing import Any

import torch

INITIALISATIONS = ("identity", "language_model")


@torch.no_grad()
def initialise_selector(model: Any, method: str) -> None:
    """
    Sets a selector's starting point; what a method does not name stays as it is.

    Args:
        model: a QTSplus model.
        method: `"identity"` zeroes what the re-encoder adds to its tokens, and a layer over the question to its words,
            as in a fresh model. `"language_model"` is the paper's: the i-th of the scoring, the re-encoding and the
            question's layers takes attention and norms of the i-th of the language model.

    Raises:
        ValueError: an unknown method, or a language model of another shape or with too few layers.
    """
    selector: Any = model.model.qtsplus
    if method == "identity":
        for layer in [*selector.reencode_layers, *selector.question_layers]:
            for weight in (layer.o_proj.weight, layer.ffn[-1].weight, layer.ffn[-1].bias):
                weight.zero_()
    elif method == "language_model":
        layers = model.model.language_model.layers
        for group in (selector.scoring_layers, selector.reencode_layers, selector.question_layers):
            if len(group) > len(layers):
                raise ValueError(f"{len(group)} selector layers cannot start from {len(layers)} language model layers.")
            for ours, source in zip(group, layers, strict=False):
                _copy_attention(ours, source)
    else:
        raise ValueError(f"method={method!r}: expected one of {INITIALISATIONS}.")


def _copy_attention(ours: Any, source: Any) -> None:
    refusal = f"A {type(source).__name__} of the language model has no attention to start the selector from"
    if not hasattr(source, "self_attn"):
        raise ValueError(f'{refusal}; use "identity".')
    pairs = [
        (ours.q_norm, source.input_layernorm),
        (ours.kv_norm, source.input_layernorm),
        (ours.ffn_norm, source.post_attention_layernorm),
        *((getattr(ours, name), getattr(source.self_attn, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    ]
    for target, origin in pairs:
        source_tensors = origin.state_dict()
        for name, parameter in target.named_parameters():
            if name not in source_tensors or source_tensors[name].shape != parameter.shape:
                raise ValueError(f'{refusal} ({name} {list(parameter.shape)}); use "identity".')
            parameter.copy_(source_tensors[name])
