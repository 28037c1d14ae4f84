"""Attention distillation's targets on every backbone: what eager attention gives, from a few rows of any other."""

import pytest
import torch
from torch.testing import assert_close

from attention_twin import twin_targets
from qtsplus.training.attention import AttentionChoice, answer_attention


def last_words(inputs, count: int) -> torch.Tensor:
    """Labels on the last `count` tokens of a batch that is padded on the left."""
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, -count:] = inputs["input_ids"][:, -count:]
    return labels


@pytest.mark.parametrize("which", ["all", "last"])
def test_targets_equal_eager_attention(model, prepare, which):
    with_attention = [i for i, layer in enumerate(model.model.language_model.layers) if hasattr(layer, "self_attn")]
    heads = None
    if which == "last":
        count = model.config.text_config.num_attention_heads
        heads = tuple((with_attention[-1], head) for head in range(count))
    inputs = prepare("video", "two videos", "text", "earlier turns")
    labels = last_words(inputs, 4)
    before = [model.model.language_model.layers[index].self_attn.config for index in with_attention]
    targets = answer_attention(model, inputs, labels, AttentionChoice(heads))
    after = [model.model.language_model.layers[index].self_attn.config for index in with_attention]
    assert after == before
    expected = twin_targets(model, inputs, labels, heads)
    assert [len(target) > 0 for target in targets] == [True, True, False, True]
    for mine, theirs in zip(targets, expected, strict=True):
        assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
