"""The random examples of a tiny model, with the laboratory's Trainer on them."""

from typing import Any

import training_examples
from benchmarks.teaching.trainer import TinyWorldTrainer
from training_examples import InOrder


class TaughtInOrder(InOrder, TinyWorldTrainer):
    """Reads the examples in order, and learns from dense supervision."""


def make_trainer(folder, **settings: Any) -> InOrder:
    """As `training_examples.make_trainer`."""
    return training_examples.make_trainer(folder, kind=TaughtInOrder, **settings)
