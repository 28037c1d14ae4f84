"""What Transformers asks of every model of its own, asked of ours; `docs/compatibility.md` says what does not apply."""

import copy
import inspect
import json
import pickle
from functools import cache

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from qtsplus.modeling_qtsplus import QTSplusPreTrainedMixin
from qtsplus.selector_qtsplus import QTSplusRMSNorm, QTSplusSelector
from safetensors import safe_open
from torch import nn
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
    StaticCache,
)
from transformers.utils import is_optimum_quanto_available

from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration, Qwen2_5_VLQTSplusModel
from tiny import (
    EOS,
    IM_END,
    IM_START,
    NEWLINE,
    USER,
    VIDEO_PAD,
    WORDS,
    batch,
    prompt,
    stock_twin,
    tiny_config,
    tiny_model,
)

FULL, BACKBONE = Qwen2_5_VLQTSplusForConditionalGeneration, Qwen2_5_VLQTSplusModel
CLASSES = pytest.mark.parametrize("cls", [FULL, BACKBONE], ids=["with_head", "backbone"])
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
TRANSFORMERS = Version(transformers.__version__)


def mixed_rows():
    """Three rows: an image and two videos; a long text; a video and a longer question."""
    return (
        prompt(images=[(1, 4, 4)], videos=[(2, 4, 6), (1, 4, 4)], question=6, seed=1),
        prompt(question=25, seed=2),
        prompt(videos=[(3, 4, 10)], question=9, seed=3, seconds=0.5),
    )


def mixed_inputs(pad_left=True):
    return batch(*mixed_rows(), pad_left=pad_left)


def with_labels(inputs):
    return {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


def build(cls, seed=0, tied=True, **selector):
    model = tiny_model(seed, tied, **selector)
    return model if cls is FULL else model.model


@cache
def shared_model():
    """For tests that change nothing."""
    return tiny_model()


@torch.no_grad()
def main_output(model, inputs, **call):
    """The logits, or the last hidden state."""
    return model(**inputs, **call)[0]


@torch.no_grad()
def real_output(model, inputs, **call):
    """The same without the padding, `[tokens, d]`."""
    output = model(**inputs, **call)
    return output[0][output.qtsplus.columns >= 0]


def saved_keys(folder):
    keys = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            keys += tensors.keys()
    return keys


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# --------------------------------------------------------------------------------------------------------------------
# Signature and configuration
# --------------------------------------------------------------------------------------------------------------------


@CLASSES
def test_the_first_argument_of_forward_is_input_ids_and_every_stock_argument_is_there(cls):
    names = list(inspect.signature(cls.forward).parameters)
    assert names[1] == "input_ids" == cls.main_input_name
    stock = Qwen2_5_VLForConditionalGeneration if cls is FULL else Qwen2_5_VLModel
    passed_on = {"rope_deltas", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
    assert set(inspect.signature(stock.forward).parameters) - set(names) <= passed_on


def test_only_the_class_with_a_head_generates():
    assert issubclass(FULL, GenerationMixin) and FULL.can_generate()
    assert not BACKBONE.can_generate()


def test_every_part_of_the_model_shares_one_configuration():
    model = tiny_model()
    assert model.config is model.model.config
    assert model.model.qtsplus.config is model.config.qtsplus_config
    assert model.model.language_model.config is model.config.text_config
    assert model.model.visual.config is model.config.vision_config


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_the_configuration_survives_deepcopy_and_pickle(clone):
    config = tiny_config(n_max=7, gate="gumbel")
    twin = clone(config)
    assert type(twin) is Qwen2_5_VLQTSplusConfig and twin.to_dict() == config.to_dict()
    twin.qtsplus_config.n_max = 9
    assert config.qtsplus_config.n_max == 7


def test_the_configuration_survives_json(tmp_path):
    config = tiny_config(n_max=7, gate="gumbel", rho_prior=0.2)
    config.save_pretrained(tmp_path)
    reloaded = Qwen2_5_VLQTSplusConfig.from_pretrained(tmp_path)
    assert json.loads(reloaded.to_json_string()) == json.loads(config.to_json_string())
    assert reloaded.qtsplus_config.to_dict() == config.qtsplus_config.to_dict()


def test_a_deep_copy_of_the_model_gives_the_same_logits_and_shares_nothing():
    model, inputs = tiny_model(), mixed_inputs()
    twin = copy.deepcopy(model)
    assert torch.equal(main_output(twin, inputs), main_output(model, inputs))
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert list(trainable(twin)) == list(trainable(model))


# --------------------------------------------------------------------------------------------------------------------
# Saving and loading
# --------------------------------------------------------------------------------------------------------------------


@CLASSES
@TIED
def test_a_saved_model_reloads_to_bit_equal_outputs(tmp_path, cls, tied):
    model, inputs = build(cls, tied=tied), mixed_inputs()
    model.save_pretrained(tmp_path)
    reloaded, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert not reloaded.training
    assert torch.equal(main_output(reloaded, inputs), main_output(model, inputs))


@CLASSES
def test_a_sharded_save_reloads_to_bit_equal_outputs(tmp_path, cls):
    model, inputs = build(cls), mixed_inputs()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(saved_keys(tmp_path))
    assert torch.equal(main_output(cls.from_pretrained(tmp_path), inputs), main_output(model, inputs))


@CLASSES
@TIED
def test_the_saved_keys_are_those_of_the_state_dict(tmp_path, cls, tied):
    model = build(cls, tied=tied)
    model.save_pretrained(tmp_path)
    expected = set(model.state_dict())
    if cls is FULL and tied:
        expected -= {"lm_head.weight"}
    assert set(saved_keys(tmp_path)) == expected


def test_a_saved_state_dict_is_the_state_dict_that_was_saved(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    reloaded = FULL.from_pretrained(tmp_path).state_dict()
    assert reloaded.keys() == model.state_dict().keys()
    assert all(torch.equal(value, reloaded[name]) for name, value in model.state_dict().items())


def test_a_save_of_a_reloaded_model_is_the_same_save(tmp_path):
    tiny_model().save_pretrained(tmp_path / "once")
    FULL.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    assert saved_keys(tmp_path / "once") == saved_keys(tmp_path / "twice")


def test_the_backbone_loads_from_a_checkpoint_with_a_head(tmp_path):
    model, inputs = tiny_model(tie_word_embeddings=False), mixed_inputs()
    model.save_pretrained(tmp_path)
    backbone = BACKBONE.from_pretrained(tmp_path)
    assert torch.equal(main_output(backbone, inputs), main_output(model.model, inputs))


def test_a_tied_model_loads_from_a_checkpoint_of_its_backbone(tmp_path):
    model, inputs = tiny_model(), mixed_inputs()
    model.model.save_pretrained(tmp_path)
    assert torch.equal(main_output(FULL.from_pretrained(tmp_path), inputs), main_output(model, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_running_mean_of_rho_survives_bfloat16_saving_and_loading(tmp_path, dtype):
    model = tiny_model(lambda_s=1.0).train()
    for _ in range(3):
        model(**mixed_inputs())
    history = model.model.qtsplus.rho_history.clone()
    assert history.dtype == torch.int64 and history[1] == 6 and history[0] > 2**32 * 6 * 0.05
    model.to(dtype).save_pretrained(tmp_path)
    reloaded = FULL.from_pretrained(tmp_path, dtype=dtype)
    for one in (model, reloaded):
        assert one.model.qtsplus.rho_history.dtype == torch.int64
        assert torch.equal(one.model.qtsplus.rho_history, history)


def test_evaluation_leaves_the_running_mean_of_rho():
    model = tiny_model()
    before = model.model.qtsplus.rho_history.clone()
    main_output(model, mixed_inputs())
    assert torch.equal(model.model.qtsplus.rho_history, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_a_model_loads_in_the_dtype_that_was_asked_for(tmp_path, dtype):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    model = FULL.from_pretrained(tmp_path, dtype=dtype)
    expected = torch.bfloat16 if dtype == "auto" else dtype
    assert {p.dtype for p in model.parameters()} == {expected} and model.dtype == expected


def test_a_model_loads_under_a_device_context(tmp_path):
    model, inputs = tiny_model(), mixed_inputs()
    model.save_pretrained(tmp_path)
    with torch.device("cpu"):
        reloaded = FULL.from_pretrained(tmp_path)
    assert torch.equal(main_output(reloaded, inputs), main_output(model, inputs))


def test_a_head_of_another_size_is_refused_unless_mismatches_are_allowed(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    config = copy.deepcopy(model.config)
    config.text_config.vocab_size = 520
    with pytest.raises(RuntimeError, match="mismatch"):
        FULL.from_pretrained(tmp_path, config=config)
    resized = FULL.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=True)
    assert resized.get_input_embeddings().weight.shape == resized.lm_head.weight.shape == (520, 64)
    name = "model.qtsplus.budget.mlp.0.weight"
    assert torch.equal(resized.state_dict()[name], model.state_dict()[name])


def test_loaded_weights_are_contiguous(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert all(p.is_contiguous() for p in FULL.from_pretrained(tmp_path).parameters())


# --------------------------------------------------------------------------------------------------------------------
# Initialisation
# --------------------------------------------------------------------------------------------------------------------


@CLASSES
def test_with_an_initializer_range_near_zero_every_mean_is_zero_or_one(cls):
    config = tiny_config()
    config.initializer_range = config.text_config.initializer_range = config.vision_config.initializer_range = 1e-10
    for name, parameter in cls(config).named_parameters():
        if "patch_embed" not in name:
            assert round(float(parameter.detach().mean()), 6) in (0.0, 1.0), name


def assert_fresh(selector, std):
    """The selector's weights are as a new one's."""
    zero = {f"reencode_layers.{i}.{part}" for i in range(2) for part in ("o_proj.weight", "ffn.2.weight", "ffn.2.bias")}
    for name, parameter in selector.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name in zero or name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            assert 0.8 * std < float(parameter.detach().std()) < 1.2 * std, name
    assert selector.rho_history.tolist() == [0, 0]


@CLASSES
def test_a_new_selector_has_ones_zeros_and_normal_weights_of_the_initializer_range(cls):
    torch.manual_seed(0)
    model = cls(tiny_config())
    assert_fresh((model if cls is BACKBONE else model.model).qtsplus, std=0.02)


@CLASSES
def test_weights_that_a_checkpoint_lacks_are_initialised_from_meta(cls):
    torch.manual_seed(0)
    # Ours refuses to load with weights missing; the stock loader under it fills them in.
    model = super(QTSplusPreTrainedMixin, cls).from_pretrained(None, config=tiny_config(), state_dict={})
    assert all(p.device.type == "cpu" and torch.isfinite(p).all() for p in model.parameters())
    assert_fresh((model if cls is BACKBONE else model.model).qtsplus, std=0.02)
    assert torch.isfinite(main_output(model.eval(), mixed_inputs())).all()


def test_loading_does_not_initialise_what_the_checkpoint_holds(tmp_path):
    model = tiny_model()
    model.model.qtsplus.rho_history += 5
    model.save_pretrained(tmp_path)
    selector = FULL.from_pretrained(tmp_path).model.qtsplus
    assert selector.rho_history.tolist() == [5, 5]
    assert selector.reencode_layers[0].o_proj.weight.abs().sum() > 0


def test_a_fresh_re_encoder_is_the_identity():
    torch.manual_seed(0)
    model = BACKBONE(tiny_config()).eval()
    tokens = torch.randn(9, 64)
    assert torch.equal(model.qtsplus._reencode(tokens, torch.arange(9).expand(3, -1)), tokens)


def test_a_fresh_re_encoder_still_learns():
    torch.manual_seed(0)
    model = FULL(tiny_config()).train()
    model(**with_labels(mixed_inputs())).loss.backward()
    for layer in model.model.qtsplus.reencode_layers:
        assert layer.o_proj.weight.grad.abs().sum() > 0 and layer.ffn[-1].weight.grad.abs().sum() > 0


def test_a_model_can_be_built_on_the_meta_device():
    with torch.device("meta"):
        model = FULL(tiny_config())
    assert all(p.is_meta for p in model.parameters())


# --------------------------------------------------------------------------------------------------------------------
# Embeddings
# --------------------------------------------------------------------------------------------------------------------


@TIED
def test_saving_and_loading_keep_the_embeddings_tied_or_apart(tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    for one in (model, FULL.from_pretrained(tmp_path)):
        assert (one.lm_head.weight is one.get_input_embeddings().weight) == tied
        assert one.get_output_embeddings() is one.lm_head


@CLASSES
def test_the_input_embeddings_can_be_read_and_replaced(cls):
    model = build(cls)
    new = nn.Embedding(512, 64)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    assert torch.isfinite(main_output(model, mixed_inputs())).all()


@CLASSES
@TIED
@pytest.mark.parametrize("size", [530, 506])
def test_resized_embeddings_keep_the_old_rows_and_the_model_works(cls, tied, size):
    model, inputs = build(cls, tied=tied), mixed_inputs()
    old, before = model.get_input_embeddings().weight.detach().clone(), main_output(model, inputs)
    model.resize_token_embeddings(size)
    kept = min(size, 512)
    assert model.get_input_embeddings().weight.shape == (size, 64)
    assert model.config.text_config.vocab_size == size
    assert torch.equal(model.get_input_embeddings().weight[:kept], old[:kept])
    after = main_output(model, inputs)
    if cls is BACKBONE:
        assert torch.equal(after, before)
        return
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert after.shape[-1] == size
    torch.testing.assert_close(after[..., :kept], before[..., :kept], atol=1e-5, rtol=1e-5)
    loss = model.train()(**with_labels(inputs)).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_resized_embeddings_survive_saving(tmp_path):
    model, inputs = tiny_model(), mixed_inputs()
    model.resize_token_embeddings(530)
    model.save_pretrained(tmp_path)
    assert torch.equal(main_output(FULL.from_pretrained(tmp_path), inputs), main_output(model, inputs))


# --------------------------------------------------------------------------------------------------------------------
# Forward
# --------------------------------------------------------------------------------------------------------------------


@CLASSES
def test_two_forward_passes_are_bit_equal(cls):
    model, inputs = build(cls), mixed_inputs()
    assert torch.equal(main_output(model, inputs), main_output(model, inputs))


@CLASSES
def test_eager_and_sdpa_attention_agree(tmp_path, cls):
    model, inputs = build(cls), mixed_inputs()
    model.save_pretrained(tmp_path)
    eager = cls.from_pretrained(tmp_path, attn_implementation="eager")
    sdpa = cls.from_pretrained(tmp_path, attn_implementation="sdpa")
    for one, name in ((eager, "eager"), (sdpa, "sdpa")):
        assert one.config._attn_implementation == one.config.text_config._attn_implementation == name
        assert one.config.vision_config._attn_implementation == name
    assert (real_output(eager, inputs) - real_output(sdpa, inputs)).abs().max() < 1e-4


def test_the_attention_can_be_changed_on_a_model_and_for_one_part():
    model, inputs = tiny_model(), mixed_inputs()
    before = real_output(model, inputs)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert (real_output(model, inputs) - before).abs().max() < 1e-4


def test_left_and_right_padding_give_the_same_real_logits():
    model = shared_model()
    outputs = []
    for pad_left in (True, False):
        inputs = mixed_inputs(pad_left)
        with torch.no_grad():
            outputs.append(model(**inputs))
    left, right = outputs
    for row in range(3):
        real = [o.logits[row, o.qtsplus.columns[row] >= 0] for o in outputs]
        assert (real[0] - real[1]).abs().max() < 1e-4
        assert torch.equal(left.qtsplus.kept_indices[row], right.qtsplus.kept_indices[row])


def test_more_padding_changes_no_real_logit():
    model, rows = shared_model(), mixed_rows()
    results = []
    for width in (None, 120):
        with torch.no_grad():
            output = model(**batch(*rows, width=width))
        results.append(output.logits[output.qtsplus.columns >= 0])
    assert (results[0] - results[1]).abs().max() < 1e-4


def test_hidden_states_and_attentions_have_the_shape_of_the_shortened_prompt():
    model, inputs = tiny_model(), mixed_inputs()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True, output_attentions=True)
    rows, width = output.qtsplus.columns.shape
    assert width < inputs["input_ids"].shape[1] and output.logits.shape[:2] == (rows, width)
    assert [tuple(h.shape) for h in output.hidden_states] == [(rows, width, 64)] * 3
    assert [tuple(a.shape) for a in output.attentions] == [(rows, 4, width, width)] * 2
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    real = output.qtsplus.columns >= 0
    weights = output.attentions[0].sum(-1).transpose(1, 2)[real]
    torch.testing.assert_close(weights, torch.ones_like(weights))


def test_hidden_states_and_attentions_can_be_asked_for_in_the_configuration(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    config = copy.deepcopy(model.config)
    config.text_config.output_hidden_states = config.output_hidden_states = True
    reloaded = FULL.from_pretrained(tmp_path, config=config)
    with torch.no_grad():
        assert len(reloaded(**mixed_inputs()).hidden_states) == 3


def test_hidden_states_and_attentions_keep_their_gradients():
    model = tiny_model()
    model.set_attn_implementation("eager")
    output = model(**mixed_inputs(), output_hidden_states=True, output_attentions=True)
    output.hidden_states[0].retain_grad()
    output.attentions[0].retain_grad()
    output.logits.flatten()[0].backward(retain_graph=True)
    output.logits.sum().backward()
    assert output.hidden_states[0].grad is not None and output.attentions[0].grad is not None


@CLASSES
def test_return_dict_false_gives_the_same_values_as_a_tuple(cls):
    model, inputs = build(cls), mixed_inputs()
    if cls is FULL:
        inputs = with_labels(inputs)
    with torch.no_grad():
        named, plain = model(**inputs), model(**inputs, return_dict=False)
    assert isinstance(plain, tuple) and len(plain) == len(named.to_tuple())
    names = list(named)
    assert names == (["loss", "logits", "past_key_values", "qtsplus"] if cls is FULL else
                     ["last_hidden_state", "past_key_values", "qtsplus"])  # fmt: skip
    for name, value in zip(names, plain, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, named[name])


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 2])], ids=["last", "last_three", "indices"])
def test_logits_to_keep_gives_those_of_the_full_logits(keep):
    model, inputs = shared_model(), mixed_inputs()
    full = main_output(model, inputs)
    expected = full[:, -keep:] if isinstance(keep, int) else full[:, keep]
    torch.testing.assert_close(main_output(model, inputs, logits_to_keep=keep), expected, atol=1e-5, rtol=1e-5)


def test_a_text_only_batch_gives_the_logits_of_stock():
    model = shared_model()
    inputs = batch(prompt(question=5), prompt(question=20, seed=2))
    real = inputs["attention_mask"].bool()
    ours, stock = main_output(model, inputs)[real], main_output(stock_twin(model), inputs)[real]
    assert (ours - stock).abs().max() < 1e-4


def test_a_text_takes_a_four_dimensional_mask_as_stock_does():
    model, inputs = shared_model(), batch(prompt(question=9))
    length = inputs["input_ids"].shape[1]
    causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    call = {"input_ids": inputs["input_ids"], "attention_mask": causal}
    position_ids = torch.arange(length).expand(3, 1, -1)
    ours = main_output(model, call, position_ids=position_ids)
    assert (ours - main_output(stock_twin(model), call, position_ids=position_ids)).abs().max() < 1e-4
    assert (ours - main_output(model, inputs)).abs().max() < 1e-4


def test_a_four_dimensional_mask_over_a_video_is_refused():
    inputs = batch(prompt(videos=[(2, 4, 6)]))
    length = inputs["input_ids"].shape[1]
    with pytest.raises(ValueError, match=r"attention_mask .*: expected input_ids' shape"):
        shared_model()(**{**inputs, "attention_mask": torch.zeros(1, 1, length, length)})


@CLASSES
def test_embeddings_of_a_text_are_as_good_as_its_ids(cls):
    model, inputs = build(cls), batch(prompt(question=5), prompt(question=20, seed=2))
    expected = main_output(model, inputs)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert torch.equal(main_output(model, {**inputs, "inputs_embeds": embeds}), expected)


@CLASSES
def test_embeddings_of_a_video_prompt_with_a_query_mask_are_as_good_as_its_ids(cls):
    model, inputs = build(cls), mixed_inputs()
    ids = inputs["input_ids"]
    query_mask = torch.zeros_like(ids)
    query_mask[:, -12:-5] = ((ids >= WORDS[0]) & (ids < WORDS[1]))[:, -12:-5].long()
    with torch.no_grad():
        expected = model(**inputs, query_mask=query_mask)
        del inputs["input_ids"]
        embedded = model(**inputs, inputs_embeds=model.get_input_embeddings()(ids), query_mask=query_mask)
    assert torch.equal(embedded.qtsplus.columns, expected.qtsplus.columns)
    real = expected.qtsplus.columns >= 0
    assert (embedded[0][real] - expected[0][real]).abs().max() < 1e-5
    assert all(map(torch.equal, embedded.qtsplus.kept_indices, expected.qtsplus.kept_indices))


def test_embeddings_take_labels_as_ids_do():
    model, inputs = shared_model(), with_labels(batch(prompt(question=9)))
    expected = model(**inputs).loss
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert torch.equal(model(**inputs, inputs_embeds=embeds).loss, expected)


def test_the_loss_is_the_cross_entropy_of_the_shifted_logits_of_the_shortened_prompt():
    model, inputs = shared_model(), with_labels(mixed_inputs())
    with torch.no_grad():
        output = model(**inputs)
    columns = output.qtsplus.columns
    labels = inputs["labels"].masked_fill(torch.isin(inputs["input_ids"], torch.tensor([499, VIDEO_PAD])), -100)
    labels = labels.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -100)
    expected = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)


# --------------------------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------------------------

TRAINING_CALLS = {
    "mixed rows": (mixed_inputs, {}),
    "text alone": (lambda: batch(prompt(question=5), prompt(question=20, seed=2)), {}),
    "an image alone": (lambda: batch(prompt(images=[(1, 4, 4)])), {}),
    "a fixed retention": (mixed_inputs, {"retention": 0.3}),
    "a cap": (mixed_inputs, {"max_visual_tokens": 2}),
}


@pytest.mark.parametrize("gate", ["straight_through", "gumbel"])
@pytest.mark.parametrize("selection", ["qtsplus", "uniform", "random", "all"])
@pytest.mark.parametrize("call", TRAINING_CALLS)
def test_a_training_step_gives_every_trainable_parameter_a_finite_gradient(gate, selection, call):
    make, options = TRAINING_CALLS[call]
    if selection == "all":
        options = {}
    model = tiny_model(gate=gate, selection=selection).train()
    torch.manual_seed(0)
    inputs = with_labels(make())
    loss = model(**inputs, **options).loss
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in trainable(model).items():
        if ".visual." in name and call == "text alone":
            continue  # as in stock: the vision tower takes no part
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("gate", ["straight_through", "gumbel"])
def test_the_answer_trains_the_scores_and_the_budget(gate):
    model = tiny_model(gate=gate, lambda_t=0.0, lambda_m=0.0, lambda_s=0.0).train()
    torch.manual_seed(0)
    model(**with_labels(mixed_inputs())).loss.backward()
    selector = model.model.qtsplus
    for parameter in (selector.scoring_layers[-1].q_proj.weight, selector.scoring_layers[-1].k_proj.weight):
        assert parameter.grad.abs().max() > 0
    assert selector.budget.mlp[0].weight.grad.abs().max() > 0


def test_a_few_steps_of_training_lower_the_loss():
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-3)
    batches = [
        with_labels(mixed_inputs()),
        with_labels(batch(prompt(videos=[(4, 4, 4)], seed=5))),
        with_labels(batch(prompt(question=5))),
    ]
    losses = []
    for step in range(12):
        loss = model(**batches[step % 3]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_gradient_checkpointing_gives_the_same_loss_and_gradients(reentrant):
    inputs = with_labels(mixed_inputs())
    results = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            assert model.is_gradient_checkpointing
        loss = model(**inputs).loss
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in trainable(model).items()}))
    (plain, gradients), (checkpointed, others) = results
    torch.testing.assert_close(checkpointed, plain)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("gate", ["straight_through", "gumbel"])
def test_gradient_checkpointing_trains_with_kept_lengths_that_change(gate):
    model = tiny_model(gate=gate).train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(trainable(model).values(), lr=1e-2)
    for step in range(4):
        inputs = batch(prompt(videos=[(1 + step, 4, 6)], seed=step), prompt(question=3 + step))
        model(**with_labels(inputs)).loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in trainable(model).values())
        optimizer.step()
        optimizer.zero_grad()
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def frozen_names(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def test_the_unused_part_of_the_last_scoring_layer_is_frozen_and_stays_so_after_loading(tmp_path):
    model = tiny_model(scoring_layers=2)
    expected = {
        f"model.qtsplus.scoring_layers.1.{name}"
        for name in (
            *(f"{part}.{kind}" for part in ("v_proj", "ffn.0", "ffn.2") for kind in ("weight", "bias")),
            "o_proj.weight",
            "ffn_norm.weight",
        )
    }
    assert frozen_names(model) == expected
    model.save_pretrained(tmp_path)
    reloaded = FULL.from_pretrained(tmp_path)
    assert frozen_names(reloaded) == expected
    assert frozen_names(reloaded.train()) == expected
    assert frozen_names(FULL.from_pretrained(tmp_path, device_map="cpu")) == expected


def test_training_in_bfloat16_gives_finite_gradients():
    model = tiny_model().to(torch.bfloat16).train()
    inputs = {k: v.bfloat16() if k.startswith("pixel") else v for k, v in with_labels(mixed_inputs()).items()}
    model(**inputs).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in trainable(model).values())


def test_training_under_autocast_gives_finite_gradients_and_a_float32_budget():
    model = tiny_model().train()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**with_labels(mixed_inputs()))
    output.loss.backward()
    assert output.qtsplus.rho.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in trainable(model).values())


def test_autocast_leaves_relevance_and_budget_in_float32():
    model, inputs = shared_model(), batch(prompt(videos=[(4, 8, 8)], seed=3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        qtsplus = model(**inputs).qtsplus
    assert qtsplus.rho.dtype == qtsplus.relevance[0].dtype == torch.float32
    # bfloat16 scores of 64 tokens collapse; those in float32 stay apart.
    assert len(qtsplus.relevance[0].unique()) == 64


def test_autocast_leaves_the_budget_head_as_it_is():
    head = tiny_model().model.qtsplus.budget
    features = torch.randn(67, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = head(features, 0.05, 0.5)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(head(features, 0.05, 0.5), expected)


# --------------------------------------------------------------------------------------------------------------------
# Dtypes, devices, compilation
# --------------------------------------------------------------------------------------------------------------------


def test_in_bfloat16_the_model_runs_and_keeps_relevance_and_budget_in_float32():
    model = tiny_model().to(torch.bfloat16)
    inputs = mixed_inputs()
    with torch.no_grad():
        output = model(**inputs)
    assert output.logits.dtype == torch.bfloat16 and torch.isfinite(output.logits).all()
    assert output.qtsplus.rho.dtype == torch.float32
    assert all(r.dtype == torch.float32 for r in output.qtsplus.relevance)
    for relevance in (output.qtsplus.relevance[0], output.qtsplus.relevance[2]):
        assert len(relevance.unique()) == len(relevance)
    ids = model.generate(**inputs, max_new_tokens=3)
    assert ids.shape[1] <= inputs["input_ids"].shape[1] + 3


def test_in_bfloat16_the_logits_are_near_those_in_float32():
    model, inputs = tiny_model(), batch(prompt(videos=[(2, 4, 6)]))
    expected = main_output(model, inputs, retention=1.0)
    half = main_output(model.to(torch.bfloat16), inputs, retention=1.0).float()
    assert (half - expected).abs().max() < 0.1 * expected.abs().max()


OFFLOADS = {
    "everything on the CPU": {"": "cpu"},
    "the selector on disk": {
        "model.visual": "cpu",
        "model.language_model": "cpu",
        "model.qtsplus": "disk",
        "lm_head": "cpu",
    },
    "the language model on disk": {
        "model.visual": "cpu",
        "model.language_model": "disk",
        "model.qtsplus": "cpu",
        "lm_head": "disk",
    },
    "all but the vision on disk": {
        "model.visual": "cpu",
        "model.language_model": "disk",
        "model.qtsplus": "disk",
        "lm_head": "disk",
    },
}


@pytest.mark.parametrize("where", OFFLOADS)
def test_a_device_map_gives_the_same_logits_and_ids(tmp_path, where):
    model, inputs = tiny_model(tie_word_embeddings=False), mixed_inputs()
    model.save_pretrained(tmp_path / "model")
    placed = FULL.from_pretrained(tmp_path / "model", device_map=OFFLOADS[where], offload_folder=tmp_path / "offload")
    assert any(p.is_meta for p in placed.parameters()) == ("disk" in where)
    assert (main_output(placed, inputs) - main_output(model, inputs)).abs().max() < 1e-5
    assert torch.equal(placed.generate(**inputs, max_new_tokens=3), model.generate(**inputs, max_new_tokens=3))


def test_an_automatic_device_map_with_little_memory_never_splits_the_selector(tmp_path):
    from accelerate import infer_auto_device_map

    model = tiny_model(tie_word_embeddings=False)
    device_map = infer_auto_device_map(
        model, max_memory={"cpu": 700_000, 0: 0}, no_split_module_classes=list(model._no_split_modules)
    )
    assert "disk" in device_map.values()
    assert not [name for name in device_map if name.startswith("model.qtsplus.")]


def test_a_model_that_was_offloaded_saves_all_its_weights(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "model")
    placed = FULL.from_pretrained(
        tmp_path / "model", device_map=OFFLOADS["the selector on disk"], offload_folder=tmp_path / "offload"
    )
    placed.save_pretrained(tmp_path / "again")
    reloaded = FULL.from_pretrained(tmp_path / "again")
    assert all(torch.equal(v, reloaded.state_dict()[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_selector_gives_the_same_outputs(backend):
    model = tiny_model()
    inputs = [mixed_inputs(), batch(prompt(videos=[(2, 4, 6)], seed=7))]
    with torch.no_grad():
        expected = [model(**one) for one in inputs]
        torch.compiler.reset()
        model.model.qtsplus.compile(backend=backend)
        for one, plain in zip(inputs, expected, strict=True):
            compiled = model(**one)
            assert (compiled.logits - plain.logits).abs().max() < 1e-5
            assert all(map(torch.equal, compiled.qtsplus.kept_indices, plain.qtsplus.kept_indices))
    torch.compiler.reset()


def test_a_compiled_selector_trains():
    inputs = with_labels(batch(prompt(videos=[(2, 4, 6)], seed=7)))
    gradients = []
    for compiled in (False, True):
        model = tiny_model().train()
        if compiled:
            torch.compiler.reset()
            model.model.qtsplus.compile(backend="aot_eager")
        model(**inputs).loss.backward()
        gradients.append({name: p.grad for name, p in trainable(model).items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    torch.compiler.reset()


# --------------------------------------------------------------------------------------------------------------------
# Generation
# --------------------------------------------------------------------------------------------------------------------

NEW = 6


def greedy(model=None, inputs=None, **call):
    model = shared_model() if model is None else model
    inputs = mixed_inputs() if inputs is None else inputs
    return model.generate(**inputs, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, **call)


@pytest.mark.parametrize(
    "implementation", ["dynamic", "dynamic_full", "static", "sliding_window", "offloaded", "offloaded_static"]
)
def test_every_kind_of_cache_generates_the_same(implementation):
    if "offloaded" in implementation and not torch.cuda.is_available():
        pytest.skip("stock offloads to the CPU from an accelerator")
    if implementation not in transformers.generation.configuration_utils.ALL_CACHE_IMPLEMENTATIONS:
        pytest.skip("unknown to this version of Transformers")
    assert torch.equal(greedy(cache_implementation=implementation), greedy())


@pytest.mark.skipif(not is_optimum_quanto_available(), reason="optimum-quanto is not installed")
def test_a_quantized_cache_generates():
    ids = greedy(cache_implementation="quantized", cache_config={"backend": "quanto", "nbits": 4})
    assert ids.shape == greedy().shape


def test_no_cache_generates_the_same():
    assert torch.equal(greedy(use_cache=False), greedy())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_the_caller_made_generates_the_same(kind):
    config = shared_model().config.get_text_config()
    own = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=200)
    assert torch.equal(greedy(past_key_values=own), greedy())
    assert int(own.get_seq_length()) > 0


def test_the_returned_cache_holds_the_shortened_prompt_and_all_but_the_last_new_token():
    output = greedy(return_dict_in_generate=True)
    assert output.past_key_values.get_seq_length() == output.qtsplus.columns.shape[1] + NEW - 1
    layer = output.past_key_values.layers[0]
    assert layer.keys.shape == layer.values.shape == (3, 2, output.qtsplus.columns.shape[1] + NEW - 1, 16)


def test_generate_returns_scores_logits_hidden_states_and_attentions_as_stock_does():
    model, inputs = tiny_model(), mixed_inputs()
    model.set_attn_implementation("eager")
    output = greedy(
        model,
        inputs,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    width = output.qtsplus.columns.shape[1]
    assert len(output.scores) == len(output.logits) == NEW
    assert all(tuple(one.shape) == (3, 512) for one in (*output.scores, *output.logits))
    for step in range(NEW):
        new, seen = (width, width) if step == 0 else (1, width + step)
        assert [tuple(h.shape) for h in output.hidden_states[step]] == [(3, new, 64)] * 3
        assert [tuple(a.shape) for a in output.attentions[step]] == [(3, 4, new, seen)] * 2
    assert torch.equal(torch.stack(output.scores, 1).argmax(-1), output.sequences[:, -NEW:])


def test_the_first_logits_of_generate_are_the_last_of_forward():
    model, inputs = shared_model(), mixed_inputs()
    output = greedy(return_dict_in_generate=True, output_logits=True)
    expected = main_output(model, inputs, logits_to_keep=1)[:, 0]
    assert (output.logits[0] - expected).abs().max() < 1e-4


def test_greedy_ids_are_those_of_a_loop_over_forward():
    """Decoding, against forward on the growing conversation."""
    model, row = shared_model(), prompt(videos=[(3, 4, 6)], seed=4)
    inputs = batch(row)
    ids = inputs["input_ids"]
    generated = greedy(model, inputs)
    question = torch.zeros_like(ids)
    question[0, -10:-5] = 1
    with_question = greedy(model, {**inputs, "query_mask": question})
    for _ in range(NEW):
        mask = torch.cat([question, question.new_zeros(1, ids.shape[1] - question.shape[1])], dim=1)
        call = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids), "query_mask": mask}
        ids = torch.cat([ids, next_token(main_output(model, call))], dim=1)
    assert torch.equal(with_question, ids)
    assert generated.shape == ids.shape


def next_token(logits):
    logits = logits[:, -1:].clone()
    logits[..., EOS] = -torch.inf
    return logits.argmax(-1)


@pytest.mark.parametrize("beams", [2, 4])
def test_beams_of_a_batch_are_those_of_each_row_alone(beams):
    inputs = mixed_inputs()
    together = greedy(inputs=inputs, num_beams=beams)[:, inputs["input_ids"].shape[1] :]
    for b, row in enumerate(mixed_rows()):
        alone = greedy(inputs=batch(row), num_beams=beams)[0, len(row.ids) :]
        assert torch.equal(together[b], alone)


def test_beams_return_their_scores_and_as_many_sequences_as_asked():
    inputs = mixed_inputs()
    output = greedy(num_beams=3, num_return_sequences=2, return_dict_in_generate=True, output_scores=True)
    assert output.sequences.shape == (6, inputs["input_ids"].shape[1] + NEW)
    assert output.sequences_scores.shape == (6,) and torch.isfinite(output.sequences_scores).all()
    repeated = inputs["input_ids"].repeat_interleave(2, dim=0)
    assert torch.equal(output.sequences[:, : repeated.shape[1]], repeated)


def test_sampling_with_a_seed_is_repeatable_and_returns_as_many_as_asked():
    model, inputs = shared_model(), mixed_inputs()
    samples = []
    for _ in range(2):
        torch.manual_seed(3)
        samples.append(model.generate(**inputs, do_sample=True, num_return_sequences=2, max_new_tokens=NEW))
    assert torch.equal(*samples) and len(samples[0]) == 6


def test_sampling_of_beams_runs():
    torch.manual_seed(0)
    ids = shared_model().generate(**mixed_inputs(), do_sample=True, num_beams=2, max_new_tokens=NEW)
    assert len(ids) == 3


def test_assisted_decoding_with_a_copy_of_the_model_is_greedy():
    model, inputs = tiny_model(), batch(prompt(videos=[(3, 4, 6)], images=[(1, 4, 4)]))
    assert torch.equal(greedy(model, inputs, assistant_model=copy.deepcopy(model)), greedy(model, inputs))


def test_assisted_decoding_with_another_model_is_greedy():
    model, inputs = tiny_model(), batch(prompt(videos=[(3, 4, 6)]))
    assert torch.equal(greedy(model, inputs, assistant_model=tiny_model(seed=5)), greedy(model, inputs))


def test_assisted_decoding_of_a_text_is_greedy():
    model, inputs = tiny_model(), batch(prompt(question=7))
    assert torch.equal(greedy(model, inputs, assistant_model=copy.deepcopy(model)), greedy(model, inputs))


def test_prompt_lookup_is_greedy():
    row = prompt(videos=[(3, 4, 6)], question=8)
    row.ids[-13:-5] = row.ids[-13:-9] * 2
    inputs = batch(row)
    assert torch.equal(greedy(inputs=inputs, prompt_lookup_num_tokens=3), greedy(inputs=inputs))


def test_embeddings_of_a_text_generate_what_its_ids_generate():
    model, inputs = shared_model(), batch(prompt(question=5), prompt(question=20, seed=2))
    width = inputs["input_ids"].shape[1]
    expected = greedy(model, inputs)[:, width:]
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    stock = greedy(stock_twin(model), {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]})
    assert torch.equal(stock, expected)
    ours = greedy(model, {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]})
    assert torch.equal(ours, expected)


@pytest.mark.skipif(Version("5.18") > TRANSFORMERS, reason="features cannot be cut into chunks before 5.18")
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_that_is_prefilled_in_chunks_generates_the_same(chunk):
    assert torch.equal(greedy(prefill_chunk_size=chunk), greedy())


def test_generate_passes_the_shortened_prompt_to_logits_processors():
    seen = []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(tuple(input_ids.shape))
            return scores

    output = greedy(logits_processor=LogitsProcessorList([Spy()]), return_dict_in_generate=True)
    width = output.qtsplus.columns.shape[1]
    assert seen == [(3, width + step) for step in range(NEW)]


def test_generate_refuses_an_argument_that_nobody_knows():
    with pytest.raises(ValueError, match="no_such_argument"):
        shared_model().generate(**mixed_inputs(), no_such_argument=1, max_new_tokens=2)


def test_a_further_turn_from_the_returned_cache_is_a_run_over_the_whole_conversation():
    model = tiny_model(selection="all")
    inputs = batch(prompt(videos=[(2, 4, 6)]))
    first = greedy(model, inputs, return_dict_in_generate=True)
    turn = torch.tensor([[IM_END, NEWLINE, IM_START, USER, NEWLINE, 40, 41, IM_END, NEWLINE, IM_START, 493, NEWLINE]])
    conversation = torch.cat([first.sequences, turn], dim=1)
    call = {"input_ids": conversation, "attention_mask": torch.ones_like(conversation)}
    continued = greedy(model, {**call, "past_key_values": first.past_key_values})
    again = greedy(model, {**inputs, **call})
    assert torch.equal(continued, again)


def test_generate_does_not_change_the_generation_config_or_the_inputs():
    model, inputs = tiny_model(), mixed_inputs()
    settings, copies = model.generation_config.to_dict(), {k: v.clone() for k, v in inputs.items()}
    model.generate(**inputs, max_length=inputs["input_ids"].shape[1] + 3)
    assert model.generation_config.to_dict() == settings
    assert all(torch.equal(inputs[name], value) for name, value in copies.items())


def test_generate_in_training_mode_uses_the_gate_of_inference():
    model, inputs = tiny_model(gate="gumbel"), mixed_inputs()
    expected = greedy(model, inputs)
    history = model.model.qtsplus.rho_history.clone()
    model.train()
    assert torch.equal(greedy(model, inputs), expected)
    assert torch.equal(model.model.qtsplus.rho_history, history)


# --------------------------------------------------------------------------------------------------------------------
# PEFT
# --------------------------------------------------------------------------------------------------------------------


def lora_model():
    torch.manual_seed(0)
    settings = LoraConfig(
        r=4,
        target_modules=r".*language_model.*\.(q_proj|v_proj)",
        modules_to_save=["qtsplus"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(tiny_model(), settings)


def test_lora_with_a_trained_selector_takes_a_step():
    model, inputs = lora_model().train(), with_labels(mixed_inputs())
    loss = model(**inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    names = list(trainable(model))
    assert any("lora_A" in name for name in names) and any(".qtsplus.modules_to_save." in name for name in names)
    for name, parameter in trainable(model).items():
        if ".scoring_layers.0." in name and any(part in name for part in ("v_proj", "o_proj", "ffn")):
            continue  # PEFT makes the whole copy trainable; these never receive a gradient
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_lora_with_a_trained_selector_saves_loads_and_merges_to_the_same_logits_and_ids(tmp_path):
    model, inputs = lora_model(), mixed_inputs()
    optimizer = torch.optim.SGD(trainable(model).values(), lr=1e-2)
    model.train()(**with_labels(inputs)).loss.backward()
    optimizer.step()
    model.eval()
    logits, ids = main_output(model, inputs), greedy(model, inputs)
    assert (logits[:, -1] - main_output(tiny_model(), inputs)[:, -1]).abs().max() > 1e-3

    model.save_pretrained(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter").eval()
    assert torch.equal(main_output(reloaded, inputs), logits)
    assert torch.equal(greedy(reloaded, inputs), ids)

    merged = reloaded.merge_and_unload()
    assert type(merged) is FULL and not any("lora" in name for name in merged.state_dict())
    assert (main_output(merged, inputs) - logits).abs().max() < 1e-4
    merged.save_pretrained(tmp_path / "merged")
    final = FULL.from_pretrained(tmp_path / "merged")
    assert torch.equal(main_output(final, inputs), main_output(merged, inputs))


def test_the_selector_has_only_parameters_that_initialisation_knows():
    kinds = {type(m) for m in shared_model().model.qtsplus.modules() if any(True for _ in m.parameters(recurse=False))}
    assert all(issubclass(kind, (nn.Linear, QTSplusRMSNorm)) for kind in kinds)
    assert isinstance(shared_model().model.qtsplus, QTSplusSelector)
