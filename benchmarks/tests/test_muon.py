"""Muon for the matrices."""

import pytest
import torch

from benchmarks.teaching.arguments import TinyWorldTrainingArguments
from benchmarks.teaching.muon import matrix_names
from teaching_examples import make_trainer
from tiny import tiny_model
from training_examples import assert_same_training

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


@pytest.mark.parametrize("wrong", [{"muon_scale": 0.0}, {"looking_layer": -1}, {"naming_weight": -0.1}])
def test_settings_out_of_range(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TinyWorldTrainingArguments(output_dir=str(tmp_path), **wrong)
