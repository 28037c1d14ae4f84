"""Runs in processes of their own: two that train together, and one that is killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from training_examples import steps, trained

SCRIPT = Path(__file__).with_name("train_tiny.py")
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def start(out: Path, settings: dict, *launcher: str) -> subprocess.CompletedProcess:
    tests = SCRIPT.parents[1]
    paths = [str(SCRIPT.parent), str(tests), *sys.path]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["OMP_NUM_THREADS"] = "1"
    arguments = [str(out), json.dumps(settings)]
    return subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def log_of(folder: Path) -> list[dict]:
    return json.loads((folder / "log.json").read_text())


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path):
    """
    In the second step (rows 4 to 7) one process has text alone: rows 6 and 7. The teacher is the attention of the model
    that is trained.
    """
    settings = {
        "freeze_language_model": False,
        "selector": {"gate": "detached", "reduction": "mean", "target_n": 3},
        "relevance_weight": 1.0,
    }
    shared = {**settings, "per_device_train_batch_size": 2, "ddp_backend": "gloo"}
    result = start(tmp_path, shared, *TWO_PROCESSES)
    assert result.returncode == 0, result.stderr[-3000:]
    single = trained(tmp_path / "single", **settings)
    for line, expected in zip(log_of(tmp_path), steps(single), strict=True):
        torch.testing.assert_close(line, expected, atol=5e-5, rtol=5e-5)
    weights = load_file(tmp_path / "weights.safetensors")
    expected = single.model.state_dict()
    history = weights.pop("model.qtsplus.rho_history")
    difference = history - expected.pop("model.qtsplus.rho_history")
    assert abs(int(difference[0])) < 2**16
    assert difference[1] == 0
    torch.testing.assert_close(weights, dict(expected), atol=5e-5, rtol=5e-5)


def test_killed_run_ends_like_an_uninterrupted_one(tmp_path):
    """Shuffled data, a sampled gate, a dual variable and Adam: everything that has a state."""
    folder = tmp_path / "killed"
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
    killed = start(folder, {**settings, "kill_at": 5})
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not (folder / "checkpoint-6").exists()
    resumed = start(folder, {**settings, "resume": True})
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    whole = trained(tmp_path / "whole", **settings)
    expected = whole.model.state_dict()
    for name, weight in load_file(folder / "weights.safetensors").items():
        assert torch.equal(weight, expected[name]), name
    assert log_of(folder) == json.loads(json.dumps(steps(whole)))
