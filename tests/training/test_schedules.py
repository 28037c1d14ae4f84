"""Settings that move with the step."""

import json

import pytest

from qtsplus.training import Schedule
from training_examples import make_trainer


def test_linear_cosine_and_step():
    linear = Schedule(1.0, 0.0, begin=0.5, finish=1.0)
    assert [linear.value(step, 8) for step in (0, 4, 6, 8, 9)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    cosine = Schedule(2.0, 4.0, "cosine", begin=2, finish=6)
    assert [cosine.value(step, 100) for step in (0, 2, 4, 6)] == [2.0, 2.0, pytest.approx(3.0), 4.0]
    jump = Schedule(1.0, 5.0, "step", finish=3)
    assert [jump.value(step, 100) for step in (2, 3)] == [1.0, 5.0]


@pytest.mark.parametrize("wrong", [{"shape": "square"}, {"begin": -1}, {"finish": 1.5}])
def test_bad_schedules_say_what_is_expected(wrong):
    with pytest.raises(ValueError, match="expected"):
        Schedule(0.0, 1.0, **wrong)


def test_training_follows_the_schedule_and_checkpoints_hold_it(tmp_path):
    schedules = {
        "n_max": {"start": 8, "end": 3, "finish": 2},
        "rho_max": {"start": 0.9, "end": 0.5, "shape": "cosine"},
        "tau_s": {"start": 1.0, "end": 0.1, "shape": "step", "finish": 2},
    }
    settings = {"schedules": schedules, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path, **settings)
    trainer.train()
    config = trainer.model.config.qtsplus_config
    assert (config.n_max, config.rho_max, config.tau_s) == (3, 0.5, 0.1)
    assert max(line["n"] for line in trainer.state.log_history[2:4]) <= 3
    saved = json.loads((tmp_path / "checkpoint-2/config.json").read_text())["qtsplus_config"]
    assert saved["n_max"] == 3 and saved["rho_max"] == pytest.approx(0.7)


def test_refused_values_and_fields(tmp_path):
    with pytest.raises(ValueError, match="no schedule for dropout"):
        make_trainer(tmp_path, schedules={"dropout": {"start": 0.0, "end": 1.0}})
    crossing = make_trainer(tmp_path, schedules={"rho_min": {"start": 0.1, "end": 0.95}})
    with pytest.raises(ValueError, match="rho_min"):
        crossing.train()
