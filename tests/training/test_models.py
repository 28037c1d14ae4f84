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
    twin = stock_twin(tiny_model(tie_word_embeddings=tied))
    twin.bfloat16().save_pretrained(tmp_path)
    stock = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype="bfloat16")
    everything = {"selection": "all", "reencode_layers": 0}
    loaded = make_model(None, str(tmp_path), everything, "bfloat16").eval()
    loaded.set_attn_implementation({"vision_config": "sdpa"})
    projection = loaded.model.visual.patch_embed.proj
    projection.forward = partial(torch.nn.Conv3d.forward, projection)  # ours rounds otherwise in bfloat16
    inputs = batch(prompt(videos=[(4, 8, 12)], question=200))
    types = token_types(inputs["input_ids"])
    with torch.no_grad():
        expected = stock(**inputs, mm_token_type_ids=types)
        found = loaded(**inputs)
    assert torch.equal(found.logits, expected.logits)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    embeddings = loaded.model.language_model.embed_tokens
    assert (loaded.lm_head.weight is embeddings.weight) == tied


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("stock")
    stock_twin(tiny_model()).save_pretrained(folder)
    return str(folder)


def test_a_fresh_selector_is_the_seed_s(stock_folder):
    first, again, other = (make_model(None, stock_folder, seed=seed).model.qtsplus for seed in (0, 0, 1))
    weight = first.scoring_layers[0].q_proj.weight
    assert torch.equal(weight, again.scoring_layers[0].q_proj.weight)
    assert not torch.equal(weight, other.scoring_layers[0].q_proj.weight)
    assert not first.reencode_layers[0].o_proj.weight.any()


def test_a_fresh_selector_scores_by_likeness(stock_folder):
    """A random pair of projections knows no word, and forgets the question before it learns any."""
    settings = {"reduction": "mean", "query_states": "embeddings"}
    selector = make_model(None, stock_folder, settings).model.qtsplus
    layer = selector.scoring_layers[-1]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(40, selector.hidden_size, generator=generator)
    for place in range(8):
        query = tokens[place : place + 1]
        likeness = torch.cosine_similarity(tokens, query, dim=1)
        scores = layer(query, tokens, reduction="mean")
        assert int(scores.argmax()) == place
        correlation = torch.corrcoef(torch.stack([scores, likeness]))
        assert correlation[0, 1] > 0.5
