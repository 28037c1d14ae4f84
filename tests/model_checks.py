"""What the checks of a whole model share: models, prompts, and what to compare."""

from functools import cache

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from torch.testing import assert_close

from qtsplus import Qwen2_5_VLQTSplusForConditionalGeneration, Qwen2_5_VLQTSplusModel
from qtsplus.model.question_qtsplus import find_query_mask
from tiny import assert_same, batch, prompt, tiny_model

FULL = Qwen2_5_VLQTSplusForConditionalGeneration
BACKBONE = Qwen2_5_VLQTSplusModel
CLASSES = pytest.mark.parametrize("cls", [FULL, BACKBONE], ids=["with_head", "backbone"])
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
TRANSFORMERS = Version(transformers.__version__)
NEW = 6  # tokens that `greedy` makes


def mixed_rows():
    """Three rows: an image and two videos; a long text; a video and a longer question."""
    return (
        prompt(images=[(1, 4, 4)], videos=[(2, 4, 6), (1, 4, 4)], question=6, seed=1),
        prompt(question=25, seed=2),
        prompt(videos=[(3, 4, 10)], question=9, seed=3, seconds=0.5),
    )


def mixed_inputs(pad_left=True):
    return batch(*mixed_rows(), pad_left=pad_left)


def with_labels(inputs):
    return {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


def build(cls, seed=0, tied=True, **selector):
    model = tiny_model(seed, tied, **selector)
    return model if cls is FULL else model.model


@cache
def shared_model():
    """For tests that change nothing."""
    return tiny_model()


@torch.no_grad()
def main_output(model, inputs, **call):
    """The logits, or the last hidden state."""
    return model(**inputs, **call)[0]


@torch.no_grad()
def real_output(model, inputs, **call):
    """The same without the padding, `[tokens, d]`."""
    output = model(**inputs, **call)
    return output[0][output.qtsplus.columns >= 0]


def question_mask(model, inputs):
    """The mask that the model finds where none is given."""
    config = model.config
    ids = inputs["input_ids"]
    turns = config.user_turn_token_ids, config.turn_end_token_id, config.special_token_ids
    return find_query_mask(ids, inputs["attention_mask"], *turns)


def saved_keys(folder):
    keys = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            keys += tensors.keys()
    return keys


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def assert_row_is_alone(together, row, alone, tolerance=1e-4):
    """A row's logits without the padding, and the tokens that were kept, are those of the row alone."""
    is_real = together.qtsplus.columns[row] >= 0
    assert_close(together.logits[row][is_real], alone.logits[0], atol=tolerance, rtol=tolerance)
    if alone.qtsplus is not None:
        assert_same(together.qtsplus.kept_indices[row], alone.qtsplus.kept_indices[0])


def assert_trained(model):
    """The trainable parameters, and no others, have gradients, which are finite."""
    for name, parameter in model.named_parameters():
        has_gradient = parameter.grad is not None
        assert has_gradient == parameter.requires_grad, name
        if has_gradient:
            assert torch.isfinite(parameter.grad).all(), name


def greedy(model=None, inputs=None, **call):
    """Ids of `NEW` greedy tokens, of the shared model and the mixed prompts unless others are given."""
    model = shared_model() if model is None else model
    inputs = mixed_inputs() if inputs is None else inputs
    return model.generate(**inputs, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, **call)
