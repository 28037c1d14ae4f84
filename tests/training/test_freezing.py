"""What is trained, how fast, and how much of it there is."""

import pytest
import torch

from qtsplus.training.freezing import count_parameters, part_of
from training_examples import make_trainer


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


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
    before = weights_of(trainer)
    trainer.train()
    parts = set()
    for name, weight in weights_of(trainer).items():
        if not torch.equal(before[name], weight):
            parts.add(part_of(name))
            assert not name.startswith("model.qtsplus.scoring_layers.0.v_proj")
            assert not name.startswith("model.qtsplus.scoring_layers.0.o_proj")
            assert not name.startswith("model.qtsplus.scoring_layers.0.ffn")
    assert parts == moved


def test_every_part_has_its_learning_rate(tmp_path):
    rates = {"selector": 1e-3, "language_model": 1e-5, "vision": 1e-6}
    trainer = make_trainer(
        tmp_path,
        freeze_language_model=False,
        freeze_vision_model=False,
        learning_rate=rates["selector"],
        language_model_learning_rate=rates["language_model"],
        vision_learning_rate=rates["vision"],
        weight_decay=0.1,
    )
    groups = {}
    for group in trainer.create_optimizer().param_groups:
        for parameter in group["params"]:
            groups[parameter] = group
    trainable = 0
    for name, parameter in trainer.model.named_parameters():
        if not parameter.requires_grad:
            continue
        trainable += 1
        part = part_of(name)
        assert groups[parameter]["lr"] == rates[part]
        if part != "vision":
            decays = "norm" not in name and not name.endswith("bias")
            assert groups[parameter]["weight_decay"] == (0.1 if decays else 0.0)
    assert len(groups) == trainable
    trainer.train()


def size_of(parameters) -> int:
    return sum(parameter.numel() for parameter in parameters)


def test_counts_say_what_a_gradient_reaches(tmp_path):
    model = make_trainer(tmp_path).model
    counts = count_parameters(model)
    assert counts.named_trainable == size_of(model.model.qtsplus.parameters())
    assert counts.named_trainable > counts.trainable
    assert counts.trainable == size_of(weight for weight in model.parameters() if weight.requires_grad)
    assert counts.total == size_of(model.parameters())
