"""What a recipe loads: the weights of a stock model, and a fresh selector."""

import json
import shutil
from functools import partial

import pytest
import torch
from tiny_recipe import write_recipe
from transformers import Qwen2_5_VLForConditionalGeneration

from qtsplus.model.relevance_qtsplus import log_relevance
from qtsplus.training.models import load_either, make_model
from qtsplus.training.plan import make_plan
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import build_trainer
from tiny import batch, prompt, run, stock_twin, tiny_model, token_types


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
    expected = run(stock, inputs, mm_token_type_ids=token_types(inputs["input_ids"]))
    assert torch.equal(run(loaded, inputs).logits, expected.logits)
    dtypes = {weight.dtype for weight in loaded.parameters()}
    assert dtypes == {torch.bfloat16}
    is_tied = loaded.lm_head.weight is loaded.model.language_model.embed_tokens.weight
    assert is_tied == tied


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("stock")
    stock_twin(tiny_model()).save_pretrained(folder)
    return str(folder)


def test_a_fresh_selector_is_the_seed_s(stock_folder):
    first = make_model(None, stock_folder, seed=0).model.qtsplus
    again = make_model(None, stock_folder, seed=0).model.qtsplus
    other = make_model(None, stock_folder, seed=1).model.qtsplus
    weight = first.scoring_layers[0].q_proj.weight
    same_weight = again.scoring_layers[0].q_proj.weight
    other_weight = other.scoring_layers[0].q_proj.weight
    assert torch.equal(weight, same_weight)
    assert not torch.equal(weight, other_weight)
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
        scores = log_relevance(layer.queries(query), layer.keys(tokens), "mean")
        assert int(scores.argmax()) == place
        correlation = torch.corrcoef(torch.stack([scores, likeness]))
        assert correlation[0, 1] > 0.5


# A stock base has a tokenizer, and its configuration does not say which of its ids open and close a question.


def assert_ids_are_the_tokenizers(model, processor):
    for name, value in processor.query_token_ids.items():
        assert getattr(model.config, name) == value, name


def test_a_trained_model_finds_questions_by_the_ids_of_its_base(tiny_stock, tmp_path):
    record = {"video": None, "question": "What?", "answer": "A circle."}
    recipe_file = write_recipe(tmp_path, [record], model={"variant": None, "weights": str(tiny_stock)})
    (recipe,) = load_stages(recipe_file, [])
    trainer = build_trainer(recipe)
    assert_ids_are_the_tokenizers(trainer.model, trainer.processing_class)


def test_a_stock_model_to_calibrate_finds_questions_by_its_own_ids(tiny_stock):
    assert_ids_are_the_tokenizers(*load_either(str(tiny_stock)))


def test_a_base_whose_template_writes_no_question_is_refused(tiny_stock, tmp_path):
    folder = tmp_path / "stock"
    shutil.copytree(tiny_stock, folder)
    for file in folder.glob("*template*"):
        file.unlink()
    path = folder / "processor_config.json"
    content = json.loads(path.read_text())
    content["chat_template"] = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    path.write_text(json.dumps(content))
    (recipe,) = load_stages(write_recipe(tmp_path, [], model={"variant": None, "weights": str(folder)}))
    for use in (partial(load_either, str(folder)), partial(make_plan, recipe)):
        with pytest.raises(ValueError, match="this tokenizer writes no question that begins with '<.im_start.>"):
            use()
