"""What Transformers asks of every model of its own, asked of ours: training, dtypes, devices, compilation, PEFT."""

import pytest
import torch
from accelerate import infer_auto_device_map
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from model_checks import FULL, assert_trained, greedy, main_output, mixed_inputs, trainable, with_labels
from tiny import assert_same, batch, prompt, run, tiny_model


def train_step(model, inputs=None):
    """The loss of a step in training mode, and the gradients by their names."""
    if inputs is None:
        inputs = mixed_inputs()
    model.train()
    loss = model(**with_labels(inputs)).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trainable(model).items()}
    return loss.detach(), gradients


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["soft", "gumbel"])
def test_the_answer_trains_the_scores_and_the_budget(gate):
    model = tiny_model(gate=gate, lambda_t=0.0, lambda_m=0.0, lambda_s=0.0)
    torch.manual_seed(0)
    train_step(model)
    selector = model.model.qtsplus
    scoring = selector.scoring_layers[-1]
    for layer in (scoring.q_proj, scoring.k_proj, selector.budget.mlp[0]):
        assert layer.weight.grad.any()


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_gradient_checkpointing_gives_the_same_loss_and_gradients(reentrant):
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert model.is_gradient_checkpointing
    assert_close(train_step(model), train_step(tiny_model()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("gate", ["soft", "detached", "gumbel"])
def test_gradient_checkpointing_trains_with_kept_lengths_that_change(gate):
    model = tiny_model(gate=gate)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(trainable(model).values(), lr=1e-2)
    for step in range(4):
        video = prompt(videos=[(1 + step, 4, 6)], seed=step)
        text = prompt(question=3 + step)
        train_step(model, batch(video, text))
        assert_trained(model)
        optimizer.step()
        optimizer.zero_grad()
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


UNUSED = {
    "v_proj.weight",
    "v_proj.bias",
    "o_proj.weight",
    "ffn_norm.weight",
    "ffn.0.weight",
    "ffn.0.bias",
    "ffn.2.weight",
    "ffn.2.bias",
}


def test_the_unused_part_of_the_last_scoring_layer_is_frozen_and_stays_so_after_loading(tmp_path):
    model = tiny_model(scoring_layers=2)
    model.save_pretrained(tmp_path)
    reloaded = FULL.from_pretrained(tmp_path).train()
    placed = FULL.from_pretrained(tmp_path, device_map="cpu")
    expected = {f"model.qtsplus.scoring_layers.1.{name}" for name in UNUSED}
    for each in (model, reloaded, placed):
        frozen = {name for name, parameter in each.named_parameters() if not parameter.requires_grad}
        assert frozen == expected


def assert_relevance_and_budget_are_in_float32(qtsplus):
    """In bfloat16 the relevances of many tokens would collapse."""
    assert qtsplus.rho.dtype == torch.float32
    for relevance in qtsplus.relevance:
        assert relevance.dtype == torch.float32
        assert len(relevance.unique()) == len(relevance)


def test_training_under_autocast_gives_finite_gradients_and_a_float32_budget():
    model = tiny_model().train()
    inputs = with_labels(mixed_inputs())
    exact = model(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs)
    output.loss.backward()
    assert_relevance_and_budget_are_in_float32(output.qtsplus)
    torch.testing.assert_close(output.qtsplus.rho, exact.qtsplus.rho, atol=5e-3, rtol=0)
    assert_trained(model)


def test_autocast_loses_no_gradient_of_layers_that_lm_attention_runs_first():
    """They run twice in one forward, and autocast keeps the weights that it casts."""
    model = tiny_model(selection="lm_attention")
    with torch.autocast("cpu", torch.bfloat16):
        train_step(model)
    for layer in model.model.language_model.layers:
        assert layer.self_attn.q_proj.weight.grad.any()
        assert layer.mlp.up_proj.weight.grad.any()


# Dtypes, devices, compilation ----------------------------------------------------------------------------------------


def test_in_bfloat16_the_model_runs_trains_and_keeps_relevance_and_budget_in_float32():
    model = tiny_model().to(torch.bfloat16)
    inputs = mixed_inputs()
    output = run(model, inputs)
    assert output.logits.dtype == torch.bfloat16
    assert torch.isfinite(output.logits).all()
    assert_relevance_and_budget_are_in_float32(output.qtsplus)
    model.generate(**inputs, max_new_tokens=3)
    train_step(model)
    assert_trained(model)


OFFLOADS = {
    "everything on the CPU": {"": "cpu"},
    "everything on disk": {"": "disk"},
}


@pytest.mark.parametrize("where", OFFLOADS)
def test_a_device_map_gives_the_same_logits_and_ids_and_saves_all_weights(tmp_path, where):
    model = tiny_model(tie_word_embeddings=False, query_states="layer")
    inputs = mixed_inputs()
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    placed = FULL.from_pretrained(
        folder,
        device_map=OFFLOADS[where],
        offload_folder=tmp_path / "offload",
    )
    is_offloaded = any(parameter.is_meta for parameter in placed.parameters())
    assert is_offloaded == ("disk" in where)
    assert_close(main_output(placed, inputs), main_output(model, inputs), atol=1e-5, rtol=0)
    assert_same(greedy(placed, inputs), greedy(model, inputs))
    saved_again = tmp_path / "again"
    placed.save_pretrained(saved_again)
    weights = dict(FULL.from_pretrained(saved_again).state_dict())
    assert_same(weights, dict(model.state_dict()))


def test_an_automatic_device_map_with_little_memory_never_splits_the_selector():
    model = tiny_model(tie_word_embeddings=False)
    device_map = infer_auto_device_map(
        model,
        max_memory={"cpu": 700_000, 0: 0},
        no_split_module_classes=list(model._no_split_modules),
    )
    assert "disk" in device_map.values()
    for name in device_map:
        assert not name.startswith("model.qtsplus.")


@pytest.fixture
def clean_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_selector_gives_the_same_outputs(clean_compiler):
    model = tiny_model(reencode_layers=1)
    video = batch(prompt(videos=[(2, 4, 6)], seed=7))
    expected = [run(model, inputs) for inputs in (mixed_inputs(), video)]
    model.model.qtsplus.compile(backend="eager")
    for inputs, plain in zip((mixed_inputs(), video), expected, strict=True):
        compiled = run(model, inputs)
        assert_close(compiled.logits, plain.logits, atol=1e-5, rtol=0)
        assert_same(compiled.qtsplus.kept_indices, plain.qtsplus.kept_indices)


@pytest.mark.slow
def test_a_compiled_selector_trains(clean_compiler):
    video = batch(prompt(videos=[(2, 4, 6)], seed=7))
    expected = train_step(tiny_model(reencode_layers=1), video)
    compiled = tiny_model(reencode_layers=1)
    compiled.model.qtsplus.compile(backend="aot_eager")
    assert_close(train_step(compiled, video), expected, atol=1e-5, rtol=1e-4)


# PEFT ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_on_the_tower_take_a_step(dtype):
    """On the convolution of its patches too."""
    settings = LoraConfig(target_modules=["qkv", "proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model().to(dtype), settings)
    _, gradients = train_step(model)
    assert any("patch_embed.proj.lora_B" in name for name in gradients)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.any(), name


@pytest.mark.parametrize(
    "settings",
    [
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": [30, 31],
        },
        {
            "target_modules": ["embed_tokens", "q_proj"],
        },
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens", "qtsplus"],
        },
    ],
    ids=["tokens", "adapter", "whole"],
)
def test_adapters_on_the_embeddings_take_a_step(settings):
    model = get_peft_model(tiny_model(tie_word_embeddings=False), LoraConfig(**settings))
    _, gradients = train_step(model)
    trained = {name: gradient for name, gradient in gradients.items() if "embed_tokens" in name}
    assert trained
    for name, gradient in trained.items():
        assert gradient is not None, name
        assert gradient.any() or "embedding_B" in name, name
    logits = main_output(model.eval(), mixed_inputs())
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("budget", ["rho", "loss"])
def test_adapters_on_every_layer_that_begin_as_nothing_answer_as_before(budget):
    """DoRA gives a budget's head rows where it was given one vector."""
    inputs = mixed_inputs()
    plain = tiny_model(budget=budget)
    expected = main_output(plain, inputs)
    model = get_peft_model(plain, LoraConfig(target_modules="all-linear", use_dora=True))
    train_step(model)
    assert_close(main_output(model.eval(), inputs), expected, rtol=1e-4, atol=1e-4)
