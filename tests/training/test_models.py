"""What a recipe loads: the weights of a stock model, and a fresh selector."""

from functools import partial

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from qtsplus.training.models import make_model
from tiny import batch, prompt, stock_twin, tiny_model, token_types


@pytest.mark.parametrize("tied", [True, False])
def test_a_stock_model_in_bfloat16_is_that_model(tmp_path, tied):
    """Positions too: their frequencies stay in float32."""
    stock_twin(tiny_model(tie_word_embeddings=tied)).bfloat16().save_pretrained(tmp_path)
    stock = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype="bfloat16")
    everything = {"selection": "all", "reencode_layers": 0}
    loaded = make_model(None, str(tmp_path), everything, "bfloat16").eval()
    loaded.set_attn_implementation({"vision_config": "sdpa"})
    projection = loaded.model.visual.patch_embed.proj
    projection.forward = partial(torch.nn.Conv3d.forward, projection)  # ours rounds otherwise in bfloat16
    inputs = batch(prompt(videos=[(4, 8, 12)], question=200))
    with torch.no_grad():
        logits = stock(**inputs, mm_token_type_ids=token_types(inputs["input_ids"])).logits
        assert torch.equal(loaded(**inputs).logits, logits)
    assert all(weight.dtype == torch.bfloat16 for weight in loaded.parameters())
    assert (loaded.lm_head.weight is loaded.model.language_model.embed_tokens.weight) == tied


def test_a_fresh_selector_is_the_seed_s(tmp_path):
    stock_twin(tiny_model()).save_pretrained(tmp_path)
    selectors = [make_model(None, str(tmp_path), seed=seed).model.qtsplus.state_dict() for seed in (0, 0, 1)]
    name = "scoring_layers.0.q_proj.weight"
    assert torch.equal(selectors[0][name], selectors[1][name])
    assert not torch.equal(selectors[0][name], selectors[2][name])
    assert not selectors[0]["reencode_layers.0.o_proj.weight"].any()


def test_a_fresh_selector_scores_by_likeness(tmp_path):
    """A random pair of projections knows no word, and forgets the question before it learns any."""
    stock_twin(tiny_model()).save_pretrained(tmp_path)
    selector = make_model(None, str(tmp_path), {"reduction": "mean", "query_states": "embeddings"}).model.qtsplus
    tokens = torch.randn(40, selector.hidden_size, generator=torch.Generator().manual_seed(0))
    for place in range(8):
        likeness = torch.cosine_similarity(tokens, tokens[place : place + 1], dim=1)
        scores = selector.scoring_layers[-1](tokens[place : place + 1], tokens, reduction="mean")
        assert int(scores.argmax()) == place
        assert torch.corrcoef(torch.stack([scores, likeness]))[0, 1] > 0.5
