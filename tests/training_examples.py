"""Random examples for a tiny random model, and a Trainer on them."""

from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import ProgressCallback

from qtsplus.training import QTSplusTrainer
from tiny import batch, prompt, tiny_model

ANSWER = 5  # supervised tokens of an example


def examples(count: int, text_only: tuple[int, ...] = (0, 6, 7)) -> list:
    """Prompts with videos of three lengths; those in `text_only` have none."""
    rows = []
    for index in range(count):
        width = 4 + 4 * (index % 3)
        videos = [] if index in text_only else [(2, 4, width)]
        rows.append(prompt(videos=videos, seed=index, generation=False))
    return rows


def collate(rows: list) -> dict[str, torch.Tensor]:
    inputs = batch(*rows, pad_left=False)
    ids = inputs["input_ids"]
    labels = torch.full_like(ids, -100)
    for index, row in enumerate(rows):
        end = len(row.ids) - 1
        start = end - ANSWER
        stop = end - row.ids[-3] % 2  # rows with different numbers of supervised tokens
        labels[index, start:stop] = ids[index, start:stop]
    inputs["labels"] = labels
    inputs["source_ids"] = torch.tensor([len(row.ids) % 3 for row in rows])
    return inputs


class InOrder(QTSplusTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def make_trainer(
    folder,
    selector: dict[str, Any] | None = None,
    kind: type[InOrder] = InOrder,
    **arguments: Any,
) -> InOrder:
    """
    A Trainer with plain gradient descent, which shows a difference in the gradient as it is, and a gate that draws no
    noise.
    """
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        **arguments,
    }
    model = tiny_model(**{"gate": "noiseless", "rho_min": 0.1, "rho_max": 0.9, "n_max": 10, **(selector or {})})
    trainer = kind(
        model,
        kind.arguments_class(**settings),
        train_dataset=examples(12),
        eval_dataset=examples(4),
        data_collator=collate,
    )
    trainer.remove_callback(ProgressCallback)
    return trainer


def trained(folder, **settings: Any) -> InOrder:
    """The trainer of [`make_trainer`] after its training."""
    trainer = make_trainer(folder, **settings)
    trainer.train()
    return trainer


def inputs_and_labels(count: int = 4) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch of the first examples, as a model takes it."""
    inputs = collate(examples(count))
    labels = inputs.pop("labels")
    del inputs["source_ids"]
    return inputs, labels


def steps(trainer: QTSplusTrainer) -> list[dict[str, float]]:
    """The log's lines of training steps, without what depends on the clock."""
    return [line for line in trainer.state.log_history if "loss" in line]


def assert_same_training(first: QTSplusTrainer, second: QTSplusTrainer, tolerance: float = 2e-5) -> None:
    for line, other in zip(steps(first), steps(second), strict=True):
        assert line == pytest.approx(other, rel=tolerance, abs=tolerance)
    weights = dict(second.model.named_parameters())
    for name, weight in first.model.named_parameters():
        torch.testing.assert_close(
            weight,
            weights.pop(name),
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert not weights
