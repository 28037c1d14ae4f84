"""Trainers that know nothing of selection: TRL's, and what `predict` of any Trainer gives back."""

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Trainer,
    TrainingArguments,
)

from tiny import tiny_model
from training_examples import collate, examples, make_trainer

PICTURE = Image.effect_noise((112, 112), 99).convert("RGB")
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


def load_at_full_length(folder):
    model = load_published(folder)
    model.model.full_length = True
    return model


@pytest.fixture
def sft_trainer(tiny_published, tiny_mp4, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class VideoSFTTrainer(trl.SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return Trainer.compute_loss(self, *args, **kwargs)

    rows = []
    for answer in ("red", "a red cross and a blue star"):
        rows.append({"messages": conversation(tiny_mp4, answer), "images": []})
    return VideoSFTTrainer(
        model=load_published(tiny_published),
        args=trl.SFTConfig(str(tmp_path), max_length=None, max_steps=2, **SHORT_RUN),
        train_dataset=datasets.Dataset.from_list(rows, on_mixed_types="use_json"),
        processing_class=load_processor(tiny_published),
    )


def collated(trainer):
    rows = list(map(dict, trainer.train_dataset))
    return trainer.data_collator(rows)


def test_sft_trains_on_the_models_own_loss(sft_trainer, tmp_path):
    model = sft_trainer.model
    inputs = collated(sft_trainer)
    with torch.no_grad():
        expected = model.train()(**inputs)
    assert expected.logits.shape[1] < inputs["input_ids"].shape[1], "tokens were dropped"
    before = {name: value.clone() for name, value in model.named_parameters()}
    sft_trainer.train()
    assert sft_trainer.state.log_history[0]["loss"] == pytest.approx(expected.loss.item(), rel=1e-4)
    moved = [name for name, value in model.named_parameters() if not torch.equal(before[name], value)]
    assert any("language_model" in name for name in moved)
    assert any(".qtsplus." in name for name in moved)

    sft_trainer.save_model(tmp_path / "saved")
    saved = load_published(tmp_path / "saved").eval()
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
        assert torch.equal(saved(**inputs).logits, logits)


def test_dpo_takes_a_step_with_images(tiny_published, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    row = {
        "images": [PICTURE],
        "prompt": [{"role": "user", "content": "What is this?"}],
        "chosen": [{"role": "assistant", "content": "red"}],
        "rejected": [{"role": "assistant", "content": "a blue star"}],
    }
    trainer = trl.DPOTrainer(
        load_at_full_length(tiny_published),
        load_at_full_length(tiny_published),
        trl.DPOConfig(str(tmp_path), max_length=None, max_steps=1, **SHORT_RUN),
        train_dataset=datasets.Dataset.from_list([row] * 2),
        processing_class=load_processor(tiny_published),
    )
    trainer.train()
    line = trainer.state.log_history[0]
    assert line["loss"] == pytest.approx(0.6931, abs=1e-3), "the reference is the same model"
    assert line["grad_norm"] > 0


def test_grpo_takes_a_step_with_images(tiny_published, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    row = {"images": [PICTURE], "prompt": [{"role": "user", "content": "What is this?"}]}

    def shortest(completions, **_):
        return [-float(len(completion[0]["content"])) for completion in completions]

    trainer = trl.GRPOTrainer(
        load_at_full_length(tiny_published),
        shortest,
        trl.GRPOConfig(str(tmp_path), num_generations=2, max_completion_length=6, max_steps=1, **SHORT_RUN),
        train_dataset=datasets.Dataset.from_list([row] * 2),
        processing_class=load_processor(tiny_published),
    )
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"]) < 10


def assert_labels_fit(predicted):
    """The loss of the predictions is the loss that the model reported."""
    logits = torch.from_numpy(predicted.predictions)
    labels = torch.from_numpy(predicted.label_ids)
    assert logits.shape[:2] == labels.shape
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert float(loss) == pytest.approx(predicted.metrics["test_loss"], rel=1e-4)


def test_labels_beside_the_logits_of_a_plain_trainer(tmp_path):
    def batch(rows):
        inputs = collate(rows)
        del inputs["source_ids"]
        return inputs

    arguments = TrainingArguments(str(tmp_path), per_device_eval_batch_size=4, use_cpu=True, report_to=[])
    arguments.remove_unused_columns = False  # the rows are no dictionaries
    model = tiny_model(n_max=10)
    model.model.full_length = True
    rows = examples(4)[1:]  # three videos of different lengths, padded and shortened
    predicted = Trainer(model, arguments, data_collator=batch).predict(rows)
    assert predicted.predictions.shape[1] == batch(rows)["labels"].shape[1]
    assert_labels_fit(predicted)


def test_labels_beside_the_logits_of_our_trainer(tmp_path):
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=4)
    assert_labels_fit(trainer.predict(examples(4)))
