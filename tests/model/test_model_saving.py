"""What Transformers asks of every model of its own, asked of ours: configuration, saving, loading, initialisation."""

import copy
import inspect
import json
import pickle
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLModel

from model_checks import (
    BACKBONE,
    CLASSES,
    FULL,
    TIED,
    build,
    main_output,
    mixed_inputs,
    saved_keys,
    trainable,
    with_labels,
)
from qtsplus import Qwen2_5_VLQTSplusConfig
from qtsplus.model.generation_qtsplus import QTSplusPreTrainedMixin
from tiny import assert_same, tiny_config, tiny_model

# Signature and configuration -----------------------------------------------------------------------------------------


@CLASSES
def test_the_first_argument_of_forward_is_input_ids_and_every_stock_argument_is_there(cls):
    stock = Qwen2_5_VLForConditionalGeneration if cls is FULL else Qwen2_5_VLModel
    names = list(inspect.signature(cls.forward).parameters)
    stock_names = set(inspect.signature(stock.forward).parameters)
    assert names[1] == "input_ids"
    assert cls.main_input_name == "input_ids"
    passed_on = {"rope_deltas", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
    assert stock_names - set(names) <= passed_on


def test_every_part_of_the_model_shares_one_configuration():
    model = tiny_model()
    assert model.config is model.model.config
    assert model.model.qtsplus.config is model.config.qtsplus_config
    assert model.model.language_model.config is model.config.text_config
    assert model.model.visual.config is model.config.vision_config


def through_json(config):
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return type(config).from_pretrained(folder)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config)), through_json])
def test_the_configuration_survives_deepcopy_pickle_and_json(clone):
    config = tiny_config(n_max=7, gate="gumbel", rho_prior=0.2)
    twin = clone(config)
    assert type(twin) is Qwen2_5_VLQTSplusConfig
    assert twin.to_dict() == config.to_dict()
    twin.qtsplus_config.n_max = 9
    assert config.qtsplus_config.n_max == 7


def test_a_deep_copy_of_the_model_gives_the_same_logits_and_shares_nothing():
    model = tiny_model()
    inputs = mixed_inputs()
    twin = copy.deepcopy(model)
    assert_same(main_output(twin, inputs), main_output(model, inputs))
    for parameter, copied in zip(model.parameters(), twin.parameters(), strict=True):
        assert copied.data_ptr() != parameter.data_ptr()
    assert list(trainable(twin)) == list(trainable(model))


# Saving and loading --------------------------------------------------------------------------------------------------


@CLASSES
@TIED
def test_a_saved_model_reloads_to_the_same_bits_under_its_own_names(tmp_path, cls, tied):
    model = build(cls, tied=tied, query_states="layer")
    inputs = mixed_inputs()
    model.save_pretrained(tmp_path / "once")
    state = model.state_dict()
    unsaved = {"lm_head.weight"} if cls is FULL and tied else set()
    assert set(saved_keys(tmp_path / "once")) == set(state) - unsaved
    with torch.device("cpu"):
        reloaded, info = cls.from_pretrained(tmp_path / "once", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    if cls is FULL:
        is_tied = reloaded.lm_head.weight is reloaded.get_input_embeddings().weight
        assert is_tied == tied
    assert not reloaded.training
    assert reloaded.config.qtsplus_config.query_states == "layer"
    assert_same(dict(reloaded.state_dict()), dict(state))
    assert all(parameter.is_contiguous() for parameter in reloaded.parameters())
    assert_same(main_output(reloaded, inputs), main_output(model, inputs))
    reloaded.save_pretrained(tmp_path / "twice")
    assert saved_keys(tmp_path / "once") == saved_keys(tmp_path / "twice")


@CLASSES
def test_a_sharded_save_reloads_to_bit_equal_outputs(tmp_path, cls):
    model = build(cls)
    inputs = mixed_inputs()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(saved_keys(tmp_path))
    assert_same(main_output(cls.from_pretrained(tmp_path), inputs), main_output(model, inputs))


def test_the_backbone_loads_from_a_checkpoint_with_a_head(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    inputs = mixed_inputs()
    model.save_pretrained(tmp_path)
    backbone = BACKBONE.from_pretrained(tmp_path)
    assert_same(main_output(backbone, inputs), main_output(model.model, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_running_mean_of_rho_survives_bfloat16_saving_and_loading(tmp_path, dtype):
    model = tiny_model(lambda_s=1.0).train()
    for _ in range(3):
        model(**mixed_inputs())
    history = model.model.qtsplus.rho_history.clone()
    main_output(model.eval(), mixed_inputs())  # evaluation leaves it
    assert history.dtype == torch.int64
    assert history[1] == 6
    assert history[0] > 2**32 * 6 * 0.05
    model.to(dtype).save_pretrained(tmp_path)
    reloaded = FULL.from_pretrained(tmp_path, dtype=dtype)
    assert_same(model.model.qtsplus.rho_history, history)
    assert_same(reloaded.model.qtsplus.rho_history, history)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_a_model_loads_in_the_dtype_that_was_asked_for(tmp_path, dtype):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    model = FULL.from_pretrained(tmp_path, dtype=dtype)
    expected = torch.bfloat16 if dtype == "auto" else dtype
    assert model.dtype == expected
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


# Initialisation ------------------------------------------------------------------------------------------------------


def check_fresh(model):
    """The weights of its selector are as a new one's."""
    selector = model.qtsplus if isinstance(model, BACKBONE) else model.model.qtsplus
    for name, parameter in selector.named_parameters():
        ends_re_encoding = name.startswith("reencode_layers") and name.endswith(("o_proj.weight", "ffn.2.weight"))
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif ends_re_encoding or name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert 0.8 * 0.02 < parameter.std().item() < 1.2 * 0.02, name
    assert selector.rho_history.tolist() == [0, 0]


@CLASSES
def test_a_new_selector_has_ones_zeros_and_normal_weights_of_the_initializer_range(cls):
    torch.manual_seed(0)
    check_fresh(cls(tiny_config()))


@CLASSES
def test_weights_that_a_checkpoint_lacks_are_initialised_from_meta(cls):
    torch.manual_seed(0)
    # Ours refuses to load with weights missing; the stock loader under it fills them in.
    model = super(QTSplusPreTrainedMixin, cls).from_pretrained(None, config=tiny_config(), state_dict={})
    assert not any(parameter.is_meta for parameter in model.parameters())
    check_fresh(model)
    assert torch.isfinite(main_output(model.eval(), mixed_inputs())).all()


def test_a_fresh_re_encoder_is_the_identity():
    torch.manual_seed(0)
    model = BACKBONE(tiny_config()).eval()
    tokens = torch.randn(9, 64)
    positions = torch.arange(9).expand(3, -1)
    (encoded,), _ = model.qtsplus([tokens], [tokens[:2]], [positions], retention=1.0)
    assert_same(encoded, tokens)


def test_a_fresh_re_encoder_still_learns():
    torch.manual_seed(0)
    model = FULL(tiny_config()).train()
    model(**with_labels(mixed_inputs())).loss.backward()
    for layer in model.model.qtsplus.reencode_layers:
        assert layer.o_proj.weight.grad.abs().sum() > 0
        assert layer.ffn[-1].weight.grad.abs().sum() > 0
