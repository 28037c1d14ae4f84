"""What Transformers asks of every model of its own, asked of ours: generation."""

from functools import partial

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    StaticCache,
)
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from model_checks import NEW, TRANSFORMERS, greedy, mixed_inputs, shared_model
from tiny import IM_END, IM_START, NEWLINE, USER, VIDEO_PAD, assert_same, batch, prompt, tiny_model

CACHES = (
    "none",
    "dynamic",
    "dynamic_full",
    "static",
    "sliding_window",
    "offloaded",
    "offloaded_static",
)


@pytest.mark.parametrize("kind", CACHES)
def test_every_kind_of_cache_generates_the_same(kind):
    if "offloaded" in kind and not torch.cuda.is_available():
        pytest.skip("stock offloads to the CPU from an accelerator")
    if kind not in ("none", *ALL_CACHE_IMPLEMENTATIONS):
        pytest.skip("unknown to this version of Transformers")
    call = {"use_cache": False} if kind == "none" else {"cache_implementation": kind}
    assert_same(greedy(**call), greedy())


@pytest.mark.parametrize("make", [DynamicCache, partial(StaticCache, max_cache_len=200)])
def test_a_cache_of_the_callers_own_is_filled_with_the_shortened_prompt(make):
    cache = make(config=shared_model().config.get_text_config())
    output = greedy(past_key_values=cache, return_dict_in_generate=True)
    assert_same(output.sequences, greedy())
    width = output.qtsplus.columns.shape[1]
    assert cache.get_seq_length() == width + NEW - 1


def test_generate_returns_scores_logits_hidden_states_and_attentions_as_stock_does():
    model = tiny_model()
    inputs = mixed_inputs()
    model.set_attn_implementation("eager")
    output = greedy(
        model,
        inputs,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    width = output.qtsplus.columns.shape[1]
    for step in range(NEW):
        new = width if step == 0 else 1
        hidden_states = output.hidden_states[step]
        attentions = output.attentions[step]
        assert output.logits[step].shape == (3, 512)
        assert [states.shape for states in hidden_states] == [(3, new, 64)] * 3
        assert [weights.shape for weights in attentions] == [(3, 4, new, width + step)] * 2
    assert_same(torch.stack(output.scores, 1).argmax(-1), output.sequences[:, -NEW:])


@pytest.mark.parametrize(
    "row",
    [
        {"videos": [(3, 4, 6)], "images": [(1, 4, 4)]},
        {"question": 7},
    ],
    ids=["video", "text"],
)
@pytest.mark.parametrize("seed", [0, 5])
def test_assisted_decoding_with_a_copy_or_another_model_is_greedy(seed, row):
    model = shared_model()
    inputs = batch(prompt(**row))
    assisted = greedy(model, inputs, assistant_model=tiny_model(seed=seed))
    assert_same(assisted, greedy(model, inputs))


CONTINUED = {
    "texts": ({}, {}),
    "images": ({"images": [(1, 4, 4), (1, 8, 4)]}, {}),
    "a video, whole": ({"videos": [(2, 4, 6)]}, {"selection": "all"}),
}


@pytest.mark.parametrize("position_ids", ["original", "sequential"])
@pytest.mark.parametrize("kind", CONTINUED)
def test_a_cache_from_which_nothing_was_dropped_is_continued(kind, position_ids):
    visual, call = CONTINUED[kind]
    model = tiny_model(position_ids=position_ids, reencode_layers=0)
    inputs = batch(prompt(**visual, question=5), prompt(question=20, seed=2))
    cache = DynamicCache(config=model.config.get_text_config())
    begun = greedy(model, inputs, past_key_values=cache, **call)
    greedy(model, batch(prompt(images=[(1, 8, 8)])))  # another conversation in between
    next_turn = torch.tensor([[IM_END, NEWLINE, IM_START, USER, 40, 41, 42]])
    ids = torch.cat([begun, next_turn.expand(2, -1)], dim=1)
    new = ids.shape[1] - inputs["input_ids"].shape[1]
    conversation = {
        "input_ids": ids,
        "attention_mask": nn.functional.pad(inputs["attention_mask"], (0, new), value=1),
    }
    scores = {
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    expected = greedy(model, {**inputs, **conversation}, **call, **scores)
    continued = greedy(model, conversation, past_key_values=cache, **scores)
    assert_same(continued.sequences, expected.sequences)
    assert_close(continued.logits, expected.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("whole", [True, False], ids=["conversation", "only what is new"])
def test_a_continued_conversation_brings_no_new_video(whole):
    model = shared_model()
    inputs = batch(prompt(question=5))
    cache = DynamicCache(config=model.config.get_text_config())
    begun = greedy(model, inputs, past_key_values=cache)
    ids = torch.tensor([[VIDEO_PAD, 40]])
    if whole:
        ids = torch.cat([begun, ids], dim=1)
    with pytest.raises(ValueError, match="video placeholders, but no video pixels"):
        model.generate(input_ids=ids, past_key_values=cache)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_that_is_prefilled_in_chunks_generates_the_same(chunk):
    if Version("5.23") > TRANSFORMERS:
        with pytest.raises(ValueError, match="needs Transformers 5.23 or later"):
            greedy(prefill_chunk_size=chunk)
    else:
        assert_same(greedy(prefill_chunk_size=chunk), greedy())


def test_generate_does_not_change_the_generation_config_or_the_inputs():
    model = tiny_model()
    inputs = mixed_inputs()
    settings = model.generation_config.to_dict()
    width = inputs["input_ids"].shape[1]
    model.generate(**inputs, max_length=width + 3)
    assert model.generation_config.to_dict() == settings
    assert_same(inputs, mixed_inputs())


def test_generate_in_training_mode_uses_the_gate_of_inference():
    model = tiny_model(gate="gumbel")
    inputs = mixed_inputs()
    expected = greedy(model, inputs)
    history = model.model.qtsplus.rho_history.clone()
    model.train()
    assert_same(greedy(model, inputs), expected)
    assert_same(model.model.qtsplus.rho_history, history)


def test_continuous_batching_is_refused():
    ids = prompt(question=6).ids
    with pytest.raises(ValueError, match="Continuous batching has no place for images and videos"):
        shared_model().generate_batch([ids])
