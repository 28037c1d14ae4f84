"""Attention distillation's targets on every backbone: what eager attention gives, from a few rows of any other."""

import pytest
import torch
from torch.testing import assert_close

from attention_twin import twin_targets
from qtsplus.training.attention import AttentionChoice, answer_attention


def last_words(inputs) -> torch.Tensor:
    """Labels on the last four tokens of a batch that is padded on the left."""
    labels = inputs["input_ids"].clone()
    labels[:, :-4] = -100
    return labels


@pytest.mark.parametrize("which", ["all", "last"])
def test_targets_equal_eager_attention(model, prepare, which):
    attentions = {}
    for number, layer in enumerate(model.model.language_model.layers):
        if hasattr(layer, "self_attn"):
            attentions[number] = layer.self_attn
    heads = None
    if which == "last":
        last = max(attentions)
        count = model.config.text_config.num_attention_heads
        heads = tuple((last, head) for head in range(count))
    inputs = prepare("video", "two videos", "text", "earlier turns")
    labels = last_words(inputs)
    before = [attention.config for attention in attentions.values()]
    targets = answer_attention(model, inputs, labels, AttentionChoice(heads))
    after = [attention.config for attention in attentions.values()]
    assert after == before
    assert [len(target) > 0 for target in targets] == [True, True, False, True]
    assert_close(targets, twin_targets(model, inputs, labels, heads), atol=1e-5, rtol=1e-5)
