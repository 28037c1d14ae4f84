"""`qtsplus convert`: nothing is lost, nothing is guessed, and what does not fit is named."""

import filecmp
import json
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from convert_runs import (
    assert_refused,
    edit_json,
    load_model,
    read_json,
    rewrite,
    run,
    selector_config,
    weights,
    write_json,
)
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from qtsplus import Qwen2_5_VLQTSplusConfig
from qtsplus.common.files import rewritten
from qtsplus.hub import convert as conversion
from qtsplus.hub.checkpoint import REFERENCE, SELECTOR, STOCK, check_weights, on_meta
from qtsplus.hub.convert import convert, find_vision_config
from qtsplus.hub.files import hub_configs
from reference import CHECKPOINT, copy_checkpoint
from tiny import batch, prompt, published_name, stock_twin, tiny_model, token_types

FIRST_SHARD = "model-00001-of-00002.safetensors"
SECOND_SHARD = "model-00002-of-00002.safetensors"
EVERYTHING = {"selection": "all", "reencode_layers": 0}
BY_ATTENTION = ["--set", "selection=lm_attention"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def stock(request):
    return stock_twin(tiny_model(tie_word_embeddings=request.param))


@pytest.fixture
def stock_folder(tmp_path):
    """A tied one."""
    folder = tmp_path / "stock"
    stock_twin(tiny_model()).save_pretrained(folder)
    return folder


@pytest.fixture
def ours(tmp_path):
    """The folder into which a test converts; it does not exist yet."""
    return tmp_path / "ours"


@pytest.fixture
def reference_folder(tmp_path):
    return copy_checkpoint(tmp_path / "reference")


# --------------------------------------------------------------------------------------------------------------------
# From Qwen2.5-VL
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "saving",
    [{}, {"save_original_format": False}, {"max_shard_size": "100KB"}],
    ids=["old names", "new names", "sharded"],
)
def test_a_stock_checkpoint_computes_what_it_did(stock, saving, tmp_path, ours):
    folder = tmp_path / "stock"
    stock.save_pretrained(folder, **saving)
    if "max_shard_size" in saving:
        shards = list(folder.glob("*.safetensors"))
        assert len(shards) > 2
    convert(folder, ours, selector=EVERYTHING)
    model = load_model(ours)
    inputs = batch(prompt(images=[(1, 4, 4)], videos=[(4, 8, 12)]))
    kinds = token_types(inputs["input_ids"])
    with torch.no_grad():
        theirs = stock(**inputs, mm_token_type_ids=kinds)
        output = model(**inputs)
    assert torch.equal(output.logits, theirs.logits)


def test_a_stock_configuration_may_say_where_a_question_stands(stock_folder, ours):
    """A configuration that was written from ours does so."""
    edit_json(stock_folder, user_turn_token_ids=[1, 2])
    convert(stock_folder, ours)
    assert read_json(ours)["user_turn_token_ids"] == [1, 2]


def test_a_stock_model_loses_nothing(stock, tmp_path, ours):
    """And Transformers' own class takes it out of one of ours again."""
    folder = tmp_path / "stock"
    stock.save_pretrained(folder)
    convert(folder, ours)
    converted = weights(ours)
    for name, tensor in weights(folder).items():
        assert torch.equal(converted[rewritten(name, STOCK)], tensor)
    again = Qwen2_5_VLForConditionalGeneration.from_pretrained(ours)
    inputs = batch(prompt(videos=[(4, 8, 12)]))
    inputs["mm_token_type_ids"] = token_types(inputs["input_ids"])
    with torch.no_grad():
        output = again(**inputs)
        expected = stock(**inputs)
    assert torch.equal(output.logits, expected.logits)


def test_converting_says_what_it_does_and_nothing_else(tiny_stock, tmp_path, ours):
    """In a process of its own, in which Transformers has not yet warned of anything."""
    command = [sys.executable, "-m", "qtsplus.cli", "convert", tiny_stock, "--out", ours]
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


def test_settings_change_the_hyperparameters(stock_folder, ours):
    result = run(stock_folder, ours, "--set", "lambda_t=0.2", "--set", "n_max=77")
    assert result.exit_code == 0, result.output
    selector = selector_config(ours)
    assert selector.lambda_t == 0.2
    assert selector.n_max == 77


@pytest.mark.parametrize(
    ("selection", "words", "fraction"),
    [
        ("qtsplus", "Train it first", "0.05 to 0.5, decided per question"),
        ("diversity", 'selects by `selection="diversity"`', "0.05 to 0.5, decided per question"),
        ("all", 'selects by `selection="all"`', "1"),
    ],
)
def test_a_card_says_whether_there_is_something_to_train(stock_folder, ours, selection, words, fraction):
    convert(stock_folder, ours, selector={"selection": selection})
    card = (ours / "README.md").read_text()
    assert words in card
    assert ("Train it first" in card) == (selection == "qtsplus")
    assert f"| fraction of tokens kept | {fraction} |" in card


def test_attention_selects_without_training(stock_folder, ours):
    """The selector's weights are there, and nothing reads them."""
    result = run(stock_folder, ours, *BY_ATTENTION, "--set", "attention_layer=1")
    assert result.exit_code == 0, result.output
    assert "Nothing needs training" in result.stderr
    model = load_model(ours).eval()
    selector = model.config.qtsplus_config
    assert selector.selection == "lm_attention"
    assert selector.attention_layer == 1
    assert selector.reencode_layers == 0
    inputs = batch(
        prompt(videos=[(4, 8, 12)]),
        prompt(videos=[(2, 4, 8), (3, 4, 4)], seed=1),
        prompt(seed=2),
    )
    # A stock model has other ids around a question.
    inputs["query_input_ids"] = torch.tensor([[30, 31], [40, 41], [50, 51]])
    with torch.no_grad():
        first = model(**inputs)
        for parameter in model.model.qtsplus.parameters():
            parameter.fill_(torch.nan)
        second = model(**inputs)
    assert torch.equal(first.logits, second.logits)
    assert all(first.qtsplus.n[:2] > 0)
    assert "**Nothing is trained:**" in (ours / "README.md").read_text()
    assert (ours / "lm_attention_qtsplus.py").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("attention_layer=2", "expected a layer"),
        ("attention_heads=[9]", "heads from 0 to 3"),
    ],
)
def test_attention_that_cannot_select_is_refused(setting, words, stock_folder, ours):
    assert_refused(run(stock_folder, ours, *BY_ATTENTION, "--set", setting), words)


def test_bfloat16_stays_bfloat16(tmp_path, ours):
    stock = stock_twin(tiny_model()).to(torch.bfloat16)
    stock.save_pretrained(tmp_path / "stock")
    convert(tmp_path / "stock", ours)
    for name, tensor in weights(ours).items():
        if "rho_history" not in name:
            assert tensor.dtype == torch.bfloat16, name
    assert Qwen2_5_VLQTSplusConfig.from_pretrained(ours).dtype == torch.bfloat16


def test_the_processor_comes_along_and_says_where_a_question_stands(tiny_processor, tiny_stock, ours):
    convert(tiny_stock, ours)
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(ours)
    for name, value in tiny_processor.query_token_ids.items():
        assert getattr(config, name) == value, name
    content = read_json(ours, "processor_config.json")
    assert content["auto_map"] == {"AutoProcessor": "processing_qtsplus.Qwen2_5_VLQTSplusProcessor"}


# The values in which the 72B differs from the 7B.
LARGEST_TEXT = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
LARGEST_VISION = {"intermediate_size": 3456, "out_hidden_size": 8192}


@pytest.mark.parametrize(
    ("variant", "text_changes", "vision_changes"),
    [
        ("qtsplus-3b", {}, {}),
        ("qtsplus-7b", {}, {}),
        ("qtsplus-7b", LARGEST_TEXT, LARGEST_VISION),
    ],
    ids=["3B", "7B", "72B"],
)
def test_published_layouts(variant, text_changes, vision_changes):
    """The flat configuration and the names of the checkpoints that Qwen published, without their content."""
    content = read_json(hub_configs() / variant)
    text = content["text_config"]
    text.update(text_changes)
    vision = content["vision_config"]
    vision.update(vision_changes)
    is_tied = content["tie_word_embeddings"]
    state = on_meta(Qwen2_5_VLQTSplusConfig(**deepcopy(content))).state_dict()
    rope = text.pop("rope_parameters")
    flat = {
        **text,
        "model_type": "qwen2_5_vl",
        "vision_config": {**vision, "model_type": "qwen2_5_vl"},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "tie_word_embeddings": is_tied,
    }
    config = Qwen2_5_VLQTSplusConfig(**flat)
    assert config.text_config.rope_parameters["mrope_section"] == rope["mrope_section"]
    stored = {}
    for name, tensor in state.items():
        is_head = name == "lm_head.weight"
        if ".qtsplus." in name or (is_head and is_tied):
            continue
        stored[published_name(name)] = tensor.bfloat16()
    assert ("lm_head.weight" in stored) == (variant == "qtsplus-7b")
    assert "model.layers.0.mlp.up_proj.weight" in stored
    assert len(check_weights(stored, config, "a folder", without=SELECTOR)) == len(stored)


# --------------------------------------------------------------------------------------------------------------------
# From the reference
# --------------------------------------------------------------------------------------------------------------------


def test_what_a_reference_does_not_say_is_as_its_code_has_it(reference_folder, ours):
    config = read_json(reference_folder)
    silent = {"qts_plus_n_heads": 8}
    for key, value in config.items():
        if not key.startswith(("qts_plus_", "lambda_")):
            silent[key] = value
    write_json(silent, reference_folder)
    result = run(reference_folder, ours)
    assert_refused(result, "unexpected", "model.qtsplus.reencode_layers.1.q_proj.weight")
    drop_weights(reference_folder, ".reencode_layers.1.")
    selector = selector_config(convert(reference_folder, ours))
    assert selector.n_max == 2560
    assert selector.tau_s == 0.1
    assert selector.lambda_t == 1.0
    assert selector.reencode_layers == 1


def drop_weights(folder, words):
    """Removes the tensors whose names contain `words`."""

    def drop(tensors):
        for name in list(tensors):
            if words in name:
                del tensors[name]

    rewrite(folder, drop)


def test_a_reference_without_reencoding(reference_folder, ours):
    edit_json(reference_folder, qts_plus_reencode=False)
    drop_weights(reference_folder, ".reencode_layers.")
    selector = selector_config(convert(reference_folder, ours))
    assert selector.scoring_layers == 1
    assert selector.reencode_layers == 0


def test_a_reference_without_a_number_of_scoring_layers(reference_folder, ours):
    edit_json(reference_folder, qts_plus_scoring_layers=0)
    selector = selector_config(convert(reference_folder, ours))
    assert selector.scoring_layers == 1
    assert selector.reencode_layers == 2


def add_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def with_head(folder):
    rewrite(folder, add_head)


def in_shards(folder):
    whole = folder / "model.safetensors"
    weight_map = {}
    shards = {}
    for index, (name, tensor) in enumerate(sorted(load_file(whole).items())):
        file = FIRST_SHARD if index < 40 else SECOND_SHARD
        weight_map[name] = file
        shards.setdefault(file, {})[name] = tensor
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    write_json(index, folder, "model.safetensors.index.json")
    whole.unlink()


@pytest.mark.parametrize("change", [with_head, in_shards])
def test_a_reference_checkpoint_loads_alike_in_every_form(change, reference_folder, tmp_path):
    before = convert(reference_folder, tmp_path / "as it was")
    change(reference_folder)
    after = convert(reference_folder, tmp_path / "changed")
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(before / name, after / name, shallow=False), name


def test_the_head_is_tied_where_a_reference_does_not_say_and_has_none(reference_folder, ours):
    config = read_json(reference_folder)
    del config["tie_word_embeddings"]
    write_json(config, reference_folder)
    folder = convert(reference_folder, ours)
    assert Qwen2_5_VLQTSplusConfig.from_pretrained(folder).tie_word_embeddings


def test_the_vision_configuration_is_given_or_known_but_never_guessed(reference_folder, ours):
    path = reference_folder / "vision_config.json"
    vision = json.loads(path.read_text())
    path.unlink()
    result = run(reference_folder, ours)
    assert_refused(result, f"put one there, as {path}")
    # A whole Qwen2.5-VL configuration does as well.
    whole = {"model_type": "qwen2_5_vl", "vision_config": vision}
    path.write_text(json.dumps(whole))
    result = run(reference_folder, ours)
    assert result.exit_code == 0


@pytest.mark.parametrize("variant", ["qtsplus-3b", "qtsplus-7b"])
def test_the_vision_tower_of_a_published_model_is_known_by_its_width(variant, tmp_path):
    config = read_json(hub_configs() / variant)
    width = config["text_config"]["hidden_size"]
    assert find_vision_config(tmp_path, {"hidden_size": width})["out_hidden_size"] == width


def test_a_wrong_vision_configuration_is_named_by_what_does_not_fit(reference_folder, ours):
    edit_json(reference_folder, "vision_config.json", intermediate_size=64)
    result = run(reference_folder, ours)
    assert_refused(result, "size mismatch for model.visual.blocks.3.mlp.gate_proj.weight", "[48, 32]", "[64, 32]")


# --------------------------------------------------------------------------------------------------------------------
# What does not fit
# --------------------------------------------------------------------------------------------------------------------


def test_every_key_that_is_missing_or_unexpected_is_listed(reference_folder, ours):
    lost = [
        "model.qts_plus.selector.budget.mlp.2.bias",
        "model.qts_plus.selector.reencode_layers.1.core.ffn.net.0.weight",
        "model.vision_tower.merger.ln_q.weight",
        "model.layers.1.self_attn.k_proj.bias",
    ]
    missing = [rewritten(name, REFERENCE) for name in lost]

    def spoil(tensors):
        for name in lost:
            del tensors[name]
        tensors["model.extra"] = torch.ones(3)

    rewrite(reference_folder, spoil)
    result = run(reference_folder, ours)
    assert_refused(result, *missing, "4 missing", "1 unexpected: model.extra")
    assert not (ours).exists()


@pytest.mark.parametrize(
    "changed",
    [
        torch.ones(3),
        torch.ones(64, dtype=torch.int64),
    ],
    ids=["shape", "dtype"],
)
def test_a_weight_of_another_shape_or_kind_is_named(changed, stock_folder, ours):
    rewrite(stock_folder, lambda tensors: tensors.update({"model.norm.weight": changed}))
    result = run(stock_folder, ours)
    assert_refused(result, f"The weights in {stock_folder} cannot be used", "language_model.norm.weight")


def test_a_head_against_a_configuration_that_ties_it_is_refused(reference_folder, ours):
    with_head(reference_folder)
    rewrite(reference_folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert_refused(run(reference_folder, ours), "lm_head.weight", "tie_word_embeddings")


def test_an_untied_model_without_a_head_is_refused(reference_folder, ours):
    edit_json(reference_folder, tie_word_embeddings=False)
    assert_refused(run(reference_folder, ours), "1 missing: lm_head.weight")


def as_bin(folder):
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def without_shard(folder):
    in_shards(folder)
    (folder / SECOND_SHARD).unlink()


def as_adapter(folder):
    write_json({}, folder, "adapter_config.json")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (as_bin, ["has no weights", "Save others with Transformers"]),
        (without_shard, ["lacks model-00002-of-00002.safetensors"]),
        (as_adapter, ["adapter"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else None,
)
def test_a_broken_source_is_refused_in_one_line(spoil, words, reference_folder, tmp_path, ours):
    spoil(reference_folder)
    assert_refused(run(reference_folder, ours), *words)
    assert list(tmp_path.iterdir()) == [reference_folder]


def test_a_model_of_another_type_is_refused(reference_folder, ours):
    edit_json(reference_folder, model_type="llama")
    assert_refused(run(reference_folder, ours), "'llama'", "qwen2_5_vl")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "n_max=3"], ["--set", "a new selector"]),
        (["--set", "n_max"], ["expected NAME=VALUE"]),
    ],
)
def test_an_argument_without_a_meaning_is_refused(arguments, words, ours):
    assert_refused(run(CHECKPOINT, ours, *arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "n_mex=3"], ["n_mex"]),
        (["--set", "rho_min=2"], ["rho_min"]),
        (["--set", "selection=best"], ["selection='best'"]),
    ],
)
def test_an_argument_that_is_wrong_is_refused(arguments, words, stock_folder, ours):
    assert_refused(run(stock_folder, ours, *arguments), *words)


def test_a_quantized_checkpoint_is_refused(stock_folder, ours):
    edit_json(stock_folder, quantization_config={"quant_method": "awq", "bits": 4})
    assert_refused(run(stock_folder, ours), "quantized")


def test_a_source_that_is_nowhere_or_is_the_target_is_refused(stock_folder, tmp_path, ours):
    result = run(tmp_path / "none" / "here", ours)
    assert_refused(result, "There is no folder")
    result = run("lab/none", ours)
    assert_refused(result, "no folder 'lab/none'", "Hub")
    result = run(stock_folder / "model.safetensors", ours)
    assert_refused(result, "There is no folder")
    before = set(stock_folder.iterdir())
    assert_refused(run(stock_folder, stock_folder), "is in the source")
    # Before anything is fetched.
    assert_refused(run("lab/none", stock_folder), "holds files that an earlier run did not write")
    assert set(stock_folder.iterdir()) == before


def test_an_interrupted_run_leaves_nothing(stock_folder, tmp_path, monkeypatch, ours):
    def interrupt(tensors, folder, *_):
        (folder / "model.safetensors").write_bytes(b"half")
        assert not (folder / "config.json").exists(), "a half folder must not load"
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "save_torch_state_dict", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(stock_folder, ours)
    assert list(tmp_path.iterdir()) == [stock_folder]
