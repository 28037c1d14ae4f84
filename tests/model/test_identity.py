"""With every token kept and no re-encoding, the model is stock Qwen2.5-VL."""

import pytest
import torch
from torch.testing import assert_close

from tiny import assert_same, batch, prompt, stock_twin, tiny_model, token_types

VIDEO = (4, 8, 12)
WIDE = (3, 4, 20)
IMAGE = (1, 8, 8)

CASES = {  # those of one prompt are in the contract of the backbones
    "video": [prompt(videos=[VIDEO])],
    "two images": [prompt(images=[IMAGE, (1, 4, 12)])],
    "one frame": [prompt(videos=[(1, 4, 4)])],
    "padded batch": [
        prompt(videos=[VIDEO]),
        prompt(images=[IMAGE], seed=1),
        prompt(seed=2),
        prompt(images=[IMAGE], videos=[WIDE, VIDEO], turns=2, seed=3),
    ],
}


@pytest.fixture(scope="module", params=["all", "rho = 1"])
def models(request):
    everything = {"selection": "all"} if request.param == "all" else {"rho_min": 1.0, "rho_max": 1.0}
    model = tiny_model(reencode_layers=0, **everything)
    return model, stock_twin(model)


def stock_inputs(inputs):
    return {**inputs, "mm_token_type_ids": token_types(inputs["input_ids"])}


@torch.no_grad()
def logits_of_both(models, inputs, **call):
    model, stock = models
    return model(**inputs, **call).logits, stock(**stock_inputs(inputs)).logits


@pytest.mark.parametrize("pad_left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("case", CASES)
def test_logits(models, case, pad_left):
    inputs = batch(*CASES[case], pad_left=pad_left)
    ours, theirs = logits_of_both(models, inputs)
    is_real = inputs["attention_mask"].bool()
    assert ours.shape == theirs.shape
    assert_close(ours[is_real], theirs[is_real], atol=1e-5, rtol=1e-5)


def test_loss(models):
    model, stock = models
    inputs = batch(*CASES["padded batch"], pad_left=False)
    everywhere = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels = everywhere.masked_fill(token_types(everywhere) != 0, -100)
    ours = model(**inputs, labels=labels).loss
    theirs = stock(**stock_inputs(inputs), labels=labels).loss
    assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    # Labels on placeholders are ignored: which of them the language model sees is not the caller's to know.
    assert_close(model(**inputs, labels=everywhere).loss, ours, atol=1e-6, rtol=1e-6)


def test_bit_for_bit_with_stock_s_attention_functions(models):
    model, _ = models
    before = model.config.vision_config._attn_implementation
    model.set_attn_implementation({"vision_config": "sdpa"})
    ours, theirs = logits_of_both(models, batch(*CASES["video"]))
    model.set_attn_implementation({"vision_config": before})
    assert_same(ours, theirs)


def test_identity_is_lost_when_tokens_are(models):
    """The comparison above can fail."""
    _, stock = models
    selecting = tiny_model(reencode_layers=0)
    ours, theirs = logits_of_both((selecting, stock), batch(*CASES["video"]), retention=0.5)
    assert ours.shape[1] == theirs.shape[1] - 48
    assert (ours[0, -1] - theirs[0, -1]).abs().max() > 1e-3
