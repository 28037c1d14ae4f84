"""A caller's own decoding loop: a cache of the shortened prompt beside masks and positions of the full width."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import StaticCache

from own_loop import (
    STEPS,
    answered,
    cached_columns,
    check_two_calls,
    close,
    full_width,
    longer,
    new_cache,
    prefill,
    step,
)
from qtsplus.model.prompt_qtsplus import CACHE
from tiny import ASSISTANT, IM_END, IM_START, NEWLINE, USER, batch, prompt, run, tiny_model

VIDEO = prompt(
    videos=[(2, 4, 6)],
    question=4,
    seed=1,
    seconds=2.0,
)
OTHER_VIDEO = prompt(
    videos=[(3, 4, 10)],
    question=9,
    seed=3,
    seconds=0.5,
)
TEXT = prompt(question=25, seed=2)
ROWS = (VIDEO, OTHER_VIDEO, TEXT)


def answer_to(model, *rows):
    return answered(model, batch(*rows))


def static_cache(model):
    return StaticCache(model.config.get_text_config(), 128)


def ones(mask, output):
    width = output[CACHE].get_seq_length()
    return torch.ones(len(mask), width)


def no_mask(mask, output):
    return None


@pytest.mark.parametrize("position_ids", ["original", "sequential"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", [full_width, cached_columns, ones, no_mask])
def test_a_loop_gives_what_generate_gives(mask, attention, position_ids):
    model = tiny_model(position_ids=position_ids)
    model.set_attn_implementation(attention)
    answer_to(model, *ROWS).check_loop(mask)


@pytest.mark.parametrize("make_cache", [new_cache, static_cache])
def test_with_the_callers_own_cache_and_only_the_last_logits(model, make_cache):
    answer_to(model, *ROWS).check_loop(full_width, make_cache(model), logits_to_keep=1)


@pytest.mark.parametrize("width", ["none", "new", "full"])
def test_several_columns_at_a_time_and_positions_of_the_full_width(model, width):
    answer = answer_to(model, VIDEO)
    cache = prefill(model, answer.inputs)
    first = cache.get_seq_length() + cache.qtsplus_prompt.rope_deltas.item()
    count = STEPS - 1
    positions = torch.arange(first, first + count)[None]
    if width == "none":
        positions = None
    elif width == "full":
        of_prompt = torch.zeros_like(answer.inputs["input_ids"])
        positions = torch.cat([of_prompt, positions], dim=1)
    ids = answer.ids[:, :count]
    logits = step(model, cache, ids, answer.mask(count), position_ids=positions)
    close(logits, answer.logits[:, 1:])


def repeat_twice(cache, rows):
    cache.batch_repeat_interleave(2)


def repeat_and_reorder(cache, rows):
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(rows * 2)


def reorder(cache, rows):
    cache.reorder_cache(rows)


def select(cache, rows):
    cache.batch_select_indices(rows)


ORDERS = {
    "repeated as beams are": ([0, 0, 1, 1, 2, 2], repeat_twice),
    "reordered": ([2, 0, 1], reorder),
    "selected": ([2, 1], select),
    "repeated and reordered": ([2, 2, 0, 1, 1, 0], repeat_and_reorder),
}


@pytest.mark.parametrize(("numbers", "change"), ORDERS.values(), ids=ORDERS)
def test_rows_that_change_between_prompts(model, numbers, change):
    answer = answer_to(model, *ROWS)
    rows = torch.tensor(numbers)
    cache = prefill(model, answer.inputs)
    changed = pickle.loads(pickle.dumps(cache))
    change(changed, rows)
    mask = answer.mask()
    logits = step(model, changed, answer.ids[rows, :1], mask[rows])
    close(logits[:, 0], answer.logits[rows, 1])
    answer.check_second_token(cache, mask)


def test_two_conversations_in_turn(model):
    """Each cache knows its own prompt, whatever the model has read since."""
    answers = [answer_to(model, row) for row in ROWS]
    caches = [prefill(model, answer.inputs) for answer in answers]
    for answer, cache in zip(answers, caches, strict=True):
        answer.check_second_token(cache, answer.mask())


def test_a_loop_behind_generate(model):
    answer = answer_to(model, VIDEO, OTHER_VIDEO)
    cache = new_cache(model)
    model.generate(
        **answer.inputs,
        past_key_values=cache,
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
    )
    logits = step(model, cache, answer.ids[:, 1:2], answer.mask(2))
    close(logits[:, 0], answer.logits[:, 2])


def test_a_cache_that_is_filled_anew_forgets_the_prompt(model):
    cache = static_cache(model)
    prefill(model, batch(VIDEO), cache)
    cache.reset()
    answer = answer_to(model, TEXT)
    prefill(model, answer.inputs, cache)
    answer.check_second_token(cache, answer.mask())


def test_a_cropped_prompt_is_refused(model):
    cache = prefill(model, batch(*ROWS))
    width = cache.get_seq_length()
    cache.crop(-2)
    message = f"holds {width - 2} columns of a prompt of {width} with images or videos"
    with pytest.raises(ValueError, match=message):
        step(model, cache, torch.tensor([[30]] * len(ROWS)), None)


def rebuilt(cache):
    """A copy of a cache's keys and values, as a caller may make it."""
    copied = DynamicCache()
    for number, layer in enumerate(cache.layers):
        copied.update(layer.keys, layer.values, number)
    return copied


def test_a_rebuilt_cache_of_a_video_needs_the_positions(model):
    answer = answer_to(model, VIDEO)
    cache = prefill(model, answer.inputs)
    width = cache.get_seq_length()
    mask = torch.ones(1, width + 1)
    with pytest.raises(ValueError, match="not one that forward returned.*qtsplus.columns, or the position_ids"):
        answer.check_second_token(rebuilt(cache), mask)
    position_ids = width + cache.qtsplus_prompt.rope_deltas
    answer.check_second_token(rebuilt(cache), mask, position_ids=position_ids)


def test_a_rebuilt_cache_of_text(model):
    answer = answer_to(model, TEXT)
    cache = rebuilt(prefill(model, answer.inputs))
    with pytest.raises(ValueError, match="behind a cache of .* columns: expected"):
        answer.check_second_token(cache, answer.mask(3))
    answer.check_second_token(cache, answer.mask())


@pytest.mark.parametrize("make_cache", [new_cache, lambda model: None])
def test_a_cache_of_text_is_known_after_a_video(model, make_cache):
    answer = answer_to(model, TEXT)
    output = run(model, answer.inputs, past_key_values=make_cache(model), use_cache=True)
    prefill(model, batch(VIDEO))
    answer.check_second_token(copy.deepcopy(output[CACHE]), None)


# --- Prompts and conversations in several calls ---

AFTER_QUESTION = [IM_END, NEWLINE, IM_START, ASSISTANT, NEWLINE]
BEFORE_QUESTION = [IM_END, NEWLINE, IM_START, USER, NEWLINE]
USER_TURN = [*BEFORE_QUESTION, 31, 32, *AFTER_QUESTION]


@pytest.mark.parametrize("count", range(2, len(AFTER_QUESTION) + 1))
def test_a_prompt_may_be_cut_behind_its_question(model, count):
    check_two_calls(model, batch(*ROWS), count)


def test_a_question_may_be_cut_where_all_tokens_are_kept(model):
    check_two_calls(model, batch(*ROWS), 8, selection="all")


@pytest.mark.parametrize("answered", [0, 3], ids=["at once", "after an answer"])
def test_another_users_turn_is_refused_where_tokens_were_dropped(model, answered):
    answer = answer_to(model, VIDEO)
    cache = prefill(model, answer.inputs)
    for number in range(answered):
        count = number + 1
        step(model, cache, answer.ids[:, number:count], answer.mask(count))
    turn = torch.tensor([USER_TURN])
    mask = answer.mask(answered + len(USER_TURN))
    with pytest.raises(ValueError, match="Expected the whole conversation in one call without a cache"):
        step(model, cache, turn, mask)


def with_turn(row, turn):
    """The inputs of a row with a turn behind it."""
    inputs = batch(row)
    ids = torch.tensor([turn])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], ids], dim=1)
    inputs["attention_mask"] = longer(inputs["attention_mask"], len(turn))
    return inputs


def test_another_users_turn_where_all_tokens_are_kept(model):
    check_two_calls(model, with_turn(VIDEO, USER_TURN), len(USER_TURN), selection="all")


def test_a_tools_response_is_no_question():
    model = tiny_model()
    model.config.tool_response_token_ids = [[40], [41]]
    turn = [*BEFORE_QUESTION, 40, 33, 34, 41, *AFTER_QUESTION]
    check_two_calls(model, with_turn(VIDEO, turn), len(turn))


def test_a_mask_that_fits_no_width_is_named(model):
    cache = prefill(model, batch(VIDEO))
    message = r"attention_mask \(1, 7\) behind a cache .* output\.qtsplus\.columns"
    with pytest.raises(ValueError, match=message):
        step(model, cache, torch.tensor([[30]]), torch.ones(1, 7))


@pytest.mark.parametrize("row", [VIDEO, TEXT], ids=["a video", "text"])
@pytest.mark.parametrize(
    "cache",
    [
        ((torch.zeros(1), torch.zeros(1)),),
        {},
        7,
    ],
    ids=["tuple", "dict", "int"],
)
def test_what_is_no_cache_is_named(model, cache, row):
    name = type(cache).__name__
    message = f"is a {name}: expected a Cache of Transformers"
    for call in (model, model.generate):
        with pytest.raises(ValueError, match=message):
            call(**batch(row), past_key_values=cache)
