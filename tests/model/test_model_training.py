"""What Transformers asks of every model of its own, asked of ours: training, dtypes, devices, compilation, PEFT."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.testing import assert_close

from model_checks import FULL, greedy, main_output, mixed_inputs, shared_model, trainable, with_labels
from tiny import assert_same, batch, prompt, run, tiny_model

# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["soft", "gumbel"])
def test_the_answer_trains_the_scores_and_the_budget(gate):
    model = tiny_model(gate=gate, lambda_t=0.0, lambda_m=0.0, lambda_s=0.0).train()
    torch.manual_seed(0)
    model(**with_labels(mixed_inputs())).loss.backward()
    selector = model.model.qtsplus
    for parameter in (selector.scoring_layers[-1].q_proj.weight, selector.scoring_layers[-1].k_proj.weight):
        assert parameter.grad.abs().max() > 0
    assert selector.budget.mlp[0].weight.grad.abs().max() > 0


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
    assert_close(checkpointed, plain)
    for name, gradient in gradients.items():
        assert_close(others[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("gate", ["soft", "detached", "gumbel"])
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


def test_training_under_autocast_gives_finite_gradients_and_a_float32_budget():
    model = tiny_model().train()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**with_labels(mixed_inputs()))
    output.loss.backward()
    assert output.qtsplus.rho.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in trainable(model).values())


def test_autocast_loses_no_gradient_of_layers_that_lm_attention_runs_first():
    """They run twice in one forward, and autocast keeps the weights that it casts."""
    model = tiny_model(selection="lm_attention").train()
    with torch.autocast("cpu", torch.bfloat16):
        model(**with_labels(mixed_inputs())).loss.backward()
    for layer in model.model.language_model.layers:
        assert layer.self_attn.q_proj.weight.grad.any()
        assert layer.mlp.up_proj.weight.grad.any()


def test_autocast_leaves_relevance_and_budget_in_float32():
    model = shared_model()
    inputs = batch(prompt(videos=[(4, 8, 8)], seed=3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        qtsplus = model(**inputs).qtsplus
    assert qtsplus.rho.dtype == qtsplus.relevance[0].dtype == torch.float32
    # bfloat16 scores of 64 tokens collapse; those in float32 stay apart.
    assert len(qtsplus.relevance[0].unique()) == 64


# Dtypes, devices, compilation ----------------------------------------------------------------------------------------


def test_in_bfloat16_the_model_runs_trains_and_keeps_relevance_and_budget_in_float32():
    model = tiny_model().to(torch.bfloat16)
    inputs = mixed_inputs()
    output = run(model, inputs)
    assert output.logits.dtype == torch.bfloat16
    assert torch.isfinite(output.logits).all()
    assert output.qtsplus.rho.dtype == torch.float32
    assert all(r.dtype == torch.float32 for r in output.qtsplus.relevance)
    for relevance in (output.qtsplus.relevance[0], output.qtsplus.relevance[2]):
        assert len(relevance.unique()) == len(relevance)
    ids = model.generate(**inputs, max_new_tokens=3)
    assert ids.shape[1] <= inputs["input_ids"].shape[1] + 3
    model.train()(**with_labels(inputs)).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in trainable(model).values())


PARTS = ("model.visual", "model.language_model", "model.qtsplus", "lm_head")
OFFLOADS = {
    "everything on the CPU": {"": "cpu"},
    "the selector on disk": {part: "disk" if part == "model.qtsplus" else "cpu" for part in PARTS},
    "all but the vision on disk": {part: "cpu" if part == "model.visual" else "disk" for part in PARTS},
}


@pytest.mark.parametrize("where", OFFLOADS)
def test_a_device_map_gives_the_same_logits_and_ids(tmp_path, where):
    model = tiny_model(tie_word_embeddings=False, query_states="layer")
    inputs = mixed_inputs()
    model.save_pretrained(tmp_path / "model")
    placed = FULL.from_pretrained(tmp_path / "model", device_map=OFFLOADS[where], offload_folder=tmp_path / "offload")
    assert any(p.is_meta for p in placed.parameters()) == ("disk" in where)
    assert (main_output(placed, inputs) - main_output(model, inputs)).abs().max() < 1e-5
    assert_same(placed.generate(**inputs, max_new_tokens=3), model.generate(**inputs, max_new_tokens=3))


def test_an_automatic_device_map_with_little_memory_never_splits_the_selector(tmp_path):
    from accelerate import infer_auto_device_map

    model = tiny_model(tie_word_embeddings=False)
    device_map = infer_auto_device_map(
        model, max_memory={"cpu": 700_000, 0: 0}, no_split_module_classes=list(model._no_split_modules)
    )
    assert "disk" in device_map.values()
    assert not [name for name in device_map if name.startswith("model.qtsplus.")]


@pytest.fixture
def clean_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_selector_gives_the_same_outputs(clean_compiler):
    model = tiny_model(reencode_layers=1)
    inputs = [mixed_inputs(), batch(prompt(videos=[(2, 4, 6)], seed=7))]
    with torch.no_grad():
        expected = [model(**one) for one in inputs]
        model.model.qtsplus.compile(backend="eager")
        for one, plain in zip(inputs, expected, strict=True):
            compiled = model(**one)
            assert (compiled.logits - plain.logits).abs().max() < 1e-5
            assert_same(compiled.qtsplus.kept_indices, plain.qtsplus.kept_indices)


@pytest.mark.slow
def test_a_compiled_selector_trains(clean_compiler):
    inputs = with_labels(batch(prompt(videos=[(2, 4, 6)], seed=7)))
    gradients = []
    for compiled in (False, True):
        model = tiny_model(reencode_layers=1).train()
        if compiled:
            model.model.qtsplus.compile(backend="aot_eager")
        model(**inputs).loss.backward()
        gradients.append({name: p.grad for name, p in trainable(model).items()})
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


# PEFT ----------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_on_the_tower_take_a_step(dtype):
    """On the convolution of its patches too."""
    settings = LoraConfig(target_modules=["qkv", "proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model().to(dtype), settings).train()
    model(**with_labels(mixed_inputs())).loss.backward()
    trained = {name: p.grad for name, p in trainable(model).items()}
    assert any("patch_embed.proj.lora_B" in name for name in trained)
    assert all(gradient is not None and gradient.any() for gradient in trained.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "trainable_token_indices": [30, 31]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "qtsplus"]},
    ],
    ids=["tokens", "adapter", "whole"],
)
def test_adapters_on_the_embeddings_take_a_step(settings):
    model = get_peft_model(tiny_model(tie_word_embeddings=False), LoraConfig(**settings)).train()
    inputs = with_labels(mixed_inputs())
    model(**inputs).loss.backward()
    trained = {name: p.grad for name, p in trainable(model).items() if "embed_tokens" in name}
    assert trained
    assert all(
        gradient is not None and gradient.any() for name, gradient in trained.items() if "embedding_B" not in name
    )
    assert torch.isfinite(main_output(model.eval(), inputs)).all()


@pytest.mark.parametrize("budget", ["rho", "loss"])
def test_adapters_on_every_layer_that_begin_as_nothing_answer_as_before(budget):
    """DoRA gives a budget's head rows where it was given one vector."""
    inputs = mixed_inputs()
    expected = main_output(tiny_model(budget=budget).eval(), inputs)
    model = get_peft_model(tiny_model(budget=budget), LoraConfig(target_modules="all-linear", use_dora=True))
    model.train()(**with_labels(inputs)).loss.backward()
    assert_close(main_output(model.eval(), inputs), expected, rtol=1e-4, atol=1e-4)


def test_lora_with_a_trained_selector_trains_saves_loads_and_merges_to_the_same_logits_and_ids(tmp_path):
    model = lora_model()
    inputs = mixed_inputs()
    optimizer = torch.optim.SGD(trainable(model).values(), lr=1e-2)
    model.train()(**with_labels(inputs)).loss.backward()
    taught = {name for name, parameter in trainable(model).items() if parameter.grad is not None}
    never = ("v_proj", "o_proj", "ffn")  # PEFT makes the whole copy trainable; these receive no gradient
    assert {name for name in set(trainable(model)) - taught if not any(part in name for part in never)} == set()
    assert all(any(part in name for name in taught) for part in ("lora_A", ".qtsplus.modules_to_save."))
    assert all(torch.isfinite(parameter.grad).all() for name, parameter in trainable(model).items() if name in taught)
    optimizer.step()
    model.eval()
    logits = main_output(model, inputs)
    ids = greedy(model, inputs)
    assert (logits[:, -1] - main_output(tiny_model(), inputs)[:, -1]).abs().max() > 1e-3

    model.save_pretrained(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter").eval()
    assert_same(main_output(reloaded, inputs), logits)
    assert_same(greedy(reloaded, inputs), ids)

    merged = reloaded.merge_and_unload()
    assert type(merged) is FULL
    assert not any("lora" in name for name in merged.state_dict())
    assert (main_output(merged, inputs) - logits).abs().max() < 1e-4
    merged.save_pretrained(tmp_path / "merged")
    final = FULL.from_pretrained(tmp_path / "merged")
    assert_same(main_output(final, inputs), main_output(merged, inputs))
