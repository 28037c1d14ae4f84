"""`qtsplus convert`: nothing is lost, nothing is guessed, and what does not fit is named."""

import filecmp
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration
from typer.testing import CliRunner

from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.cli import app
from qtsplus.hub import convert as conversion
from qtsplus.hub.checkpoint import REFERENCE, SELECTOR, check_weights, on_meta, our_name
from qtsplus.hub.convert import convert, find_vision_config
from qtsplus.hub.files import hub_configs
from reference import GOLDEN, load, meta
from tiny import batch, prompt, published_name, stock_twin, tiny_model, token_types

REFERENCE_FOLDER = GOLDEN / "case1" / "e2e" / "checkpoint"
EVERYTHING = {"selection": "all", "reencode_layers": 0}


def run(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def assert_refused(result, *words):
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def weights(folder):
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def rewrite(folder, change):
    """Changes the tensors of a folder's only file of weights."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def stock(request):
    return stock_twin(tiny_model(tie_word_embeddings=request.param))


@pytest.fixture
def stock_folder(tmp_path):
    """A tied one."""
    stock_twin(tiny_model()).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture
def reference_folder(tmp_path):
    """The golden checkpoint with its vision configuration."""
    folder = shutil.copytree(REFERENCE_FOLDER, tmp_path / "reference")
    shutil.copyfile(GOLDEN / "case1" / "e2e" / "vision" / "config.json", folder / "vision_config.json")
    return folder


# --------------------------------------------------------------------------------------------------------------------
# From Qwen2.5-VL
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "saving",
    [{}, {"save_original_format": False}, {"max_shard_size": "100KB"}],
    ids=["old names", "new names", "sharded"],
)
def test_a_stock_checkpoint_computes_what_it_did(stock, saving, tmp_path):
    stock.save_pretrained(tmp_path / "stock", **saving)
    assert len(list((tmp_path / "stock").glob("*.safetensors"))) > 2 * ("max_shard_size" in saving)
    convert(tmp_path / "stock", tmp_path / "ours", selector=EVERYTHING)
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tmp_path / "ours", dtype="auto")
    inputs = batch(prompt(images=[(1, 4, 4)], videos=[(4, 8, 12)]))
    with torch.no_grad():
        theirs = stock(**inputs, mm_token_type_ids=token_types(inputs["input_ids"])).logits
        assert torch.equal(model(**inputs).logits, theirs)


def test_a_stock_configuration_may_say_where_a_question_stands(stock_folder, tmp_path):
    """As one does that was written from ours; a variant's word counts."""
    config = json.loads((stock_folder / "config.json").read_text())
    (stock_folder / "config.json").write_text(json.dumps({**config, "user_turn_token_ids": [1, 2]}))
    for variant, expected in ((None, [1, 2]), ("qtsplus-3b", [151644, 872])):
        convert(stock_folder, tmp_path / str(variant), variant=variant)
        assert json.loads((tmp_path / str(variant) / "config.json").read_text())["user_turn_token_ids"] == expected


def test_a_stock_checkpoint_loaded_naively_is_refused_with_the_command(stock_folder):
    with pytest.raises(ValueError, match="qtsplus convert"):
        Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(stock_folder)


def test_a_stock_model_loses_nothing(stock, tmp_path):
    """And Transformers' own class takes it out of one of ours again."""
    stock.save_pretrained(tmp_path / "stock")
    converted = weights(convert(tmp_path / "stock", tmp_path / "ours"))
    before = {our_name(name): tensor for name, tensor in weights(tmp_path / "stock").items()}
    assert all(torch.equal(converted[name], before[name]) for name in before)
    again = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "ours")
    inputs = batch(prompt(videos=[(4, 8, 12)]))
    inputs["mm_token_type_ids"] = token_types(inputs["input_ids"])
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, stock(**inputs).logits)


def test_the_selector_starts_as_an_identity(stock_folder, tmp_path):
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(convert(stock_folder, tmp_path / "identity"))
    tokens = torch.randn(5, 64)
    for layer in model.model.qtsplus.reencode_layers:
        assert torch.equal(layer(tokens, tokens), tokens)


def test_converting_says_what_it_does_and_nothing_else(tiny_stock, tmp_path):
    """In a process of its own, in which Transformers has not yet warned of anything."""
    command = [sys.executable, "-m", "qtsplus.cli", "convert", tiny_stock, "--out", tmp_path / "ours"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == f"Wrote {tmp_path / 'ours'}\n"
    first_words = [line.split()[0] for line in result.stderr.splitlines()]
    assert first_words == ["The"], result.stderr


def test_a_new_selector_is_the_same_each_time(stock_folder, tmp_path):
    state = torch.random.get_rng_state()
    first = weights(convert(stock_folder, tmp_path / "a"))
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(3)
    again = weights(convert(stock_folder, tmp_path / "b"))
    name = "model.qtsplus.scoring_layers.0.q_proj.weight"
    assert torch.equal(first[name], again[name])


def test_a_variant_gives_the_hyperparameters_and_settings_come_on_top(stock_folder, tmp_path):
    result = run(stock_folder, "--out", tmp_path / "ours", "--variant", "qtsplus-3b-ft", "--set", "n_max=77")
    assert result.exit_code == 0, result.output
    selector = Qwen2_5_VLQTSplusConfig.from_pretrained(tmp_path / "ours").qtsplus_config
    assert (selector.lambda_t, selector.lambda_m, selector.n_max) == (0.2, 0.3, 77)


def test_attention_selects_without_training(stock_folder, tmp_path):
    """The selector's weights are there, and nothing reads them."""
    result = run(
        stock_folder, "--out", tmp_path / "ours", "--set", "selection=lm_attention", "--set", "attention_layer=1"
    )
    assert result.exit_code == 0, result.output
    assert "the attention of layer 1 selects" in result.stderr.replace("\n", " ")
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    selector = model.config.qtsplus_config
    assert (selector.selection, selector.attention_layer, selector.reencode_layers) == ("lm_attention", 1, 0)
    inputs = batch(prompt(videos=[(4, 8, 12)]), prompt(videos=[(2, 4, 8), (3, 4, 4)], seed=1), prompt(seed=2))
    question = {"query_input_ids": torch.tensor([[30, 31], [40, 41], [50, 51]])}  # whose ids are not a stock model's
    inputs = {**inputs, **question}
    with torch.no_grad():
        first = model(**inputs)
        for parameter in model.model.qtsplus.parameters():
            parameter.fill_(torch.nan)
        second = model(**inputs)
    assert torch.equal(first.logits, second.logits) and all(first.qtsplus.n[:2] > 0)
    assert "**Nothing is trained:**" in (tmp_path / "ours" / "README.md").read_text()
    assert (tmp_path / "ours" / "lm_attention_qtsplus.py").exists()
    for setting, words in (("attention_layer=2", "expected a layer"), ("attention_heads=[9]", "heads from 0 to 3")):
        target = tmp_path / "other"
        assert_refused(run(stock_folder, "--out", target, "--set", "selection=lm_attention", "--set", setting), words)
    assert_refused(run(stock_folder, "--out", tmp_path / "other", "--set", "selection=best"), "selection='best'")


def test_bfloat16_stays_bfloat16(tmp_path):
    stock_twin(tiny_model()).to(torch.bfloat16).save_pretrained(tmp_path / "stock")
    folder = convert(tmp_path / "stock", tmp_path / "ours")
    assert {t.dtype for n, t in weights(folder).items() if "rho_history" not in n} == {torch.bfloat16}
    assert Qwen2_5_VLQTSplusConfig.from_pretrained(folder).dtype == torch.bfloat16


def test_the_processor_comes_along_and_says_where_a_question_stands(tiny_processor, tiny_stock, tmp_path):
    convert(tiny_stock, tmp_path / "again")
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(tmp_path / "again")
    for name, value in tiny_processor.query_token_ids.items():
        assert getattr(config, name) == value, name
    content = json.loads((tmp_path / "again" / "processor_config.json").read_text())
    assert content["auto_map"] == {"AutoProcessor": "processing_qtsplus.Qwen2_5_VLQTSplusProcessor"}


# What the 72B has other than the 7B.
LARGEST = (
    {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8},
    {"intermediate_size": 3456, "out_hidden_size": 8192},
)


@pytest.mark.parametrize(
    ("variant", "changes"), [("qtsplus-3b", ({}, {})), ("qtsplus-7b", ({}, {})), ("qtsplus-7b", LARGEST)]
)
def test_published_layouts(variant, changes):
    """The flat configuration and the names of the checkpoints that Qwen published, without their content."""
    content = json.loads((hub_configs() / variant / "config.json").read_text())
    text, vision = content["text_config"] | changes[0], content["vision_config"] | changes[1]
    content |= {"text_config": dict(text), "vision_config": vision}
    rope = text.pop("rope_parameters")
    flat = {
        **text,
        "model_type": "qwen2_5_vl",
        "vision_config": {**vision, "model_type": "qwen2_5_vl"},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "tie_word_embeddings": content["tie_word_embeddings"],
    }
    config = Qwen2_5_VLQTSplusConfig(**flat)
    assert config.text_config.rope_parameters["mrope_section"] == rope["mrope_section"]
    state = on_meta(Qwen2_5_VLQTSplusConfig(**content)).state_dict()
    stored = {
        published_name(name): tensor.bfloat16()
        for name, tensor in state.items()
        if ".qtsplus." not in name and not (content["tie_word_embeddings"] and name == "lm_head.weight")
    }
    assert ("lm_head.weight" in stored) == (variant == "qtsplus-7b") and "model.layers.0.mlp.up_proj.weight" in stored
    assert len(check_weights(stored, config, "a folder", without=SELECTOR)) == len(stored)


# --------------------------------------------------------------------------------------------------------------------
# From the reference
# --------------------------------------------------------------------------------------------------------------------


def reference_prompt():
    """The reference's prompt has one placeholder per video; ours has one per visual token, as Qwen2.5-VL's does."""
    inputs, facts = load("case1", "e2e", "inputs"), meta("case1", "e2e", "meta")
    ids = inputs["input_ids"][0].tolist()
    at = ids.index(facts["video_token_id"])
    full = torch.tensor([ids[:at] + [facts["video_token_id"]] * facts["M"] + ids[at + 1 :]])
    return {
        "input_ids": full,
        "attention_mask": torch.ones_like(full),
        "pixel_values_videos": inputs["pixel_values_videos"],
        "video_grid_thw": inputs["video_grid_thw"],
        "query_input_ids": inputs["question_input_ids"],
    }


def test_a_reference_checkpoint_end_to_end(reference_folder, tmp_path):
    result = run(reference_folder, "--out", tmp_path / "ours")
    assert result.exit_code == 0, result.output
    model = Qwen2_5_VLQTSplusForConditionalGeneration.from_pretrained(tmp_path / "ours", dtype="auto")
    golden, inputs = load("case1", "e2e", "outputs"), reference_prompt()
    with torch.no_grad():
        output = model(**inputs)
    assert output.qtsplus.kept_indices[0].tolist() == golden["indices"].tolist()
    torch.testing.assert_close(output.logits, golden["logits"], atol=5e-4, rtol=1e-5)
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert ids[0, inputs["input_ids"].shape[1] :].tolist() == golden["generated_new_tokens"].tolist()


def test_what_a_reference_does_not_say_is_as_its_code_has_it(reference_folder, tmp_path):
    config = meta("case1", "e2e", "checkpoint", "config")
    selector = {key for key in config if key.startswith(("qts_plus_", "lambda_"))}
    silent = {key: value for key, value in config.items() if key not in selector}
    (reference_folder / "config.json").write_text(json.dumps({**silent, "qts_plus_n_heads": 8}))
    result = run(reference_folder, "--out", tmp_path / "ours")
    assert_refused(result, "unexpected", "model.qtsplus.reencode_layers.1.q_proj.weight")
    second = ".reencode_layers.1."
    rewrite(reference_folder, lambda tensors: {key: t for key, t in tensors.items() if second not in key})
    selector = Qwen2_5_VLQTSplusConfig.from_pretrained(convert(reference_folder, tmp_path / "ours")).qtsplus_config
    assert (selector.n_max, selector.tau_s, selector.lambda_t, selector.reencode_layers) == (2560, 0.1, 1.0, 1)


@pytest.mark.parametrize("change", [{"qts_plus_reencode": False}, {"qts_plus_scoring_layers": 0}])
def test_layers_that_a_reference_does_not_have(change, reference_folder, tmp_path):
    edit_config(**change)(reference_folder)
    if "qts_plus_reencode" in change:
        rewrite(reference_folder, lambda tensors: {k: t for k, t in tensors.items() if ".reencode_layers." not in k})
    selector = Qwen2_5_VLQTSplusConfig.from_pretrained(convert(reference_folder, tmp_path / "ours")).qtsplus_config
    assert (selector.scoring_layers, selector.reencode_layers) == (1, 0 if "qts_plus_reencode" in change else 2)


def with_head(folder, tensors):
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})


def in_shards(folder, tensors):
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:40], "model-00002-of-00002.safetensors": names[40:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("change", [with_head, in_shards])
def test_a_reference_checkpoint_loads_alike_in_every_form(change, reference_folder, tmp_path):
    convert(reference_folder, tmp_path / "as it was")
    change(reference_folder, load_file(reference_folder / "model.safetensors"))
    convert(reference_folder, tmp_path / "changed")
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(tmp_path / "as it was" / name, tmp_path / "changed" / name, shallow=False), name


def test_the_head_is_tied_where_a_reference_does_not_say_and_has_none(reference_folder, tmp_path):
    config = meta("case1", "e2e", "checkpoint", "config")
    del config["tie_word_embeddings"]
    (reference_folder / "config.json").write_text(json.dumps(config))
    folder = convert(reference_folder, tmp_path / "ours")
    assert Qwen2_5_VLQTSplusConfig.from_pretrained(folder).tie_word_embeddings


def test_the_vision_configuration_is_given_or_known_but_never_guessed(reference_folder, tmp_path):
    given = reference_folder / "vision_config.json"
    vision = json.loads(given.read_text())
    given.unlink()
    assert_refused(run(reference_folder, "--out", tmp_path / "ours"), f"put one there, as {given}")
    # A whole Qwen2.5-VL configuration does as well.
    given.write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": vision}))
    assert run(reference_folder, "--out", tmp_path / "ours").exit_code == 0


@pytest.mark.parametrize("variant", ["qtsplus-3b", "qtsplus-7b"])
def test_the_vision_tower_of_a_published_model_is_known_by_its_width(variant, tmp_path):
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / variant)
    vision = find_vision_config(tmp_path, {"hidden_size": config.text_config.hidden_size})
    assert vision["out_hidden_size"] == config.text_config.hidden_size


def test_a_wrong_vision_configuration_is_named_by_what_does_not_fit(reference_folder, tmp_path):
    config = json.loads((reference_folder / "vision_config.json").read_text())
    (reference_folder / "vision_config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    result = run(reference_folder, "--out", tmp_path / "ours")
    assert_refused(result, "size mismatch for model.visual.blocks.3.mlp.gate_proj.weight", "[48, 32]", "[64, 32]")


# --------------------------------------------------------------------------------------------------------------------
# What does not fit
# --------------------------------------------------------------------------------------------------------------------


def test_every_key_that_is_missing_or_unexpected_is_listed(reference_folder, tmp_path):
    lost = [
        "model.qts_plus.selector.budget.mlp.2.bias",
        "model.qts_plus.selector.reencode_layers.1.core.ffn.net.0.weight",
        "model.vision_tower.merger.ln_q.weight",
        "model.layers.1.self_attn.k_proj.bias",
    ]
    missing = [our_name(name, REFERENCE) for name in lost]

    def spoil(tensors):
        for name in lost:
            del tensors[name]
        tensors["model.extra"] = torch.ones(3)
        return tensors

    rewrite(reference_folder, spoil)
    result = run(reference_folder, "--out", tmp_path / "ours")
    assert_refused(result, *missing, "4 missing", "1 unexpected: model.extra")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("changed", [torch.ones(3), torch.ones(64, dtype=torch.int64)], ids=["shape", "dtype"])
def test_a_weight_of_another_shape_or_kind_is_named(changed, stock_folder, tmp_path):
    name = "model.norm.weight"
    rewrite(stock_folder, lambda tensors: dict(tensors, **{name: changed}))
    result = run(stock_folder, "--out", tmp_path / "ours")
    assert_refused(result, f"The weights in {stock_folder} cannot be used", "language_model.norm.weight")


def test_a_stock_checkpoints_missing_keys_are_listed(stock_folder, tmp_path):
    rewrite(stock_folder, lambda tensors: {k: t for k, t in tensors.items() if k != "visual.blocks.0.norm1.weight"})
    assert_refused(run(stock_folder, "--out", tmp_path / "ours"), "1 missing: model.visual.blocks.0.norm1.weight")


def test_a_head_against_a_configuration_that_ties_it_is_refused(reference_folder, tmp_path):
    rewrite(reference_folder, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1})
    assert_refused(run(reference_folder, "--out", tmp_path / "ours"), "lm_head.weight", "tie_word_embeddings")


def test_an_untied_model_without_a_head_is_refused(reference_folder, tmp_path):
    config = {**meta("case1", "e2e", "checkpoint", "config"), "tie_word_embeddings": False}
    (reference_folder / "config.json").write_text(json.dumps(config))
    assert_refused(run(reference_folder, "--out", tmp_path / "ours"), "1 missing: lm_head.weight")


def as_bin(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def without_shard(folder):
    in_shards(folder, load_file(folder / "model.safetensors"))
    (folder / "model-00002-of-00002.safetensors").unlink()


def edit_config(**values):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return edit


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (as_bin, ["has no weights", "Save others with Transformers"]),
        (without_shard, ["lacks model-00002-of-00002.safetensors"]),
        (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), ["adapter"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else None,
)
def test_a_broken_source_is_refused_in_one_line(spoil, words, reference_folder, tmp_path):
    spoil(reference_folder)
    result = run(reference_folder, "--out", tmp_path / "ours")
    assert_refused(result, *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reference"]


def test_a_model_of_another_type_is_refused(reference_folder, tmp_path):
    edit_config(model_type="llama")(reference_folder)
    assert_refused(run(reference_folder, "--out", tmp_path / "ours"), "'llama'", "qwen2_5_vl")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variant", "qtsplus-3b"], ["--variant", "a new selector"]),
        (["--set", "n_max=3"], ["--set"]),
        (["--set", "n_max"], ["expected NAME=VALUE"]),
    ],
)
def test_an_argument_without_a_meaning_is_refused(arguments, words, tmp_path):
    assert_refused(run(REFERENCE_FOLDER, "--out", tmp_path / "ours", *arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variant", "qtsplus-9b"], ["qtsplus-9b", "qtsplus-3b"]),
        (["--set", "n_mex=3"], ["n_mex"]),
        (["--set", "rho_min=2"], ["rho_min"]),
    ],
)
def test_an_argument_that_is_wrong_is_refused(arguments, words, stock_folder, tmp_path):
    assert_refused(run(stock_folder, "--out", tmp_path / "ours", *arguments), *words)


def test_a_quantized_checkpoint_is_refused(stock_folder, tmp_path):
    edit_config(quantization_config={"quant_method": "awq", "bits": 4})(stock_folder)
    assert_refused(run(stock_folder, "--out", tmp_path / "ours"), "quantized")


def test_a_source_that_is_nowhere_or_is_the_target_is_refused(stock_folder, tmp_path):
    assert_refused(run(tmp_path / "none" / "here", "--out", tmp_path / "ours"), "neither a folder nor")
    assert_refused(run("lab/none", "--out", tmp_path / "ours"), "no folder lab/none", "Hub")
    assert_refused(run(stock_folder / "model.safetensors", "--out", tmp_path / "ours"), "neither a folder nor")
    before = {path.name for path in stock_folder.iterdir()}
    assert_refused(run(stock_folder, "--out", stock_folder), "source itself")
    assert {path.name for path in stock_folder.iterdir()} == before


def test_an_interrupted_run_leaves_nothing(stock_folder, tmp_path, monkeypatch):
    def interrupt(tensors, folder, *_):
        (folder / "model.safetensors").write_bytes(b"half")
        assert not (folder / "config.json").exists(), "a half folder must not load"
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "save_torch_state_dict", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(stock_folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


def test_an_earlier_run_is_replaced_and_other_files_are_not(stock_folder, tmp_path):
    for _ in range(2):
        convert(stock_folder, tmp_path / "ours")
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    assert_refused(run(stock_folder, "--out", tmp_path / "ours"), "notes.txt")
    assert (tmp_path / "ours" / "notes.txt").read_text() == "mine"
