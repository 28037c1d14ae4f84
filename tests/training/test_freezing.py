"""What is trained, how fast, and how much of it there is."""

import pytest
import torch

from qtsplus.training.freezing import part_of
from training_examples import make_trainer

UNUSED = (
    "model.qtsplus.scoring_layers.0.v_proj",
    "model.qtsplus.scoring_layers.0.o_proj",
    "model.qtsplus.scoring_layers.0.ffn",
)


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
            assert not name.startswith(UNUSED)
    assert parts == moved
