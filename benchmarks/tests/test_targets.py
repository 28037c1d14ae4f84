"""What a frozen base attends to is read once, shared among processes, and kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.teaching import targets as kept_targets
from benchmarks.teaching.trainer import TinyWorldTrainer
from benchmarks.world.open_sets import build_open
from qtsplus.training.recipe import load_stages
from qtsplus.training.running import build_trainer
from training_examples import steps

GRID = (4, 6, 6)


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    """A conversation about each of two videos of four seconds."""
    return build_open(tmp_path_factory.mktemp("sets"), "test", 2, 4, variant="plain", conversations=True)


@pytest.fixture
def recipe(records, tmp_path):
    """A recipe with a relevance stage, with changes."""

    def load(*changes):
        path = tmp_path / "tiny.yaml"
        path.write_text(f"""
model: {{variant: qtsplus-tiny, selector: {{gate: detached}}}}
data:
  train_files: [{records}]
  features: {tmp_path}/features
training:
  {{output_dir: {tmp_path}/run, max_steps: 2, per_device_train_batch_size: 2, learning_rate: 1e-3, use_cpu: true,
    freeze_language_model: true, relevance_weight: 1.0, save_strategy: "no", logging_steps: 1, report_to: none}}
""")
        return load_stages(path, changes, TinyWorldTrainer)[0]

    return load


@pytest.fixture
def read(monkeypatch) -> list[tuple[int, int, int]]:
    """The grids of what a teacher has read."""
    grids = []
    own = kept_targets.answer_attention

    def note(model, inputs, labels, choice):
        grids.extend(tuple(grid) for grid in model.model.merged_grid(inputs["video_grid_thw"]))
        return own(model, inputs, labels, choice)

    monkeypatch.setattr(kept_targets, "answer_attention", note)
    return grids


def test_a_record_is_read_once_and_teaches(recipe, read):
    trainer = build_trainer(recipe())
    attention = [trainer.train_dataset[index]["attention"] for index in range(2)]
    assert all(0 < one.sum() < 1 and one.std() > 0 for one in attention)
    assert read == [GRID, GRID]
    trainer.train()
    assert len(steps(trainer)) == 2
    assert all(line["loss_relevance"] > 0 for line in steps(trainer))
    build_trainer(recipe())
    assert len(read) == 2, "what is kept is not read again"


def test_a_base_that_trains_is_asked_in_every_step(recipe, read):
    trainer = build_trainer(recipe("training.freeze_language_model=false"))
    assert trainer.train_dataset.targets is None
    assert read == []


def test_a_question_of_special_tokens_is_text_to_look_from(recipe, records):
    record = json.loads(records.read_text().splitlines()[0])
    bare = {**record, "question": "<|vision_start|>", "earlier": [], "needles": [], "looks": []}
    path = records.with_name("bare.jsonl")
    path.write_text(json.dumps(bare))
    trainer = build_trainer(recipe(f"data.train_files=[{path}]"))
    assert 0 < trainer.train_dataset[0]["attention"].sum() < 1


def test_two_processes_share_the_reading_and_train_as_one(recipe, tmp_path):
    recipe()  # writes the file
    logs, files = [], []
    for number in (1, 2):
        settings = [
            f"data.features={tmp_path}/features{number}",
            f"training.output_dir={tmp_path}/run{number}",
            f"training.per_device_train_batch_size={2 // number}",
            "training.train_sampling_strategy=sequential",
            "training.ddp_backend=gloo",
        ]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]
        command = [sys.executable, *launcher, "-m", "benchmarks", "train", str(tmp_path / "tiny.yaml")]
        changes = [part for change in settings for part in ("--set", change)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        result = subprocess.run([*command, *changes], env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
        state = json.loads((tmp_path / f"run{number}/trainer_state.json").read_text(encoding="utf-8"))
        # Not the loss of the answer: after a step, rounding may decide how many tokens it is given from.
        names = ("loss_budget", "loss_relevance")
        logs.append([{name: line[name] for name in names} for line in state["log_history"][:-1]])
        files.append(sorted(path.name for path in (tmp_path / f"features{number}").glob("*/*.safetensors")))
    # Two videos, and a target for each.
    assert files[0] == files[1] and len(files[0]) == 4
    for alone, shared in zip(*logs, strict=True):
        assert shared == pytest.approx(alone, rel=1e-4) and alone["loss_relevance"] > 0
