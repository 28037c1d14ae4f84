"""With every token kept and no re-encoding, the model is stock Qwen2.5-VL."""

import pytest
from torch.testing import assert_close

from tiny import assert_same, batch, prompt, run, stock_twin, tiny_model, token_types

VIDEO = (4, 8, 12)
WIDE = (3, 4, 20)
IMAGE = (1, 8, 8)

# Prompts of one kind each are in the contract of the backbones.
ONE_VIDEO = [prompt(videos=[VIDEO])]
MIXED = [
    prompt(videos=[VIDEO]),
    prompt(images=[IMAGE, (1, 4, 12)], seed=1),
    prompt(seed=2),
    prompt(images=[IMAGE], videos=[WIDE, VIDEO, (1, 4, 4)], turns=2, seed=3),
]


@pytest.fixture(scope="module", params=[{"selection": "all"}, {"rho_min": 1.0, "rho_max": 1.0}], ids=str)
def models(request):
    model = tiny_model(reencode_layers=0, **request.param)
    return model, stock_twin(model)


def stock_inputs(inputs):
    return {**inputs, "mm_token_type_ids": token_types(inputs["input_ids"])}


def logits_of_both(models, inputs, **call):
    model, stock = models
    return run(model, inputs, **call).logits, run(stock, stock_inputs(inputs)).logits


@pytest.mark.parametrize("pad_left", [True, False], ids=["left", "right"])
def test_logits(models, pad_left):
    inputs = batch(*MIXED, pad_left=pad_left)
    ours, theirs = logits_of_both(models, inputs)
    is_real = inputs["attention_mask"].bool()
    assert ours.shape == theirs.shape
    assert_close(ours[is_real], theirs[is_real], atol=1e-5, rtol=1e-5)


def test_loss(models):
    model, stock = models
    inputs = batch(*MIXED, pad_left=False)
    is_padding = inputs["attention_mask"] == 0
    everywhere = inputs["input_ids"].masked_fill(is_padding, -100)
    is_placeholder = token_types(everywhere) != 0
    labels = everywhere.masked_fill(is_placeholder, -100)
    ours = model(**inputs, labels=labels).loss
    theirs = stock(**stock_inputs(inputs), labels=labels).loss
    assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    # Labels on placeholders are ignored: which of them the language model sees is not the caller's to know.
    with_placeholders = model(**inputs, labels=everywhere).loss
    assert_close(with_placeholders, ours, atol=1e-6, rtol=1e-6)


def test_bit_for_bit_with_stock_s_attention_functions(models):
    model, _ = models
    before = model.config.vision_config._attn_implementation
    model.set_attn_implementation({"vision_config": "sdpa"})
    ours, theirs = logits_of_both(models, batch(*ONE_VIDEO))
    model.set_attn_implementation({"vision_config": before})
    assert_same(ours, theirs)


def test_identity_is_lost_when_tokens_are(models):
    """The comparison above can fail."""
    _, stock = models
    selecting = tiny_model(reencode_layers=0)
    ours, theirs = logits_of_both((selecting, stock), batch(*ONE_VIDEO), retention=0.5)
    left_out = 48
    assert ours.shape[1] == theirs.shape[1] - left_out
    difference = ours[0, -1] - theirs[0, -1]
    assert difference.abs().max() > 1e-3
