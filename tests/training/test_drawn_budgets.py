"""Budgets that are drawn in training."""

import pytest

from qtsplus.training import QTSplusTrainingArguments
from training_examples import make_trainer, steps


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


@pytest.mark.parametrize("bounds", [[0.5, 0.1], [0.0, 0.1]])
def test_bounds_out_of_range(tmp_path, bounds):
    with pytest.raises(ValueError, match="retention_range"):
        QTSplusTrainingArguments(output_dir=str(tmp_path), retention_range=bounds)
