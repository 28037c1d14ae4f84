"""Budgets that are drawn in training."""

import pytest

from qtsplus.training import QTSplusTrainingArguments
from training_examples import steps, trained


def drawn_fractions(trainer) -> list[float]:
    return [line["rho"] for line in steps(trainer)]


def test_drawn_budgets_are_kept_and_shared_by_micro_batches(tmp_path):
    settings = {
        "retention_range": [0.1, 0.9],
        "retention_share": 1.0,
        "max_steps": 4,
        "selector": {"n_max": 1000},
    }
    fractions = drawn_fractions(trained(tmp_path, **settings))
    assert len(set(fractions)) == 4
    assert min(fractions) >= 0.1
    assert max(fractions) <= 0.9
    halves = trained(tmp_path, **settings, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert drawn_fractions(halves) == pytest.approx(fractions)


def test_half_of_the_steps_predict_their_budget(tmp_path):
    trainer = trained(tmp_path, retention_range=[0.2, 0.2], max_steps=12)
    drawn = [line for line in steps(trainer) if line["rho"] == pytest.approx(0.2)]
    assert 2 < len(drawn) < 10
    for line in steps(trainer):
        assert ("loss_t" in line) == (line not in drawn)


@pytest.mark.parametrize("bounds", [[0.5, 0.1], [0.0, 0.1]])
def test_bounds_out_of_range_are_refused(tmp_path, bounds):
    with pytest.raises(ValueError, match="retention_range"):
        QTSplusTrainingArguments(output_dir=str(tmp_path), retention_range=bounds)
