"""Attention distillation's targets on every backbone: what eager attention gives, from a few rows of any other."""

import pytest
import torch

from attention_twin import twin_targets
from qtsplus.training.attention import answer_attention


def last_words(inputs, count: int) -> torch.Tensor:
    """Labels on the last `count` tokens of a batch that is padded on the left."""
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, -count:] = inputs["input_ids"][:, -count:]
    return labels


@pytest.mark.parametrize("layers", [None, [1]])
def test_targets_equal_eager_attention(model, prepare, layers):
    inputs = prepare("video", "two videos", "text", "earlier turns")
    labels = last_words(inputs, 4)
    before = [layer.self_attn.config for layer in model.model.language_model.layers]
    targets = answer_attention(model, inputs, labels, layers)
    assert [layer.self_attn.config for layer in model.model.language_model.layers] == before
    expected = twin_targets(model, inputs, labels, layers)
    assert [len(target) > 0 for target in targets] == [True, True, False, True]
    for mine, theirs in zip(targets, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
