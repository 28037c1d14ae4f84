"""What is trained, how fast, and how much of it there is."""

import pytest
import torch

from qtsplus.training.freezing import count_parameters, part_of
from training_examples import make_trainer


@pytest.mark.parametrize(
    ("arguments", "moved"),
    [
        ({}, {"selector"}),
        ({"freeze_language_model": False}, {"selector", "language_model"}),
        ({"freeze_language_model": False, "freeze_vision_model": False}, {"selector", "language_model", "vision"}),
        ({"freeze_selector": True, "freeze_language_model": False}, {"language_model"}),
    ],
)
def test_only_what_is_not_frozen_moves(tmp_path, arguments, moved):
    trainer = make_trainer(tmp_path, max_steps=2, **arguments)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, value in trainer.model.named_parameters() if not torch.equal(before[name], value)}
    assert {part_of(name) for name in changed} == moved
    assert not any(f"scoring_layers.0.{unused}" in name for name in changed for unused in ("v_proj", "o_proj", "ffn"))


def test_every_part_has_its_learning_rate(tmp_path):
    trainer = make_trainer(
        tmp_path,
        freeze_language_model=False,
        freeze_vision_model=False,
        learning_rate=1e-3,
        language_model_learning_rate=1e-5,
        vision_learning_rate=1e-6,
        weight_decay=0.1,
    )
    groups = trainer.create_optimizer().param_groups
    rate = {id(parameter): (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]}
    expected = {"selector": 1e-3, "language_model": 1e-5, "vision": 1e-6}
    trainable = [(name, weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    assert len(rate) == len(trainable)
    for name, parameter in trainable:
        lr, decay = rate[id(parameter)]
        assert lr == expected[part_of(name)]
        if part_of(name) != "vision":
            assert decay == (0.0 if "norm" in name or name.endswith("bias") else 0.1)
    trainer.train()


def test_counts_say_what_a_gradient_reaches(tmp_path):
    trainer = make_trainer(tmp_path)
    counts = count_parameters(trainer.model)
    selector = sum(weight.numel() for weight in trainer.model.model.qtsplus.parameters())
    assert counts.named_trainable == selector > counts.trainable
    assert counts.trainable == sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    assert counts.total == sum(weight.numel() for weight in trainer.model.parameters())
