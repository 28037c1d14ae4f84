"""A caller's own decoding loop: a cache of the shortened prompt beside masks and positions of the full width."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import StaticCache

from qtsplus.model.prompt_qtsplus import CACHE
from tiny import batch, prompt, tiny_model

STEPS = 5
ROWS = (
    prompt(videos=[(2, 4, 6)], question=4, seed=1, seconds=2.0),
    prompt(videos=[(3, 4, 10)], question=9, seed=3, seconds=0.5),
    prompt(question=25, seed=2),
)


def new_cache(model):
    return DynamicCache(config=model.config.get_text_config())


def by_generate(model, inputs):
    """The logits of every step, `[B, STEPS, vocabulary]`, and the new ids, `[B, STEPS]`."""
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    result = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    return torch.stack(result.logits, dim=1), result.sequences[:, -STEPS:]


@torch.no_grad()
def by_hand(model, inputs, ids, next_mask, cache=None, **later):
    """The logits of the same steps, with the masks `[B, width]` that `next_mask` makes of the one before."""
    output = model(**inputs, past_key_values=cache, use_cache=True)
    cache = output[CACHE]
    mask = next_mask(inputs["attention_mask"], output)
    logits = [output.logits[:, -1]]
    for step in range(STEPS - 1):
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        output = model(input_ids=ids[:, step : step + 1], attention_mask=mask, past_key_values=cache, **later)
        logits.append(output.logits[:, -1])
    return torch.stack(logits, dim=1)


MASKS = {
    "the full prompt's": lambda mask, output: mask,
    "the cached columns'": lambda mask, output: (output.qtsplus.columns >= 0).long(),
    "ones for the cached columns": lambda mask, output: torch.ones(len(mask), output[CACHE].get_seq_length()),
    "none": lambda mask, output: None,
}


@pytest.mark.parametrize("position_ids", ["original", "sequential"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_loop_gives_what_generate_gives(mask, attention, position_ids):
    model, inputs = tiny_model(position_ids=position_ids), batch(*ROWS)
    model.set_attn_implementation(attention)
    expected, ids = by_generate(model, inputs)
    torch.testing.assert_close(by_hand(model, inputs, ids, MASKS[mask]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mask", ["the full prompt's", "the cached columns'"])
def test_at_full_length_too(mask):
    model, inputs = tiny_model(), batch(*ROWS)
    expected, ids = by_generate(model, inputs)
    model.model.full_length = True
    torch.testing.assert_close(by_hand(model, inputs, ids, MASKS[mask]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make_cache", [new_cache, lambda model: StaticCache(model.config.get_text_config(), 128)])
def test_with_the_callers_own_cache_and_only_the_last_logits(make_cache):
    model, inputs = tiny_model(), batch(*ROWS)
    expected, ids = by_generate(model, inputs)
    got = by_hand(model, inputs, ids, MASKS["the full prompt's"], make_cache(model), logits_to_keep=1)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_several_columns_at_a_time_and_positions_of_the_full_width():
    model, inputs = tiny_model(), batch(ROWS[0])
    expected, ids = by_generate(model, inputs)
    cache = new_cache(model)
    with torch.no_grad():
        prompt_output = model(**inputs, past_key_values=cache)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, STEPS - 1), value=1)
        first = int(prompt_output.qtsplus.columns.shape[1] + cache.qtsplus_prompt.rope_deltas)
        new = torch.arange(first, first + STEPS - 1)
        everything = torch.cat([torch.zeros(inputs["input_ids"].shape[1], dtype=torch.long), new])
        for position_ids in (None, new[None], everything[None]):
            output = model(
                input_ids=ids[:, :-1],
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=copy.deepcopy(cache),
            )
            torch.testing.assert_close(output.logits, expected[:, 1:], atol=1e-4, rtol=1e-4)


def test_rows_that_are_repeated_as_beams_are():
    model, inputs = tiny_model(), batch(*ROWS)
    expected, ids = by_generate(model, inputs)
    cache = new_cache(model)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1).repeat_interleave(2, dim=0)
        beams = ids[:, :1].repeat_interleave(2, dim=0)
        output = model(input_ids=beams, attention_mask=mask, past_key_values=cache)
    expected = expected[:, 1].repeat_interleave(2, dim=0)
    torch.testing.assert_close(output.logits[:, 0], expected, atol=1e-4, rtol=1e-4)


ORDERS = {
    "reordered": ([2, 0, 1], lambda cache, rows: cache.reorder_cache(rows)),
    "selected": ([2, 1], lambda cache, rows: cache.batch_select_indices(rows)),
    "repeated and reordered": (
        [2, 2, 0, 1, 1, 0],
        lambda cache, rows: (cache.batch_repeat_interleave(2), cache.reorder_cache(rows * 2)),
    ),
}


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_are_reordered_between_prompts(order, copies):
    model, inputs = tiny_model(), batch(*ROWS)
    expected, ids = by_generate(model, inputs)
    numbers, reorder = ORDERS[order]
    rows = torch.tensor(numbers)
    first = new_cache(model)
    with torch.no_grad():
        model(**inputs, past_key_values=first)
        cache = copies(first)
        reorder(cache, rows)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)[rows]
        output = model(input_ids=ids[rows, :1], attention_mask=mask, past_key_values=cache)
        torch.testing.assert_close(output.logits[:, 0], expected[rows, 1], atol=1e-4, rtol=1e-4)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        output = model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=first)
    torch.testing.assert_close(output.logits[:, 0], expected[:, 1], atol=1e-4, rtol=1e-4)
    assert isinstance(cache, DynamicCache)


def test_beams_behind_generate_are_reordered():
    model, inputs = tiny_model(), batch(*ROWS[:2])
    cache = new_cache(model)
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 2, "min_new_tokens": 2}
    model.generate(**inputs, **options, past_key_values=cache)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    assert torch.equal(cache.qtsplus_prompt.columns[0], cache.qtsplus_prompt.columns[1])
    assert not torch.equal(cache.qtsplus_prompt.columns[0], cache.qtsplus_prompt.columns[2])


def test_two_conversations_in_turn():
    """Each cache knows its own prompt, whatever the model has read since."""
    model = tiny_model()
    prompts = [batch(row) for row in ROWS]
    caches = [new_cache(model) for _ in prompts]
    wanted = [by_generate(model, inputs) for inputs in prompts]
    with torch.no_grad():
        for inputs, cache in zip(prompts, caches, strict=True):
            model(**inputs, past_key_values=cache)
        for inputs, cache, (expected, ids) in zip(prompts, caches, wanted, strict=True):
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
            output = model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache)
            torch.testing.assert_close(output.logits[:, 0], expected[:, 1], atol=1e-4, rtol=1e-4)


def test_a_loop_behind_generate():
    model, inputs = tiny_model(), batch(*ROWS[:2])
    expected, ids = by_generate(model, inputs)
    cache = new_cache(model)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    with torch.no_grad():
        output = model(input_ids=ids[:, 1:2], attention_mask=mask, past_key_values=cache)
    torch.testing.assert_close(output.logits[:, 0], expected[:, 2], atol=1e-4, rtol=1e-4)


def test_a_cache_that_is_filled_anew_forgets_the_prompt():
    model, inputs = tiny_model(), batch(ROWS[0])
    cache = StaticCache(model.config.get_text_config(), 128)
    text = batch(ROWS[2])
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        cache.reset()
        model(**text, past_key_values=cache)
        mask = torch.nn.functional.pad(text["attention_mask"], (0, 1), value=1)
        output = model(input_ids=torch.tensor([[30]]), attention_mask=mask, past_key_values=cache)
        longer = {"input_ids": torch.nn.functional.pad(text["input_ids"], (0, 1), value=30), "attention_mask": mask}
        expected = model(**longer).logits[:, -1:]
    torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attention_mask": torch.ones(1, 7)}, r"attention_mask \(1, 7\) behind a cache .* output\.qtsplus\.columns"),
        ({"position_ids": torch.zeros(1, 9, dtype=torch.long)}, r"position_ids \(1, 9\) for 1 columns .*columns"),
        ({"past_key_values": ((torch.zeros(1), torch.zeros(1)),)}, "is a tuple: expected a Cache of Transformers"),
        ({"past_key_values": {}}, "is a dict: expected a Cache of Transformers"),
        ({"past_key_values": 7}, "is a int: expected a Cache of Transformers"),
    ],
    ids=["mask", "positions", "tuple", "dict", "number"],
)
def test_what_fits_no_width_and_what_is_no_cache_is_named(call, message):
    model = tiny_model()
    cache = new_cache(model)
    with torch.no_grad():
        model(**batch(ROWS[0]), past_key_values=cache)
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": torch.tensor([[30]]), "past_key_values": cache, **call})
    if "past_key_values" in call:
        for inputs in (batch(ROWS[0]), batch(ROWS[2])):
            with pytest.raises(ValueError, match=message):
                model.generate(**inputs, **call, max_new_tokens=2)
