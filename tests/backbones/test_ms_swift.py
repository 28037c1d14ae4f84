"""ms-swift trains every backbone with recipes/ms_swift.py; `make test-swift` installs it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from qtsplus.asking import session
from qtsplus.data.records import VideoRecord
from qtsplus.hub.publish import assemble_folder
from qtsplus.training.dataset import VideoQACollator, VideoQADataset

swift = pytest.importorskip("swift", reason="needs ms-swift")
PLUGIN = Path(__file__).parents[2] / "recipes/ms_swift.py"
QUESTION = "What moves?"
ANSWERS = {
    "long": "The red ball.",
    "short": "Two.",
}


@pytest.fixture(scope="module")
def registered():
    specification = importlib.util.spec_from_file_location("ms_swift_plugin", PLUGIN)
    specification.loader.exec_module(importlib.util.module_from_spec(specification))


@pytest.fixture(scope="module")
def folder(backbone, processor, model, tmp_path_factory):
    saved = tmp_path_factory.mktemp("saved")
    for part in (model, processor):
        part.save_pretrained(saved)
    return assemble_folder(saved, tmp_path_factory.mktemp("hub") / backbone.name)


@pytest.fixture(scope="module")
def loaded(registered, folder):
    """A folder's model and its template, in ms-swift, which learns from the folder what it is."""
    from swift.model import get_model_processor
    from swift.template import get_template

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPS", "2")
        model, processor = get_model_processor(str(folder), torch_dtype=torch.float32)
        return model, get_template(processor)


def row(clips, name: str) -> dict:
    return {
        "messages": [
            {"role": "user", "content": f"<video>{QUESTION}"},
            {"role": "assistant", "content": ANSWERS[name]},
        ],
        "videos": [str(clips / f"{name}.mp4")],
    }


def own_batch(processor, clips) -> dict:
    """What our own trainer gives the model for the two rows."""
    records = []
    for name, answer in ANSWERS.items():
        record = VideoRecord(
            video=str(clips / f"{name}.mp4"),
            question=QUESTION,
            answer=answer,
            source="vqa",
        )
        records.append(record)
    dataset = VideoQADataset(records, processor, processor_kwargs={"fps": 2})
    batch = VideoQACollator(processor)([dataset[0], dataset[1]])
    return {name: batch[name] for name in batch if name not in ("skipped", "source_ids")}


def test_a_batch_and_its_loss_are_those_of_our_own_trainer(loaded, processor, clips):
    model, template = loaded
    template.set_mode("train")
    batch = template.data_collator([template.encode(row(clips, name)) for name in ANSWERS])
    ours = own_batch(processor, clips)
    for name in ours.keys() - {"query_mask"}:
        assert torch.equal(torch.as_tensor(batch[name]), ours[name]), name
    # As ms-swift's trainer cuts them: those of the last columns.
    batch.update(labels=batch["labels"][:, -9:], logits_to_keep=9)
    with torch.no_grad():
        expected = model(**ours)
        output = template.compute_sft_loss(model, batch)
    assert output.loss == expected.loss  # whose question the model has found by itself
    assert batch["labels"].shape == output.logits.shape[:2]
    assert (batch["labels"] >= 0).sum() == (ours["labels"] >= 0).sum()


@pytest.mark.slow
def test_swift_sft_trains_a_folder(tiny_published, clips, tmp_path):
    """By the command itself; its first loss is the model's own."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row(clips, name)) + "\n" for name in ANSWERS))
    settings = {
        "model": tiny_published,
        "dataset": data,
        "external_plugins": PLUGIN,
        "output_dir": tmp_path / "run",
        "tuner_type": "full",
        "freeze_aligner": "false",
        "torch_dtype": "float32",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "logging_steps": 1,
        "split_dataset_ratio": 0,
        "report_to": "none",
        "dataset_num_proc": 1,
    }
    options = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    environment = {
        **os.environ,
        "FPS": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "USE_HF": "1",
    }
    line = [sys.executable, "-m", "swift.cli.sft", *options]
    result = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]

    (folder,) = (tmp_path / "run").glob("*/checkpoint-3")
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    model, _ = session.load(tiny_published, "cpu")
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        expected = model.train()(**own_batch(processor, clips)).loss
    assert log[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert log[2]["loss"] < log[0]["loss"]
    assert log[0]["token_acc"] >= 0

    trained = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
    before = dict(model.named_parameters())
    after = dict(trained.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    parts = ("language_model", "qtsplus.reencode_layers", "visual")
    assert [any(part in name for name in moved) for part in parts] == [True, True, False]
    video = session.encode(trained, processor, clips / "long.mp4", fps=2)
    assert session.ask(trained, processor, video, QUESTION, max_new_tokens=5).answer
