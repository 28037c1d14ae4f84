"""What stands for the words of a question: their embeddings, or their states behind a layer of the selector."""

import pytest
import torch
from torch.testing import assert_close

from model_checks import assert_row_is_alone, mixed_inputs, mixed_rows, question_mask
from qtsplus import Qwen2_5_VLQTSplusConfig, Qwen2_5_VLQTSplusForConditionalGeneration
from qtsplus.hub.files import hub_configs
from tiny import IM_END, USER, VIDEO_PAD, assert_same, batch, prompt, run, tiny_model

VIDEO = (2, 4, 8)


@pytest.fixture(scope="module")
def model():
    """A layer reads its questions; most other tests select by the words' embeddings."""
    return tiny_model(query_states="layer")


def seen(model, inputs, **call):
    """The questions that the selector is given, per row `[L, d]`, and what the model makes of the call."""
    given = []

    def note(module, args):
        given.append(args[1])

    hook = model.model.qtsplus.register_forward_pre_hook(note)
    output = run(model, inputs, **call)
    hook.remove()
    return given[0], output


# What the states are -------------------------------------------------------------------------------------------------


def test_an_earlier_answer_changes_nothing_of_what_is_asked(model):
    """Two conversations that differ in an earlier answer; the last question is the same."""
    row = prompt(videos=[VIDEO], turns=1)
    other = prompt(videos=[VIDEO], turns=1)
    end_of_first_question = row.ids.index(IM_END, row.ids.index(VIDEO_PAD))
    other.ids[end_of_first_question + 6] += 1
    states, output = seen(model, batch(row))
    other_states, other_output = seen(model, batch(other))
    assert_same(other_states, states)
    assert_same(other_output.qtsplus.relevance, output.qtsplus.relevance)


def test_words_of_a_layer_see_each_other_and_their_order(model):
    inputs = batch(prompt(videos=[VIDEO], question=4))
    states = []

    def note(module, args, output):
        states.append(output)

    (layer,) = model.model.qtsplus.question_layers
    hook = layer.register_forward_hook(note)
    run(model, inputs)
    (ids,) = inputs["input_ids"]
    end = (ids == IM_END).nonzero()[-1].item()
    ids[end - 2 : end] = ids[end - 2 : end].flip(0)
    run(model, inputs)
    hook.remove()
    plain, swapped = states
    moved = plain[[0, 1, 3, 2]] - swapped
    assert moved.abs().max() > 1e-3, "else each word would take its state along"
    of_first_word = plain[0] - swapped[0]
    assert of_first_word.abs().max() > 1e-3


# The contracts -------------------------------------------------------------------------------------------------------


def without(model, inputs, indices):
    """The question is found in the prompt."""
    return {}


def marked(model, inputs, indices):
    return {"query_mask": question_mask(model, inputs)}


def apart(model, inputs, indices):
    """Questions of three words and more."""
    rows = torch.tensor(indices)[:, None]
    lengths = 3 + rows
    columns = torch.arange(lengths.max())
    return {
        "query_input_ids": 40 + rows + columns,
        "query_attention_mask": (columns < lengths).long(),
    }


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("question", [without, marked, apart])
def test_batch_is_single(model, pad_left, question):
    in_a_conversation = prompt(videos=[VIDEO], turns=2, seed=7)
    rows = [*mixed_rows(), in_a_conversation]
    inputs = batch(*rows, pad_left=pad_left)
    questions = question(model, inputs, range(len(rows)))
    states, together = seen(model, inputs, **questions)
    for index, row in enumerate(rows):
        if not row.videos:
            continue
        inputs = batch(row)
        (own,), alone = seen(model, inputs, **question(model, inputs, [index]))
        assert_close(states[index], own, atol=1e-5, rtol=1e-5)
        assert_row_is_alone(together, index, alone)


# A question that does not stand in the prompt ------------------------------------------------------------------------


def test_a_question_apart_takes_the_place_of_the_prompts_own_or_of_none(model):
    inputs = batch(prompt(videos=[VIDEO], turns=1, question=6))
    ids = inputs["input_ids"]
    is_question = question_mask(model, inputs).bool()
    own = ids[is_question]
    _, expected = seen(model, inputs)
    _, output = seen(model, inputs, query_input_ids=own[None])
    assert_same(output.qtsplus.relevance, expected.qtsplus.relevance)
    others = torch.tensor([[77, 78]])
    embeddings = model.get_input_embeddings()(others[0])
    for prompt_ids in (ids, ids.masked_fill(ids == USER, 33)):
        inputs["input_ids"] = prompt_ids
        (states,), _ = seen(model, inputs, query_input_ids=others)
        assert_same(states, embeddings)


def test_a_mask_of_the_callers_own(model):
    inputs = batch(prompt(videos=[VIDEO], question=6))
    mask = question_mask(model, inputs)
    (whole,), _ = seen(model, inputs)
    words = mask[0].nonzero()[:, 0]
    mask[0, words[[0, 2, 3]]] = 0
    (states,), _ = seen(model, inputs, query_mask=mask)
    assert_same(states, whole[[1, 4, 5]])


# Parameters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "query_states", "parameters"),
    [
        ("qtsplus-3b", "embeddings", 129_557_249),
        ("qtsplus-3b", "layer", 129_557_249 + 43_010_560),
        ("qtsplus-7b", "embeddings", 397_380_353),
        ("qtsplus-7b", "layer", 397_380_353 + 132_153_856),
    ],
)
def test_only_a_layer_has_parameters_of_its_own(variant, query_states, parameters):
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / variant)
    config.qtsplus_config.query_states = query_states
    with torch.device("meta"):
        model = Qwen2_5_VLQTSplusForConditionalGeneration(config)
    sizes = [parameter.numel() for parameter in model.model.qtsplus.parameters()]
    assert sum(sizes) == parameters


def test_a_fresh_layer_changes_nothing():
    plain = tiny_model()
    config = tiny_model(query_states="layer").config
    fresh = Qwen2_5_VLQTSplusForConditionalGeneration(config).eval()
    weights = plain.state_dict()
    for name in list(weights):
        if ".reencode_layers." in name:
            del weights[name]
    fresh.load_state_dict(weights, strict=False)
    inputs = mixed_inputs()
    expected = run(plain, inputs).qtsplus
    output = run(fresh, inputs).qtsplus
    assert_close(output.log_relevance, expected.log_relevance, atol=1e-6, rtol=1e-6)
