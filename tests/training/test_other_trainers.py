"""Trainers that know nothing of selection: TRL's, and what `predict` of any Trainer gives back."""

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2_5_VLProcessor,
    Trainer,
    TrainingArguments,
)

from tiny import tiny_model
from training_examples import collate, examples, make_trainer

QUESTION = "Which colours does the cross take?"


def conversation(video, answer):
    content = [{"type": "video", "video": str(video)}, {"type": "text", "text": QUESTION}]
    reply = [{"type": "text", "text": answer}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]


def assert_labels_fit(predicted, loss_name="test_loss"):
    """The loss of the predictions is the loss that the model reported."""
    logits, labels = torch.from_numpy(predicted.predictions), torch.from_numpy(predicted.label_ids)
    assert logits.shape[:2] == labels.shape
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert float(loss) == pytest.approx(predicted.metrics[loss_name], rel=1e-4)


def at_full_length(published, **selector):
    model = AutoModelForImageTextToText.from_pretrained(published, trust_remote_code=True)
    vars(model.config.qtsplus_config).update(selector)
    model.model.full_length = True
    return model


@pytest.fixture(scope="module")
def sft_trainer():
    trl = pytest.importorskip("trl")

    class VideoSFTTrainer(trl.SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return Trainer.compute_loss(self, *args, **kwargs)

    def make(folder, published, mp4, **settings):
        datasets = pytest.importorskip("datasets")
        rows = [
            {"messages": conversation(mp4, answer), "images": []} for answer in ("red", "a red cross and a blue star")
        ]
        return VideoSFTTrainer(
            model=AutoModelForImageTextToText.from_pretrained(published, trust_remote_code=True),
            args=trl.SFTConfig(
                str(folder),
                max_length=None,
                max_steps=2,
                per_device_train_batch_size=2,
                logging_steps=1,
                save_strategy="no",
                bf16=False,
                use_cpu=True,
                report_to=[],
                **settings,
            ),
            train_dataset=datasets.Dataset.from_list(rows, on_mixed_types="use_json"),
            processing_class=AutoProcessor.from_pretrained(published, trust_remote_code=True),
        )

    return make


def test_sft_trains_on_the_models_own_loss(sft_trainer, tiny_published, tiny_mp4, tmp_path):
    trainer = sft_trainer(tmp_path, tiny_published, tiny_mp4)
    inputs = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    with torch.no_grad():
        expected = trainer.model.train()(**inputs)
    assert expected.logits.shape[1] < inputs["input_ids"].shape[1], "tokens were dropped"
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.loss.item(), rel=1e-4)
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(before[name], value)}
    assert any("language_model" in name for name in moved) and any(".qtsplus." in name for name in moved)

    trainer.save_model(tmp_path / "saved")
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(saved.eval()(**inputs).logits, trainer.model.eval()(**inputs).logits)


PICTURE = Image.effect_noise((112, 112), 99).convert("RGB")
ASKED = [{"role": "user", "content": "What is this?"}]
SHORT_RUN = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
}


def said(text):
    return [{"role": "assistant", "content": text}]


def test_dpo_and_grpo_take_a_step_with_images(tiny_published, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model, reference = (at_full_length(tiny_published) for _ in range(2))
    processor = AutoProcessor.from_pretrained(tiny_published, trust_remote_code=True)
    row = {"images": [PICTURE], "prompt": ASKED}
    preferences = datasets.Dataset.from_list([{**row, "chosen": said("red"), "rejected": said("a blue star")}] * 2)
    settings = trl.DPOConfig(str(tmp_path), max_length=None, **SHORT_RUN)
    dpo = trl.DPOTrainer(model, reference, settings, train_dataset=preferences, processing_class=processor)
    dpo.train()
    assert dpo.state.log_history[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "the reference is the same model"
    assert dpo.state.log_history[0]["grad_norm"] > 0

    def shortest(completions, **_):
        return [-float(len(one[0]["content"])) for one in completions]

    settings = trl.GRPOConfig(str(tmp_path), num_generations=2, max_completion_length=6, **SHORT_RUN)
    grpo = trl.GRPOTrainer(
        at_full_length(tiny_published),
        shortest,
        settings,
        train_dataset=datasets.Dataset.from_list([row] * 2),
        processing_class=processor,
    )
    grpo.train()
    assert abs(grpo.state.log_history[0]["loss"]) < 10


def _stock_marks_answers(folder, template) -> bool:
    stock = Qwen2_5_VLProcessor.from_pretrained(folder, trust_remote_code=False)
    image = {"type": "image", "image": Image.new("RGB", (56, 56))}
    asked = {"role": "user", "content": [image, {"type": "text", "text": "What?"}]}
    answered = {"role": "assistant", "content": [{"type": "text", "text": "red"}]}
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    inputs = stock.apply_chat_template([[asked, answered]], chat_template=template, return_tensors="pt", **options)
    return bool(torch.as_tensor(inputs["assistant_masks"]).any())


def test_sft_supervises_answers_alone(sft_trainer, tiny_published, tiny_mp4, tmp_path):
    """TRL knows the template of Qwen2.5-VL by its text and has a twin that marks the answers."""
    trainer = sft_trainer(tmp_path, tiny_published, tiny_mp4)
    templates = pytest.importorskip("trl.chat_template_utils")
    collator = trainer.data_collator
    collator.chat_template = templates.qwen2_5_vl_training_chat_template
    collator.assistant_only_loss = True
    labels = collator([dict(row) for row in trainer.train_dataset])["labels"][0]
    said = trainer.processing_class.tokenizer.decode(labels[labels != -100])
    if not said and not _stock_marks_answers(tiny_published, templates.qwen2_5_vl_training_chat_template):
        pytest.skip("this Transformers marks no answer in a prompt with images, for the stock processor neither")
    assert said == "red<|im_end|>\n" or said == "red<|im_end|>"


def test_labels_beside_the_logits_of_a_plain_trainer(tmp_path):
    def batch(rows):
        return {name: value for name, value in collate(rows).items() if name != "source_ids"}

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
    predicted = trainer.predict(examples(4))
    assert_labels_fit(predicted)
