"""What a loss reads: the predictions of the answers, and a model that reads every visual token."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .dataset import IGNORED

# A model that reads every visual token and re-encodes none.
EVERYTHING = {"selection": "all", "reencode": False, "retention": None, "max_visual_tokens": None}


def answer_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The predictions of the supervised tokens.

    Args:
        logits: `[B, S, V]`.
        labels: `[B, S]`, -100 where nothing is supervised.

    Returns:
        float32 logits `[N, V]`, the tokens they should predict `[N]`, and the row of the batch of each `[N]`.
    """
    supervised = labels[:, 1:] != IGNORED
    return logits[:, :-1][supervised].float(), labels[:, 1:][supervised], supervised.nonzero()[:, 0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for as long as it lasts."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
