"""A caller's own decoding loop: a cache of the shortened prompt beside masks and positions of the full width."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache
from transformers.cache_utils import StaticCache

from qtsplus.model.prompt_qtsplus import CACHE
from tiny import ASSISTANT, IM_END, IM_START, NEWLINE, USER, assert_same, batch, prompt, tiny_model

STEPS = 5
ROWS = (
    prompt(videos=[(2, 4, 6)], question=4, seed=1, seconds=2.0),
    prompt(videos=[(3, 4, 10)], question=9, seed=3, seconds=0.5),
    prompt(question=25, seed=2),
)


def new_cache(model):
    return DynamicCache(config=model.config.get_text_config())


def static_cache(model):
    return StaticCache(model.config.get_text_config(), 128)


def by_generate(model, inputs):
    """The logits of every step, `[B, STEPS, vocabulary]`, and the new ids, `[B, STEPS]`."""
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    result = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    return torch.stack(result.logits, dim=1), result.sequences[:, -STEPS:]


@torch.no_grad()
def prefill(model, inputs, cache=None):
    """A cache that holds the prompts."""
    cache = new_cache(model) if cache is None else cache
    model(**inputs, past_key_values=cache)
    return cache


@torch.no_grad()
def step(model, cache, ids, mask, **call):
    """The logits of new ids behind a cache, `[B, new, vocabulary]`."""
    return model(input_ids=ids, attention_mask=mask, past_key_values=cache, **call).logits


def longer(mask, count=1):
    """A mask with columns for new tokens."""
    return torch.nn.functional.pad(mask, (0, count), value=1)


@torch.no_grad()
def by_hand(model, inputs, ids, next_mask, cache=None, **call):
    """The logits of the same steps, with the mask `[B, width]` that `next_mask` makes of the prompt's."""
    output = model(**inputs, past_key_values=cache, use_cache=True)
    mask = next_mask(inputs["attention_mask"], output)
    logits = [output.logits[:, -1]]
    for number in range(STEPS - 1):
        if mask is not None:
            mask = longer(mask)
        new = step(model, output[CACHE], ids[:, number : number + 1], mask, **call)
        logits.append(new[:, -1])
    return torch.stack(logits, dim=1)


def close(logits, expected):
    assert_close(logits, expected, atol=1e-4, rtol=1e-4)


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
    model = tiny_model(position_ids=position_ids)
    model.set_attn_implementation(attention)
    inputs = batch(*ROWS)
    expected, ids = by_generate(model, inputs)
    close(by_hand(model, inputs, ids, MASKS[mask]), expected)


@pytest.mark.parametrize("mask", ["the full prompt's", "the cached columns'"])
def test_at_full_length_too(mask):
    model = tiny_model()
    inputs = batch(*ROWS)
    expected, ids = by_generate(model, inputs)
    model.model.full_length = True
    close(by_hand(model, inputs, ids, MASKS[mask]), expected)


@pytest.mark.parametrize("make_cache", [new_cache, static_cache])
def test_with_the_callers_own_cache_and_only_the_last_logits(make_cache):
    model = tiny_model()
    inputs = batch(*ROWS)
    expected, ids = by_generate(model, inputs)
    cache = make_cache(model)
    close(by_hand(model, inputs, ids, MASKS["the full prompt's"], cache, logits_to_keep=1), expected)


@pytest.mark.parametrize("width", ["none", "new", "full"])
def test_several_columns_at_a_time_and_positions_of_the_full_width(width):
    model = tiny_model()
    inputs = batch(ROWS[0])
    expected, ids = by_generate(model, inputs)
    cache = prefill(model, inputs)
    first = cache.get_seq_length() + int(cache.qtsplus_prompt.rope_deltas)
    new = torch.arange(first, first + STEPS - 1)[None]
    of_prompt = torch.zeros_like(inputs["input_ids"])
    position_ids = {"none": None, "new": new, "full": torch.cat([of_prompt, new], dim=1)}[width]
    mask = longer(inputs["attention_mask"], STEPS - 1)
    close(step(model, cache, ids[:, :-1], mask, position_ids=position_ids), expected[:, 1:])


ORDERS = {
    "repeated as beams are": ([0, 0, 1, 1, 2, 2], lambda cache, rows: cache.batch_repeat_interleave(2)),
    "reordered": ([2, 0, 1], lambda cache, rows: cache.reorder_cache(rows)),
    "selected": ([2, 1], lambda cache, rows: cache.batch_select_indices(rows)),
    "repeated and reordered": (
        [2, 2, 0, 1, 1, 0],
        lambda cache, rows: (cache.batch_repeat_interleave(2), cache.reorder_cache(rows * 2)),
    ),
}


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_change_between_prompts(order, copies):
    model = tiny_model()
    inputs = batch(*ROWS)
    expected, ids = by_generate(model, inputs)
    numbers, change = ORDERS[order]
    rows = torch.tensor(numbers)
    mask = longer(inputs["attention_mask"])
    cache = prefill(model, inputs)
    changed = copies(cache)
    change(changed, rows)
    close(step(model, changed, ids[rows, :1], mask[rows])[:, 0], expected[rows, 1])
    close(step(model, cache, ids[:, :1], mask)[:, 0], expected[:, 1])
    assert isinstance(changed, DynamicCache)


def test_beams_behind_generate_are_reordered():
    model = tiny_model()
    cache = new_cache(model)
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 2, "min_new_tokens": 2}
    model.generate(**batch(*ROWS[:2]), **options, past_key_values=cache)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    first, second, third, _ = cache.qtsplus_prompt.columns
    assert_same(first, second)
    assert not torch.equal(first, third)


def test_two_conversations_in_turn():
    """Each cache knows its own prompt, whatever the model has read since."""
    model = tiny_model()
    prompts = [batch(row) for row in ROWS]
    wanted = [by_generate(model, inputs) for inputs in prompts]
    caches = [prefill(model, inputs) for inputs in prompts]
    for inputs, cache, (expected, ids) in zip(prompts, caches, wanted, strict=True):
        close(step(model, cache, ids[:, :1], longer(inputs["attention_mask"]))[:, 0], expected[:, 1])


def test_a_loop_behind_generate():
    model = tiny_model()
    inputs = batch(*ROWS[:2])
    expected, ids = by_generate(model, inputs)
    cache = new_cache(model)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    close(step(model, cache, ids[:, 1:2], longer(inputs["attention_mask"], 2))[:, 0], expected[:, 2])


def test_a_cache_that_is_filled_anew_forgets_the_prompt():
    model = tiny_model()
    text = batch(ROWS[2])
    cache = prefill(model, batch(ROWS[0]), static_cache(model))
    cache.reset()
    prefill(model, text, cache)
    mask = longer(text["attention_mask"])
    new = torch.tensor([[30]])
    whole = torch.cat([text["input_ids"], new], dim=1)
    close(step(model, cache, new, mask), step(model, None, whole, mask)[:, -1:])


def padded_right(inputs):
    rows = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        rows.append(ids[mask.bool()])
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    mask = pad([torch.ones_like(row) for row in rows])
    return {**inputs, "input_ids": pad(rows), "attention_mask": mask}


def test_columns_behind_a_cropped_prompt_are_no_padding():
    """The cropped columns of some rows are padding on the right; those that come in their place are not."""
    model = tiny_model()
    cropped = prefill(model, padded_right(batch(*ROWS)))
    cropped.crop(-2)
    new = torch.tensor([[30, 31, 32, 33]] * len(ROWS))
    at_once = step(model, copy.deepcopy(cropped), new, None)
    step(model, cropped, new[:, :2], None)
    close(step(model, cropped, new[:, 2:], None), at_once[:, 2:])


def test_generate_goes_on_behind_a_cropped_prompt_that_lost_nothing():
    model = tiny_model()
    inputs = batch(ROWS[0])
    ids = inputs["input_ids"]
    expected, _ = by_generate(model, {**inputs, "selection": "all"})
    cache = prefill(model, {**inputs, "selection": "all"})
    cache.crop(-2)
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    output = model.generate(input_ids=ids, attention_mask=inputs["attention_mask"], past_key_values=cache, **options)
    close(output.logits[0], expected[:, 0])


def rebuilt(cache):
    """A copy of a cache's keys and values, as a caller may make it."""
    copied = DynamicCache()
    for number, layer in enumerate(cache.layers):
        copied.update(layer.keys, layer.values, number)
    return copied


def test_a_rebuilt_cache_of_a_video_needs_the_positions():
    model = tiny_model()
    inputs = batch(ROWS[0])
    expected, ids = by_generate(model, inputs)
    cache = prefill(model, inputs)
    width = cache.get_seq_length()
    mask = torch.ones(1, width + 1)
    with pytest.raises(ValueError, match="not one that forward returned.*qtsplus.columns, or the position_ids"):
        step(model, rebuilt(cache), ids[:, :1], mask)
    position_ids = width + cache.qtsplus_prompt.rope_deltas
    close(step(model, rebuilt(cache), ids[:, :1], mask, position_ids=position_ids)[:, 0], expected[:, 1])


def test_a_rebuilt_cache_of_text():
    model = tiny_model()
    text = batch(ROWS[2])
    expected, ids = by_generate(model, text)
    cache = rebuilt(prefill(model, text))
    with pytest.raises(ValueError, match="behind a cache of .* columns: expected"):
        step(model, cache, ids[:, :1], longer(text["attention_mask"], 3))
    close(step(model, cache, ids[:, :1], longer(text["attention_mask"]))[:, 0], expected[:, 1])


@pytest.mark.parametrize("own_cache", [True, False])
def test_a_cache_of_text_is_known_after_a_video(own_cache):
    model = tiny_model()
    text = batch(ROWS[2])
    expected, ids = by_generate(model, text)
    cache = new_cache(model) if own_cache else None
    with torch.no_grad():
        cache = model(**text, past_key_values=cache, use_cache=True)[CACHE]
    prefill(model, batch(ROWS[0]))
    close(step(model, copy.deepcopy(cache), ids[:, :1], None)[:, 0], expected[:, 1])


# --- Prompts and conversations in several calls ---

AFTER_QUESTION = [IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE]
USER_TURN = [IM_END, NEWLINE, IM_START, USER, NEWLINE, 31, 32, IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE]


def cut(inputs, count):
    """The prompts without their last columns."""
    shorter = {**inputs}
    for name in ("input_ids", "attention_mask"):
        shorter[name] = inputs[name][:, :-count]
    return shorter


@torch.no_grad()
def in_two_calls(model, inputs, count, **call):
    """The last logits of a prompt whose last `count` columns come in a second call."""
    cache = prefill(model, {**cut(inputs, count), **call})
    return step(model, cache, inputs["input_ids"][:, -count:], inputs["attention_mask"])[:, -1]


@torch.no_grad()
def in_one_call(model, inputs, **call):
    return model(**inputs, **call).logits[:, -1]


@pytest.mark.parametrize("words", [1, 3])
def test_a_question_that_is_cut_is_refused(words):
    model = tiny_model()
    for rows in (ROWS[:1], ROWS):
        with pytest.raises(ValueError, match="the new ids continue it or ask another"):
            in_two_calls(model, batch(*rows), len(AFTER_QUESTION) + words)


@pytest.mark.parametrize("count", range(2, len(AFTER_QUESTION) + 1))
def test_a_prompt_may_be_cut_behind_its_question(count):
    model = tiny_model()
    inputs = batch(*ROWS)
    close(in_two_calls(model, inputs, count), in_one_call(model, inputs))


def test_a_question_that_is_given_apart_may_be_cut_in_the_prompt():
    model = tiny_model()
    inputs = batch(*ROWS)
    query = {"query_input_ids": torch.tensor([[40, 41, 42]] * len(ROWS))}
    close(in_two_calls(model, inputs, 8, **query), in_one_call(model, inputs, **query))


def test_a_question_may_be_cut_where_all_tokens_are_kept():
    model = tiny_model()
    inputs = batch(*ROWS)
    close(in_two_calls(model, inputs, 8, selection="all"), in_one_call(model, inputs, selection="all"))


@pytest.mark.parametrize("answered", [0, 3], ids=["at once", "after an answer"])
def test_another_users_turn_is_refused_where_tokens_were_dropped(answered):
    model = tiny_model()
    inputs = batch(ROWS[0])
    _, ids = by_generate(model, inputs)
    cache = prefill(model, inputs)
    mask = inputs["attention_mask"]
    for number in range(answered):
        mask = longer(mask)
        step(model, cache, ids[:, number : number + 1], mask)
    turn = torch.tensor([USER_TURN])
    with pytest.raises(ValueError, match="Expected the whole conversation in one call without a cache"):
        step(model, cache, turn, longer(mask, len(USER_TURN)))


def with_turn(inputs, turn):
    whole = {**inputs, "attention_mask": longer(inputs["attention_mask"], len(turn))}
    whole["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([turn])], dim=1)
    return whole


def test_another_users_turn_where_all_tokens_are_kept():
    model = tiny_model()
    whole = with_turn({**batch(ROWS[0]), "selection": "all"}, USER_TURN)
    close(in_two_calls(model, whole, len(USER_TURN)), in_one_call(model, whole))


def test_a_tools_response_is_no_question():
    model = tiny_model()
    model.config.tool_response_token_ids = [[40], [41]]
    turn = [*USER_TURN[:5], 40, 33, 34, 41, *AFTER_QUESTION]
    whole = with_turn(batch(ROWS[0]), turn)
    close(in_two_calls(model, whole, len(turn)), in_one_call(model, whole))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attention_mask": torch.ones(1, 7)}, r"attention_mask \(1, 7\) behind a cache .* output\.qtsplus\.columns"),
        ({"position_ids": torch.zeros(1, 9, dtype=torch.long)}, r"position_ids \(1, 9\) for 1 columns .*columns"),
    ],
    ids=["mask", "positions"],
)
def test_what_fits_no_width_is_named(call, message):
    model = tiny_model()
    cache = prefill(model, batch(ROWS[0]))
    with pytest.raises(ValueError, match=message):
        model(input_ids=torch.tensor([[30]]), past_key_values=cache, **call)


@pytest.mark.parametrize("cache", [((torch.zeros(1), torch.zeros(1)),), {}, 7], ids=["tuple", "dict", "int"])
def test_what_is_no_cache_is_named(cache):
    model = tiny_model()
    for inputs in (batch(ROWS[0]), batch(ROWS[2])):
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=f"is a {type(cache).__name__}: expected a Cache of Transformers"):
                call(**inputs, past_key_values=cache)
