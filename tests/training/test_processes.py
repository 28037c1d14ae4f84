"""Runs in processes of their own: two that train together, and one that is killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from training_examples import make_trainer, steps

SCRIPT = Path(__file__).with_name("train_tiny.py")


def start(out: Path, settings: dict, *launcher: str) -> subprocess.CompletedProcess:
    paths = [str(SCRIPT.parent), str(SCRIPT.parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(SCRIPT), str(out), json.dumps(settings)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path):
    """
    In the second step (rows 4 to 7) one process has text alone: rows 6 and 7. With a dual variable, and the attention
    of the model that is trained as the teacher.
    """
    selector = {"gate": "detached", "reduction": "mean", "target_n": 3}
    settings = {"freeze_language_model": False, "selector": selector, "relevance_weight": 1.0}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    result = start(tmp_path, {**settings, "per_device_train_batch_size": 2, "ddp_backend": "gloo"}, *launcher)
    assert result.returncode == 0, result.stderr[-3000:]
    single = make_trainer(tmp_path / "single", **settings)
    single.train()

    for line, expected in zip(json.loads((tmp_path / "log.json").read_text()), steps(single), strict=True):
        assert line.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(line[name], value, atol=5e-5, rtol=5e-5, msg=f"{name} at {line['step']}")
    weights = load_file(tmp_path / "weights.safetensors")
    for name, value in single.model.state_dict().items():
        if name.endswith("rho_history"):
            assert abs(int(weights[name][0] - value[0])) < 2**16 and weights[name][1] == value[1]
        else:
            torch.testing.assert_close(weights[name], value, atol=5e-5, rtol=5e-5)


def test_killed_run_ends_like_an_uninterrupted_one(tmp_path):
    """Shuffled data, a sampled gate, a dual variable and Adam: everything that has a state."""
    settings = {
        "selector": {"gate": "gumbel", "target_n": 3, "dropout": 0.1},
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 7,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    killed = start(tmp_path / "killed", {**settings, "kill_at": 5})
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not (tmp_path / "killed/checkpoint-6").exists()
    resumed = start(tmp_path / "killed", {**settings, "resume": True})
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()

    expected = whole.model.state_dict()
    for name, value in load_file(tmp_path / "killed/weights.safetensors").items():
        assert torch.equal(value, expected[name]), name
    assert json.loads((tmp_path / "killed/log.json").read_text()) == json.loads(json.dumps(steps(whole)))
