"""Adapters on the language model beside a selector that is saved whole."""

import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from qtsplus.training.freezing import trained_and_all
from qtsplus.training.lora import active_selector, merge_lora
from tiny import tiny_model
from training_examples import inputs_and_labels, make_trainer, steps

N_MAX = 5


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """After its training, with the weights before as `before`."""
    trainer = make_trainer(tmp_path_factory.mktemp("lora"), lora_rank=2, selector={"n_max": N_MAX})
    trainer.before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def adapter(trainer, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("adapter"))
    trainer.save_model(folder)
    return folder


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return inputs_and_labels()[0]


@torch.no_grad()
def logits(model, inputs) -> Tensor:
    return model.eval()(**inputs).logits


def test_adapters_and_selector_move_and_nothing_else(trainer):
    moved = set()
    for name, weight in trainer.model.named_parameters():
        if not torch.equal(trainer.before[name], weight):
            moved.add("adapters" if "lora_" in name else "selector")
            assert "lora_" in name or "qtsplus.modules_to_save" in name
            assert ".visual." not in name
            assert "scoring_layers.0.ffn" not in name
    assert moved == {"adapters", "selector"}


def test_the_selector_that_is_trained_has_the_models_configuration(trainer):
    selector = active_selector(trainer.model)
    assert selector.config.n_max == N_MAX
    assert selector.rho_history[1] > 0
    trained, total = trained_and_all(trainer.model)
    assert 0 < trained < total
    assert max(line["n"] for line in steps(trainer)) <= N_MAX


def test_reloaded_and_merged_models_are_the_trained_one(trainer, adapter, inputs, tmp_path):
    expected = logits(trainer.model, inputs)
    base = tiny_model(rho_min=0.1, rho_max=0.9, n_max=N_MAX)
    reloaded = PeftModel.from_pretrained(base, adapter)
    torch.testing.assert_close(logits(reloaded, inputs), expected, atol=0, rtol=0)
    assert torch.equal(active_selector(reloaded).rho_history, active_selector(trainer.model).rho_history)
    merged = merge_lora(reloaded)
    torch.testing.assert_close(logits(merged, inputs), expected, atol=1e-4, rtol=1e-4)
    assert merged.model.qtsplus.config is merged.config.qtsplus_config
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(type(merged).from_pretrained(tmp_path), inputs), logits(merged, inputs))
    for name in merged.state_dict():
        assert "lora" not in name
        assert "modules_to_save" not in name


SCRIPT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText
base, adapter, expected = sys.argv[1:]
model = AutoModelForImageTextToText.from_pretrained(base, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules")
inputs, logits = torch.load(expected)
found = PeftModel.from_pretrained(model, adapter).eval()(**inputs).logits
assert torch.equal(found, logits), (found - logits).abs().max()
"""


def test_adapter_loads_onto_remote_code(trainer, adapter, inputs, tmp_path):
    """A process without the package loads the base as remote code, and the adapter onto it."""
    base = tmp_path / "base"
    expected = tmp_path / "expected.pt"
    make_trainer(tmp_path / "run", selector={"n_max": N_MAX, "gate": "soft"}).save_model(base)
    torch.save((inputs, logits(trainer.model, inputs)), expected)
    command = [sys.executable, "-c", SCRIPT, str(base), adapter, str(expected)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
