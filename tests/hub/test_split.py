"""The vision head and the language model as stock checkpoints that compute what the whole model does."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen2_5_VLTextModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from typer.testing import CliRunner

from model_checks import TRANSFORMERS, Version
from qtsplus import QTSplusConfig, QTSplusSelector
from qtsplus.cli import app
from qtsplus.hub import split as splitting
from tiny import batch, prompt, tiny_model

INPUTS = batch(prompt(videos=[(4, 8, 12)]))


def run(*arguments):
    return CliRunner().invoke(app, ["split", *map(str, arguments)])


@pytest.fixture(scope="module", params=["original", "sequential"])
def whole(request):
    return tiny_model(tie_word_embeddings=request.param == "original", position_ids=request.param)


@pytest.fixture(scope="module")
def parts(whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("split") / "model"
    whole.save_pretrained(folder, max_shard_size="100KB")
    result = run(folder)
    assert result.exit_code == 0, result.output
    assert "features" in result.stderr and "logits" in result.stderr
    out = folder.with_name("model-split")
    assert [line for line in result.stdout.splitlines()] == [
        f"Wrote {out / part}" for part in ("vision_head", "language_model", "selector")
    ]
    return out


@torch.no_grad()
def test_the_vision_head_gives_the_wholes_features(whole, parts):
    assert AutoConfig.from_pretrained(parts / "vision_head").model_type == "qwen2_5_vl_vision"
    # AutoModel knows the vision tower in newer releases only.
    known = "qwen2_5_vl_vision" in str(AutoModel._model_mapping._model_mapping)
    assert known or Version("5.23") > TRANSFORMERS
    head = (AutoModel if known else Qwen2_5_VisionTransformerPretrainedModel).from_pretrained(parts / "vision_head")
    pixels, grid = INPUTS["pixel_values_videos"], INPUTS["video_grid_thw"]
    mine = head(pixels, grid_thw=grid, return_dict=True).pooler_output
    theirs = torch.cat(list(whole.model.get_video_features(pixels, grid, return_dict=True).pooler_output))
    assert torch.equal(mine, theirs)


@torch.no_grad()
def test_the_language_model_gives_the_wholes_logits(whole, parts):
    language_model, info = AutoModelForCausalLM.from_pretrained(parts / "language_model", output_loading_info=True)
    assert type(language_model).__name__ == "Qwen2ForCausalLM" and not info["missing_keys"]
    text = batch(prompt(question=20))
    assert torch.equal(language_model(**text).logits, whole(**text).logits)
    stock = language_model.generate(**text, max_new_tokens=8, do_sample=False)
    assert torch.equal(stock, whole.generate(**text, max_new_tokens=8, do_sample=False))


@torch.no_grad()
def test_the_language_model_reads_a_video_that_was_selected_for_it(whole, parts):
    """Through three-axis positions, or those of any language model where the whole numbers them in sequence."""
    compact = whole.model.compress(**INPUTS)
    embeds = whole.get_input_embeddings()(compact.input_ids)
    embeds = whole.model.splice(embeds, compact.input_ids, compact.features)
    theirs = whole(**INPUTS).logits
    language_model = AutoModelForCausalLM.from_pretrained(parts / "language_model")
    if whole.config.qtsplus_config.position_ids == "sequential":
        assert torch.equal(language_model(inputs_embeds=embeds).logits, theirs)
    with_axes = Qwen2_5_VLTextModel.from_pretrained(parts / "language_model")
    hidden = with_axes(inputs_embeds=embeds, position_ids=compact.position_ids).last_hidden_state
    torch.testing.assert_close(language_model.lm_head(hidden), theirs, atol=1e-5, rtol=1e-5)


def test_the_three_parts_are_the_whole(whole, parts):
    names = {"vision_head": "model.visual.", "selector": "model.qtsplus."}
    found = {
        prefix + name: tensor
        for part, prefix in names.items()
        for name, tensor in load_file(parts / part / "model.safetensors").items()
    }
    for name, tensor in load_file(parts / "language_model" / "model.safetensors").items():
        found[name if name.startswith("lm_head") else name.replace("model.", "model.language_model.", 1)] = tensor
    expected = dict(whole.state_dict())
    if whole.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_selector_loads_into_its_class(whole, parts):
    text = whole.config.text_config
    config = QTSplusConfig.from_pretrained(parts / "selector")
    selector = QTSplusSelector(config, text.hidden_size, text.num_attention_heads, text.num_key_value_heads)
    selector.load_state_dict(load_file(parts / "selector" / "model.safetensors"))
    assert config.to_dict() == whole.config.qtsplus_config.to_dict()


def test_a_part_that_computes_something_else_is_refused(whole, tmp_path, monkeypatch):
    whole.save_pretrained(tmp_path / "model")
    write = splitting._write_vision_head

    def spoil(config, tensors, folder):
        write(config, tensors, folder)
        weights = load_file(folder / "model.safetensors")
        weights["merger.mlp.2.bias"] += 0.01
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(splitting, "_write_vision_head", spoil)
    result = run(tmp_path / "model")
    assert result.exit_code == 2 and "features" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_bad_input_is_refused(tmp_path):
    assert "There is no folder" in run(tmp_path / "none").stderr
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    result = run(tmp_path)
    assert result.exit_code == 2 and "qtsplus convert" in result.stderr


def test_the_processor_goes_where_it_belongs(tiny_published, tmp_path):
    assert run(tiny_published, "--out", tmp_path / "parts").exit_code == 0
    vision = {path.name for path in (tmp_path / "parts" / "vision_head").iterdir()}
    language = {path.name for path in (tmp_path / "parts" / "language_model").iterdir()}
    assert any("processor_config" in name for name in vision) and "tokenizer.json" in language
    assert run(tiny_published, "--out", tmp_path / "parts").exit_code == 0, "an earlier run is replaced"
