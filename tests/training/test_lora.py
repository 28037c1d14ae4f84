"""Adapters on the language model beside a selector that is saved whole."""

import subprocess
import sys

import pytest
import torch
from peft import PeftModel

from qtsplus.training.freezing import count_parameters
from qtsplus.training.lora import active_selector, merge_lora
from tiny import tiny_model
from training_examples import collate, examples, make_trainer, steps

SELECTOR = {"rho_min": 0.1, "rho_max": 0.9, "n_max": 10}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    trainer = make_trainer(folder, lora_rank=2, selector={"n_max": 5})
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    trainer.save_model(folder / "adapter")
    changed = [name for name, value in trainer.model.named_parameters() if not torch.equal(before[name], value)]
    return trainer, changed, folder / "adapter"


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    batch = collate(examples(4))
    return {name: value for name, value in batch.items() if name not in ("labels", "source_ids")}


def logits(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs).logits


def test_adapters_and_selector_move_and_nothing_else(trained):
    trainer, changed, _ = trained
    assert all("lora_" in name or "qtsplus.modules_to_save" in name for name in changed)
    assert any("lora_B" in name for name in changed) and any("modules_to_save" in name for name in changed)
    assert not any(".visual." in name for name in changed)
    assert not any("scoring_layers.0.ffn" in name for name in changed)
    assert active_selector(trainer.model).config.n_max == 5
    assert active_selector(trainer.model).rho_history[1] > 0
    counts = count_parameters(trainer.model)
    assert counts.trainable < counts.named_trainable < counts.total
    assert max(line["n"] for line in steps(trainer)) <= 5


def test_reloaded_and_merged_models_are_the_trained_one(trained, inputs):
    trainer, _, folder = trained
    expected = logits(trainer.model, inputs)
    base = tiny_model(**SELECTOR)
    base.config.qtsplus_config.n_max = 5
    reloaded = PeftModel.from_pretrained(base, folder)
    torch.testing.assert_close(logits(reloaded, inputs), expected, atol=0, rtol=0)
    assert torch.equal(active_selector(reloaded).rho_history, active_selector(trainer.model).rho_history)
    merged = merge_lora(reloaded)
    torch.testing.assert_close(logits(merged, inputs), expected, atol=1e-4, rtol=1e-4)
    assert merged.model.qtsplus.config is merged.config.qtsplus_config
    assert not any("lora" in name or "modules_to_save" in name for name in merged.state_dict())


def test_adapter_loads_onto_remote_code(trained, inputs, tmp_path):
    """A process without the package loads the base as remote code, and the adapter onto it."""
    trainer, _, folder = trained
    base = make_trainer(tmp_path / "run", selector={"n_max": 5, "gate": "soft"})
    base.save_model(tmp_path / "base")
    torch.save((inputs, logits(trainer.model, inputs)), tmp_path / "expected.pt")
    script = """
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
    arguments = [str(tmp_path / "base"), str(folder), str(tmp_path / "expected.pt")]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-3000:]
