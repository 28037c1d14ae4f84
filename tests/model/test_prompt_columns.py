"""Inputs that speak of the full prompt's columns: logits_to_keep."""

import pytest
import torch
from torch.testing import assert_close

from tiny import batch, prompt, stock_twin, token_types

ROWS = (prompt(videos=[(4, 8, 12)]), prompt(videos=[(2, 4, 8)], seed=1, question=9), prompt(seed=2))
CALL = {"retention": 0.2}


@pytest.fixture(params=[True, False], ids=["left", "right"])
def inputs(request):
    return batch(*ROWS, pad_left=request.param)


def by_column(output, length):
    """`[B, S, V]`: the logits of every column of the full prompt, NaN where there are none."""
    columns = output.qtsplus.columns
    spread = torch.full((len(columns), length, output.logits.shape[-1]), torch.nan)
    rows, places = (columns >= 0).nonzero(as_tuple=True)
    spread[rows, columns[rows, places]] = output.logits[rows, places]
    return spread


@pytest.mark.parametrize("counted", ["from the front", "from the end"])
@pytest.mark.parametrize("kept", [torch.tensor([-1, -6, -3]), torch.tensor([-2]), 4, 1])
def test_logits_to_keep_means_columns_of_the_full_prompt(model, inputs, kept, counted):
    length = inputs["input_ids"].shape[1]
    if torch.is_tensor(kept) and counted == "from the front":
        kept = kept + length
    columns = torch.arange(length)
    columns = columns[kept] if torch.is_tensor(kept) else columns[-kept:]
    with torch.no_grad():
        expected = by_column(model(**inputs, **CALL), length)[:, columns]
        logits = model(**inputs, **CALL, logits_to_keep=kept).logits
    is_real = inputs["attention_mask"].bool()[:, columns]
    assert logits.shape == expected.shape
    assert_close(logits[is_real], expected[is_real], atol=1e-6, rtol=1e-6)


def test_with_all_tokens_logits_to_keep_is_as_in_stock(model):
    inputs = batch(*ROWS)
    columns = torch.tensor([3, 11, -1])
    types = token_types(inputs["input_ids"])
    ours = model(**inputs, selection="all", reencode=False, logits_to_keep=columns).logits
    stock = stock_twin(model)(**inputs, mm_token_type_ids=types, logits_to_keep=columns).logits
    is_real = inputs["attention_mask"].bool()[:, columns]
    assert_close(ours[is_real], stock[is_real], atol=1e-5, rtol=1e-5)


def test_a_dropped_token_has_no_logits(model):
    inputs = batch(ROWS[0])
    (columns,) = model(**inputs, **CALL).qtsplus.columns
    everything = torch.arange(inputs["input_ids"].shape[1])
    dropped = int(everything[~torch.isin(everything, columns)][0])
    with pytest.raises(ValueError, match=f"logits_to_keep names column {dropped}, in row 0 a visual token"):
        model(**inputs, **CALL, logits_to_keep=torch.tensor([-1, dropped]))
