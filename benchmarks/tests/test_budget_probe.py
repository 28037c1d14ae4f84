"""The budget head's gradient, measured: the slope of the loss between fewer and more tokens."""

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.teaching.arguments import TinyWorldTrainingArguments
from teaching_examples import make_trainer
from training_examples import assert_same_training, collate, examples, steps

FREE = {"lambda_t": 0.0, "lambda_m": 0.0, "lambda_s": 0.0, "n_max": 1000, "rho_min": 0.2, "rho_max": 0.8}


def budget_gradient(tmp_path, **arguments):
    trainer = make_trainer(tmp_path, selector=FREE, **arguments)
    inputs = collate(examples(4))
    trainer._counts = trainer._count(inputs)
    trainer.model.train()
    trainer.compute_loss(trainer.model, inputs).backward()
    return trainer, torch.cat([p.grad.flatten() for p in trainer.selector.budget.parameters()])


def test_the_probe_adds_the_measured_slope_and_nothing_else(tmp_path):
    _, plain = budget_gradient(tmp_path)
    trainer, probed = budget_gradient(tmp_path, budget_probe=2.0)

    inputs = collate(examples(4))
    labels = inputs.pop("labels")
    tokens = int((labels[:, 1:] != -100).sum())
    inputs.pop("source_ids")
    trainer.model.zero_grad()
    rho = trainer.model(**inputs).qtsplus.rho

    def losses(scale):
        retention = [min(float(fraction) * scale, 1.0) or 1.0 for fraction in rho.detach()]
        with torch.no_grad():
            outputs = trainer.model(**inputs, retention=retention)
        seen = trainer.model.compact_labels(labels, inputs["input_ids"], outputs.qtsplus.columns)
        parts = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), seen[:, 1:], reduction="none")
        return parts.sum(1) / tokens

    slope = (losses(2.0) - losses(0.5)) / (2 * math.log(2))
    with_vision = rho > 0
    (slope[with_vision] * rho[with_vision].log()).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in trainer.selector.budget.parameters()])
    assert expected.abs().max() > 0
    torch.testing.assert_close(probed - plain, expected, atol=1e-6, rtol=1e-3)


def test_micro_batches_add_up_to_one_big_batch(tmp_path):
    settings = {"budget_probe": 1.5, "freeze_language_model": False, "retention_range": [0.2, 0.6]}
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    split = make_trainer(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings)
    split.train()
    assert_same_training(whole, split)
    assert all("n" in line for line in steps(whole))


def test_a_probe_that_is_no_factor_is_refused(tmp_path):
    with pytest.raises(ValueError, match="budget_probe=1.0: expected a factor above 1"):
        TinyWorldTrainingArguments(output_dir=str(tmp_path), budget_probe=1.0)
