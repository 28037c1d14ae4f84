"""Inputs that speak of the full prompt's columns: logits_to_keep."""

import pytest
import torch
from torch.testing import assert_close

from tiny import batch, prompt, run

ROWS = (
    prompt(videos=[(4, 8, 12)]),
    prompt(videos=[(2, 4, 8)], seed=1, question=9),
    prompt(seed=2),
)
CALL = {"retention": 0.2}


@pytest.fixture(params=[True, False], ids=["left", "right"])
def inputs(request):
    return batch(*ROWS, pad_left=request.param)


def by_column(output, length):
    """`[B, S, V]`: the logits of every column of the full prompt, zeros where there are none."""
    rows, _, vocabulary = output.logits.shape
    spread = torch.zeros(rows, length, vocabulary)
    for row, columns in enumerate(output.qtsplus.columns):
        is_real = columns >= 0
        spread[row, columns[is_real]] = output.logits[row][is_real]
    return spread


def check_columns(model, inputs, kept, columns):
    """`logits_to_keep=kept` gives the logits of these columns of the full prompt."""
    mask = inputs["attention_mask"].bool()
    whole = by_column(run(model, inputs, **CALL), mask.shape[1])
    logits = run(model, inputs, **CALL, logits_to_keep=kept).logits
    is_real = mask[:, columns]
    expected = whole[:, columns]
    assert logits.shape == expected.shape
    assert_close(logits[is_real], expected[is_real], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kept", [4, 1])
def test_a_number_to_keep_means_the_last_columns(model, inputs, kept):
    check_columns(model, inputs, kept, slice(-kept, None))


@pytest.mark.parametrize("kept", [torch.tensor([-1, -6, -3]), torch.tensor([-2])])
def test_columns_to_keep_are_those_of_the_full_prompt(model, inputs, kept):
    length = inputs["input_ids"].shape[1]
    check_columns(model, inputs, kept, kept)
    check_columns(model, inputs, kept + length, kept)


def test_a_dropped_token_and_one_too_many_have_no_logits(model):
    inputs = batch(ROWS[0])
    (columns,) = run(model, inputs, **CALL).qtsplus.columns
    length = inputs["input_ids"].shape[1]
    every_column = set(range(length))
    dropped = min(every_column.difference(columns.tolist()))
    asked = torch.tensor([-1, dropped])
    with pytest.raises(ValueError, match="logits_to_keep names a visual token that was not kept"):
        model(**inputs, **CALL, logits_to_keep=asked)
    with pytest.raises(ValueError, match=f"={length + 1}: expected at most the prompt's {length} columns"):
        model(**inputs, **CALL, logits_to_keep=length + 1)
