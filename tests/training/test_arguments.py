"""Every field of a Trainer's arguments has its effect on our model, or is refused."""

from dataclasses import fields

import pytest
import torch
from transformers import TrainingArguments

from qtsplus.training import QTSplusTrainingArguments
from tiny import tiny_model
from training_examples import collate, examples, make_trainer, steps

NAMES = {field.name for field in fields(TrainingArguments)}

# What changes two steps of training, and what leaves them as they are.
CHANGES = [
    {"learning_rate": 0.2},
    {"warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"},
    {"max_grad_norm": 1e-3},
    {"weight_decay": 0.5},
    {"optim": "adamw_torch", "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-2},
    {"optim": "adafactor", "optim_args": "scale_parameter=False"},
    {"gradient_accumulation_steps": 2},
    {"per_device_train_batch_size": 2},
    {"neftune_noise_alpha": 100.0},
    {"label_smoothing_factor": 0.3},
    {"bf16": True},
]
SAME = [
    {"activation_checkpointing": True},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"torch_compile": True, "torch_compile_backend": "eager"},
    {"include_num_input_tokens_seen": "non_padding"},
    {"full_determinism": True},
    {"torch_empty_cache_steps": 1},
    {"logging_nan_inf_filter": False},
    {"auto_find_batch_size": True},
    {"dataloader_drop_last": True},
    {"train_sampling_strategy": "sequential", "seed": 3},
]
EVALUATION = [
    {"prediction_loss_only": True},
    {"eval_accumulation_steps": 1},
    {"batch_eval_metrics": True},
    {"include_for_metrics": ["inputs", "loss"]},
    {"eval_do_concat_batches": False},
    {"eval_use_gather_object": True},
    {"label_names": ["labels"]},
    {"bf16_full_eval": True},
]
REFUSED = [
    ({"resume_from_checkpoint": "there"}, "use --resume"),
    ({"sft_loss": "sum"}, "sft_loss is 'sum'; expected 'token_mean' or 'sum_of_sources'"),
    ({"lora_rank": 4, "freeze_language_model": False}, "lora_rank trains adapters on a frozen language model"),
]


def plain_collate(rows):
    inputs = collate(rows)
    del inputs["source_ids"]
    return inputs


def losses(trainer):
    torch.manual_seed(0)
    trainer.train()
    return [line["loss"] for line in steps(trainer)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return losses(make_trainer(tmp_path_factory.mktemp("expected"), max_steps=2))


def supported(settings):
    missing = settings.keys() - NAMES
    if missing:
        pytest.skip(f"this Transformers has no {', '.join(missing)}")


@pytest.mark.parametrize("settings", CHANGES, ids=lambda settings: next(iter(settings)))
def test_a_field_changes_the_training(expected, tmp_path, settings):
    trainer = make_trainer(tmp_path, max_steps=2, **settings)
    assert losses(trainer) != pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(one, marks=[pytest.mark.slow] * ("torch_compile" in one)) for one in SAME],
    ids=lambda settings: next(iter(settings)),
)
def test_a_field_leaves_the_loss_as_it_is(expected, tmp_path, settings):
    supported(settings)
    trainer = make_trainer(tmp_path, max_steps=2, **settings)
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)
    if "include_num_input_tokens_seen" in settings:
        mask = collate(examples(8))["attention_mask"]
        assert trainer.state.num_input_tokens_seen == int(mask.sum())


@pytest.mark.parametrize("settings", EVALUATION, ids=lambda settings: next(iter(settings)))
def test_evaluation_goes_on(tmp_path, settings):
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=2, **settings)
    seen = []

    def compute_metrics(prediction, compute_result=True):
        seen.append(prediction)
        return {"seen": 1}

    trainer.compute_metrics = compute_metrics
    metrics = trainer.evaluate(examples(6)[1:5])
    sees_predictions = "prediction_loss_only" not in settings
    assert metrics["eval_loss"] > 0
    assert bool(seen) == sees_predictions
    assert ("eval_seen" in metrics) == sees_predictions
    if "include_for_metrics" in settings:
        assert seen[0].inputs is not None
        assert seen[0].losses is not None


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        QTSplusTrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **settings)


def test_smoothed_labels_give_the_loss_of_transformers(tmp_path):
    trainer = make_trainer(tmp_path, label_smoothing_factor=0.3, max_steps=1)
    model = tiny_model(gate="noiseless", rho_min=0.1, rho_max=0.9, n_max=10).train()
    inputs = plain_collate(examples(4))
    output = model(**inputs)
    labels = model.compact_labels(inputs["labels"], inputs["input_ids"], output.qtsplus.columns)
    smoothed = trainer.label_smoother(output, labels, shift_labels=True)
    trainer.train()
    assert steps(trainer)[0]["loss_lm"] == pytest.approx(smoothed.item(), rel=1e-5)
