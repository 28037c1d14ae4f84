"""Muon for the matrices, and budgets drawn in training."""

import pytest
import torch

from qtsplus.training import QTSplusTrainingArguments
from qtsplus.training.muon import matrix_names
from tiny import tiny_model
from training_examples import assert_same_training, make_trainer, steps

MUON = {
    "muon_scale": 3.0,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "language_model_learning_rate": 1e-4,
    "freeze_language_model": False,
    "lr_scheduler_type": "linear",
    "max_steps": 4,
}


def test_matrices_are_the_linear_maps_without_the_heads():
    names = matrix_names(tiny_model())
    assert "model.language_model.layers.0.mlp.up_proj.weight" in names
    assert "model.qtsplus.scoring_layers.0.q_proj.weight" in names
    assert not any(part in name for name in names for part in ("lm_head", "embed", "norm", "bias", "budget"))


def test_every_parameter_has_one_optimizer_and_its_rate(tmp_path):
    trainer = make_trainer(tmp_path, **MUON)
    optimizer = trainer.create_optimizer()
    muon, other = optimizer.parts
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(other, torch.optim.AdamW)
    seen = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(seen) == sorted(id(weight) for weight in trainer.model.parameters() if weight.requires_grad)
    assert all(weight.ndim == 2 for group in muon.param_groups for weight in group["params"])
    assert sorted({group["lr"] for group in muon.param_groups}) == pytest.approx([3e-4, 3e-3])
    assert {group["lr"] for group in other.param_groups} == {1e-3, 1e-4}


def test_a_scheduler_reaches_both_and_both_train(tmp_path):
    trainer = make_trainer(tmp_path, **MUON)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    trainer.train()
    muon, other = trainer.optimizer.optimizer.parts
    assert {group["lr"] for group in (*muon.param_groups, *other.param_groups)} == {0.0}
    changed = {
        name for name, weight in trainer.model.named_parameters() if name in before and not weight.equal(before[name])
    }
    assert "model.language_model.layers.0.mlp.up_proj.weight" in changed
    assert "model.language_model.norm.weight" in changed


def test_resumes_to_the_same_weights(tmp_path):
    settings = {**MUON, "save_strategy": "steps", "save_steps": 2, "retention_range": [0.1, 0.5]}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert_same_training(whole, resumed, tolerance=0)


def test_drawn_budgets_are_kept_and_shared_by_micro_batches(tmp_path):
    settings = {"retention_range": [0.1, 0.9], "retention_share": 1.0, "max_steps": 4, "selector": {"n_max": 1000}}
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    fractions = [line["rho"] for line in steps(whole)]
    assert len(set(fractions)) == 4
    assert all(0.1 <= fraction <= 0.9 for fraction in fractions)
    halves = make_trainer(tmp_path, **settings, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    halves.train()
    assert [line["rho"] for line in steps(halves)] == pytest.approx(fractions)


def test_half_of_the_steps_predict_their_budget(tmp_path):
    trainer = make_trainer(tmp_path, retention_range=[0.2, 0.2], max_steps=12)
    trainer.train()
    drawn = [line["rho"] == pytest.approx(0.2) for line in steps(trainer)]
    assert 2 < sum(drawn) < 10
    assert all(("loss_t" in line) != is_drawn for line, is_drawn in zip(steps(trainer), drawn, strict=True))


@pytest.mark.parametrize(
    "wrong", [{"muon_scale": 0.0}, {"retention_range": [0.5, 0.1]}, {"retention_range": [0.0, 0.1]}]
)
def test_settings_out_of_range(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QTSplusTrainingArguments(output_dir=str(tmp_path), **wrong)
