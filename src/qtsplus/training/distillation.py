"""The language-modelling loss on the answers, and distillation from a teacher's logits."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .dataset import IGNORED
from .lora import base_model

# A model that reads every visual token and re-encodes none.
EVERYTHING = {"selection": "all", "reencode": False, "retention": None, "max_visual_tokens": None}


def answer_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The predictions of the supervised tokens.

    Every token that precedes a supervised one is text, which no selector drops; so a student and its teacher give as
    many rows, in the same order, although their prompts have different lengths.

    Args:
        logits: `[B, S, V]`.
        labels: `[B, S]`, -100 where nothing is supervised.

    Returns:
        float32 logits `[N, V]`, the tokens they should predict `[N]`, and the row of the batch of each `[N]`.
    """
    supervised = labels[:, 1:] != IGNORED
    return logits[:, :-1][supervised].float(), labels[:, 1:][supervised], supervised.nonzero()[:, 0]


def divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """
    `T^2 KL(softmax(teacher / T) || softmax(student / T))` of each token, whose gradient keeps its size as T grows.

    Args:
        student, teacher: `[N, V]` float32. The teacher may have fewer columns, its vocabulary not being padded as far.

    Returns:
        `[N]`.

    Raises:
        ValueError: different numbers of tokens, or a teacher with the larger vocabulary.
    """
    if len(student) != len(teacher) or teacher.shape[1] > student.shape[1]:
        raise ValueError(
            f"The teacher gives {tuple(teacher.shape)} logits (tokens, vocabulary) and the student "
            f"{tuple(student.shape)}: expected as many tokens, and a teacher with the same tokenizer."
        )
    student = student[:, : teacher.shape[1]]
    log_p = F.log_softmax(teacher / temperature, dim=-1)
    log_q = F.log_softmax(student / temperature, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1) * temperature**2


@torch.no_grad()
def teacher_logits(teacher: nn.Module, inputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """
    A teacher's predictions of the answers, `[N, V]` float32.

    Args:
        teacher: a model with all visual tokens, such as stock Qwen2.5-VL.
        inputs: the student's inputs; those that the teacher does not know are left out.
        labels: `[B, S]` of the full prompt.
    """
    model = base_model(teacher)
    known = inspect.signature(model.forward).parameters
    given = {name: value for name, value in inputs.items() if name in known}
    if "mm_token_type_ids" in known:
        ids, config = inputs["input_ids"], model.config
        given["mm_token_type_ids"] = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    outputs = teacher(**given, use_cache=False)
    qtsplus = getattr(outputs, "qtsplus", None)
    if qtsplus is not None and qtsplus.columns is not None:
        labels = model.compact_labels(labels, inputs["input_ids"], qtsplus.columns)
    return answer_logits(outputs.logits, labels)[0]


def own_logits(model: nn.Module, inputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """
    [`teacher_logits`] of a model that reads every visual token and re-encodes none: with a frozen language model, of
    the model that it was made from. It is put into evaluation mode for as long.
    """
    with evaluating(model):
        return teacher_logits(model, {**inputs, **EVERYTHING}, labels)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for as long as it lasts."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


__all__ = ["EVERYTHING", "answer_logits", "divergence", "evaluating", "own_logits", "teacher_logits"]
