"""Starting points of a fresh selector."""

import pytest
import torch

from qtsplus.hub.convert import initialise_selector
from tiny import batch, prompt, tiny_model


def test_identity_hands_the_tokens_on():
    model = tiny_model()
    initialise_selector(model, "identity")
    layer = model.model.qtsplus.reencode_layers[0]
    tokens = torch.randn(5, 64)
    assert torch.equal(layer(tokens, tokens), tokens)


def test_language_model_layers_give_their_attention():
    model = tiny_model()
    initialise_selector(model, "language_model")
    selector, layers = model.model.qtsplus, model.model.language_model.layers
    for group in (selector.scoring_layers, selector.reencode_layers):
        for ours, source in zip(group, layers, strict=False):
            assert torch.equal(ours.q_proj.weight, source.self_attn.q_proj.weight)
            assert torch.equal(ours.k_proj.bias, source.self_attn.k_proj.bias)
            assert torch.equal(ours.o_proj.weight, source.self_attn.o_proj.weight)
            assert torch.equal(ours.ffn_norm.weight, source.post_attention_layernorm.weight)
    # A copy: training the selector leaves the language model alone.
    assert selector.scoring_layers[0].q_proj.weight is not layers[0].self_attn.q_proj.weight
    assert torch.isfinite(model(**batch(prompt(videos=[(2, 4, 4)]))).logits).all()


def test_what_cannot_be_done_is_said():
    with pytest.raises(ValueError, match="expected one of"):
        initialise_selector(tiny_model(), "zeros")
    with pytest.raises(ValueError, match="3 selector layers"):
        initialise_selector(tiny_model(reencode_layers=3), "language_model")
