"""Inputs that speak of the full prompt's columns: logits_to_keep, shift_labels, embeddings in place of ids."""

import pytest
import torch

from tiny import PAD, batch, prompt, stock_twin, tiny_model, token_types

ROWS = (prompt(videos=[(4, 8, 12)]), prompt(videos=[(2, 4, 8)], seed=1, question=9), prompt(seed=2))
CALL = {"retention": 0.2}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(params=[True, False], ids=["left", "right"])
def inputs(request):
    return batch(*ROWS, pad_left=request.param)


def by_column(output, length):
    """`[B, S, V]`: the logits of every column of the full prompt, zero where there are none."""
    columns = output.qtsplus.columns
    spread = output.logits.new_zeros(len(columns), length + 1, output.logits.shape[-1])
    index = columns.masked_fill(columns < 0, length)[..., None].expand_as(output.logits)
    return spread.scatter(1, index, output.logits)[:, :length]


@pytest.mark.parametrize("counted", ["from the front", "from the end"])
@pytest.mark.parametrize("kept", [torch.tensor([-1, -6, -3]), torch.tensor([-2]), 4, 1])
def test_logits_to_keep_means_columns_of_the_full_prompt(model, inputs, kept, counted):
    length = inputs["input_ids"].shape[1]
    if torch.is_tensor(kept) and counted == "from the front":
        kept = kept + length
    with torch.no_grad():
        expected = by_column(model(**inputs, **CALL), length)
        found = model(**inputs, **CALL, logits_to_keep=kept).logits
    expected = expected[:, kept] if torch.is_tensor(kept) else expected[:, -kept:]
    real = inputs["attention_mask"].bool()
    real = real[:, kept] if torch.is_tensor(kept) else real[:, -kept:]
    assert found.shape == expected.shape
    torch.testing.assert_close(found[real], expected[real], atol=1e-6, rtol=1e-6)


def test_with_all_tokens_logits_to_keep_is_as_in_stock(model):
    inputs = batch(*ROWS)
    columns = torch.tensor([3, 11, -1])
    ours = model(**inputs, selection="all", reencode=False, logits_to_keep=columns).logits
    stock = stock_twin(model)(**inputs, mm_token_type_ids=token_types(inputs["input_ids"]), logits_to_keep=columns)
    real = inputs["attention_mask"].bool()[:, columns]
    torch.testing.assert_close(ours[real], stock.logits[real], atol=1e-5, rtol=1e-5)


def test_a_dropped_token_has_no_logits(model):
    inputs = batch(ROWS[0])
    kept = set(model(**inputs, **CALL).qtsplus.columns[0].tolist())
    dropped = next(column for column in range(inputs["input_ids"].shape[1]) if column not in kept)
    with pytest.raises(ValueError, match=f"logits_to_keep names column {dropped}, in row 0 a visual token"):
        model(**inputs, **CALL, logits_to_keep=torch.tensor([-1, dropped]))


def test_shift_labels_of_the_full_prompt_give_the_loss_of_labels(model, inputs):
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == PAD, -100)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected = model(**inputs, **CALL, labels=labels).loss
    torch.testing.assert_close(model(**inputs, **CALL, labels=labels, shift_labels=shifted).loss, expected)


@pytest.mark.parametrize("with_ids", [True, False], ids=["and ids", "alone"])
@pytest.mark.parametrize("what", ["image", "video", "batch"])
def test_generate_from_embeddings_is_generate_from_their_ids(model, with_ids, what):
    row = {"image": [prompt(images=[(1, 8, 8)])], "video": [ROWS[0]], "batch": ROWS}[what]
    inputs = batch(*row)
    ids = inputs.pop("input_ids")
    embeds = model.get_input_embeddings()(ids)
    mask = {"query_mask": model.model.token_types(ids) * 0} if not with_ids else {}
    if mask:  # where the question stands, embeddings do not tell
        mask["query_mask"][:, -9:-4] = 1
    call = {**CALL, "max_new_tokens": 5, "do_sample": False, **mask}
    expected = model.generate(**inputs, input_ids=ids, **call)
    if with_ids:
        assert torch.equal(model.generate(**inputs, input_ids=ids, inputs_embeds=embeds, **call), expected)
    else:
        assert torch.equal(model.generate(**inputs, inputs_embeds=embeds, **call), expected[:, ids.shape[1] :])


def test_generate_reads_the_embeddings_that_are_given(model):
    inputs = batch(ROWS[0])
    other = inputs["input_ids"].clone()
    other[0, -9:-5] = torch.tensor([33, 44, 55, 66])
    call = {**CALL, "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(**{**inputs, "input_ids": other}, **call)[:, other.shape[1] :]
    embeds = model.get_input_embeddings()(other)
    found = model.generate(**inputs, inputs_embeds=embeds, **call)[:, other.shape[1] :]
    assert torch.equal(found, expected)
