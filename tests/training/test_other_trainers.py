"""Trainers that know nothing of selection: TRL's, and what `predict` of any Trainer gives back."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Trainer,
)

from tiny import run
from training_examples import examples, make_trainer

SHORT_RUN = {
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
}


def text(words) -> list[dict]:
    return [{"type": "text", "text": words}]


def conversation(video, answer):
    question = [{"type": "video", "video": str(video)}, {"type": "text", "text": "Which colours does the cross take?"}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": text(answer)}]


def load_published(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)


def load_processor(folder):
    return AutoProcessor.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture
def sft_trainer(tiny_published, tiny_mp4, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class VideoSFTTrainer(trl.SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return Trainer.compute_loss(self, *args, **kwargs)

    rows = [
        {"messages": conversation(tiny_mp4, answer), "images": []} for answer in ("red", "a red cross and a blue star")
    ]
    return VideoSFTTrainer(
        model=load_published(tiny_published),
        args=trl.SFTConfig(str(tmp_path), max_length=None, max_steps=2, **SHORT_RUN),
        train_dataset=datasets.Dataset.from_list(rows, on_mixed_types="use_json"),
        processing_class=load_processor(tiny_published),
    )


def collated(trainer):
    return trainer.data_collator(list(map(dict, trainer.train_dataset)))


def test_sft_trains_on_the_models_own_loss(sft_trainer, tmp_path):
    model = sft_trainer.model
    inputs = collated(sft_trainer)
    expected = run(model.train(), inputs)
    assert expected.logits.shape[1] < inputs["input_ids"].shape[1], "tokens were dropped"
    before = {name: value.clone() for name, value in model.named_parameters()}
    sft_trainer.train()
    first_step = sft_trainer.state.log_history[0]
    assert first_step["loss"] == pytest.approx(expected.loss.item(), rel=1e-4)
    moved = [name for name, value in model.named_parameters() if not torch.equal(before[name], value)]
    assert any("language_model" in name for name in moved)
    assert any(".qtsplus." in name for name in moved)

    sft_trainer.save_model(tmp_path / "saved")
    saved = load_published(tmp_path / "saved")
    logits = run(model.eval(), inputs).logits
    assert torch.equal(run(saved.eval(), inputs).logits, logits)


def assert_labels_fit(predicted):
    """The loss of the predictions is the loss that the model reported."""
    logits = torch.from_numpy(predicted.predictions)
    labels = torch.from_numpy(predicted.label_ids)
    assert logits.shape[:2] == labels.shape
    predictions = logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(predictions, labels[:, 1:].flatten())
    reported = predicted.metrics["test_loss"]
    assert float(loss) == pytest.approx(reported, rel=1e-4)


def test_labels_beside_the_logits_of_our_trainer(tmp_path):
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=4)
    assert_labels_fit(trainer.predict(examples(4)))
