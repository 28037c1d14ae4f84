"""What stands for the words of a question: their embeddings, or their states behind a layer of the selector."""

import pytest
import torch
from torch.testing import assert_close

from model_checks import mixed_inputs, mixed_rows, question_mask
from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.hub.files import hub_configs
from tiny import IM_END, USER, VIDEO_PAD, assert_same, batch, prompt, run, tiny_model

VIDEO = (2, 4, 8)


@pytest.fixture(scope="module")
def model():
    """Whose questions a layer reads; the words' embeddings are what most other tests select by."""
    return tiny_model(query_states="layer")


def seen(model, inputs, **call):
    """The questions that the selector is given, per row `[L, d]`, and what the model makes of the call."""
    given = []
    hook = model.model.qtsplus.register_forward_pre_hook(lambda _, args: given.append(args[1]))
    output = run(model, inputs, **call)
    hook.remove()
    return given[0], output


# What the states are -------------------------------------------------------------------------------------------------


def test_an_earlier_answer_changes_nothing_of_what_is_asked(model):
    """Two conversations that differ in an earlier answer; the last question is the same."""
    row, other = (prompt(videos=[VIDEO], turns=1) for _ in range(2))
    at = row.ids.index(IM_END, row.ids.index(VIDEO_PAD))  # behind the first question
    other.ids[at + 6] += 1
    (first,), one = seen(model, batch(row))
    (second,), changed = seen(model, batch(other))
    assert_same(first, second)
    assert_same(one.qtsplus.relevance[0], changed.qtsplus.relevance[0])


def test_words_of_a_layer_see_each_other_and_their_order(model):
    row = batch(prompt(videos=[VIDEO], question=4))
    plain = row["input_ids"]
    layer = model.model.qtsplus.question_layers[0]
    swapped = plain.clone()
    last = int((plain[0] == IM_END).nonzero()[-1])
    swapped[0, [last - 1, last - 2]] = plain[0, [last - 2, last - 1]]
    given = []
    hook = layer.register_forward_hook(lambda _, __, states: given.append(states))
    with torch.no_grad():
        for ids in (plain, swapped):
            model(**{**row, "input_ids": ids})
    hook.remove()
    assert (given[0][[0, 1, 3, 2]] - given[1]).abs().max() > 1e-3  # else each word would take its state along
    assert (given[0][0] - given[1][0]).abs().max() > 1e-3


# The contracts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("mask", ["found", "given", "apart"])
def test_batch_is_single(model, pad_left, mask):
    """However the question is told: found in the prompt, marked there, or apart from it."""
    rows = [*mixed_rows(), prompt(videos=[VIDEO], turns=2, seed=7)]

    def inputs(rows, indices):
        made = batch(*rows, pad_left=pad_left)
        if mask == "given":
            made["query_mask"] = question_mask(model, made)
        if mask == "apart":
            width = 3 + max(indices)
            made["query_input_ids"] = torch.tensor([[40 + i + at for at in range(width)] for i in indices])
            made["query_attention_mask"] = torch.tensor([[1] * (3 + i) + [0] * (width - 3 - i) for i in indices])
        return made

    states, together = seen(model, inputs(rows, range(len(rows))))
    for index, row in enumerate(rows):
        (own,), alone = seen(model, inputs([row], [index])) if row.videos else ((None,), None)
        if alone is None:
            continue
        assert_close(states[index], own, atol=1e-5, rtol=1e-5)
        real = together.qtsplus.columns[index] >= 0
        assert_close(together.logits[index][real], alone.logits[0], atol=1e-4, rtol=1e-4)
        assert_same(together.qtsplus.kept_indices[index], alone.qtsplus.kept_indices[0])


# A question that does not stand in the prompt ------------------------------------------------------------------------


def test_a_question_apart_takes_the_place_of_the_prompts_own_or_of_none(model):
    inputs = batch(prompt(videos=[VIDEO], turns=1, question=6))
    own = inputs["input_ids"][question_mask(model, inputs).bool()]
    _, expected = seen(model, inputs)
    _, output = seen(model, inputs, query_input_ids=own[None])
    assert_same(output.qtsplus.relevance[0], expected.qtsplus.relevance[0])
    others = torch.tensor([[77, 78]])
    for _ in range(2):
        (states,), _ = seen(model, inputs, query_input_ids=others)
        assert_same(states, model.get_input_embeddings()(others[0]))
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == USER, 33)  # no question is left


def test_a_mask_of_the_callers_own(model):
    inputs = batch(prompt(videos=[VIDEO], question=6))
    mask = question_mask(model, inputs)
    (whole,), _ = seen(model, inputs)
    mask[0, mask[0].nonzero()[[0, 2, 3], 0]] = 0
    (states,), _ = seen(model, inputs, query_mask=mask)
    assert_same(states, whole[[1, 4, 5]])


# Parameters ----------------------------------------------------------------------------------------------------------


def published_size(name, **selector):
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / name)
    for field, value in selector.items():
        setattr(config.qtsplus_config, field, value)
    with torch.device("meta"):
        model = Qwen2_5_VLQTSplusForConditionalGeneration(config)
    return sum(parameter.numel() for parameter in model.model.qtsplus.parameters())


def test_only_a_layer_has_parameters_of_its_own():
    for name, paper, layer in (("qtsplus-3b", 129_557_249, 43_010_560), ("qtsplus-7b", 397_380_353, 132_153_856)):
        assert published_size(name) == paper
        assert published_size(name, query_states="layer") == paper + layer


def test_a_fresh_layer_changes_nothing():
    plain = tiny_model()
    fresh = Qwen2_5_VLQTSplusForConditionalGeneration(tiny_model(query_states="layer").config).eval()
    expected = seen(plain, mixed_inputs())[1].qtsplus
    fresh.load_state_dict({k: v for k, v in plain.state_dict().items() if ".reencode_layers." not in k}, strict=False)
    output = seen(fresh, mixed_inputs())[1].qtsplus
    for one, other in zip(output.log_relevance, expected.log_relevance, strict=True):
        assert_close(one, other, atol=1e-6, rtol=1e-6)


# Saving and bad settings ---------------------------------------------------------------------------------------------
