"""What Transformers asks of every model of its own, asked of ours: generation."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
)
from transformers.utils import is_optimum_quanto_available

from model_checks import (
    NEW,
    TRANSFORMERS,
    greedy,
    main_output,
    mixed_inputs,
    mixed_rows,
    shared_model,
)
from tiny import (
    EOS,
    IM_END,
    IM_START,
    NEWLINE,
    USER,
    batch,
    prompt,
    stock_twin,
    tiny_model,
)


@pytest.mark.parametrize(
    "implementation", ["dynamic", "dynamic_full", "static", "sliding_window", "offloaded", "offloaded_static"]
)
def test_every_kind_of_cache_generates_the_same(implementation):
    if "offloaded" in implementation and not torch.cuda.is_available():
        pytest.skip("stock offloads to the CPU from an accelerator")
    if implementation not in transformers.generation.configuration_utils.ALL_CACHE_IMPLEMENTATIONS:
        pytest.skip("unknown to this version of Transformers")
    assert torch.equal(greedy(cache_implementation=implementation), greedy())


@pytest.mark.skipif(not is_optimum_quanto_available(), reason="optimum-quanto is not installed")
def test_a_quantized_cache_generates():
    ids = greedy(cache_implementation="quantized", cache_config={"backend": "quanto", "nbits": 4})
    assert ids.shape == greedy().shape


def test_no_cache_generates_the_same():
    assert torch.equal(greedy(use_cache=False), greedy())


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_the_caller_made_generates_the_same(kind, name):
    config = shared_model().config.get_text_config()
    own = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=200)
    assert torch.equal(greedy(**{name: own}), greedy())
    assert int(own.get_seq_length()) > 0


def test_the_returned_cache_holds_the_shortened_prompt_and_all_but_the_last_new_token():
    output = greedy(return_dict_in_generate=True)
    assert output.past_key_values.get_seq_length() == output.qtsplus.columns.shape[1] + NEW - 1
    layer = output.past_key_values.layers[0]
    assert layer.keys.shape == layer.values.shape == (3, 2, output.qtsplus.columns.shape[1] + NEW - 1, 16)


def test_generate_returns_scores_logits_hidden_states_and_attentions_as_stock_does():
    model, inputs = tiny_model(), mixed_inputs()
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
    assert len(output.scores) == len(output.logits) == NEW
    assert all(tuple(one.shape) == (3, 512) for one in (*output.scores, *output.logits))
    for step in range(NEW):
        new, seen = (width, width) if step == 0 else (1, width + step)
        assert [tuple(h.shape) for h in output.hidden_states[step]] == [(3, new, 64)] * 3
        assert [tuple(a.shape) for a in output.attentions[step]] == [(3, 4, new, seen)] * 2
    assert torch.equal(torch.stack(output.scores, 1).argmax(-1), output.sequences[:, -NEW:])


def test_the_first_logits_of_generate_are_the_last_of_forward():
    model, inputs = shared_model(), mixed_inputs()
    output = greedy(return_dict_in_generate=True, output_logits=True)
    expected = main_output(model, inputs, logits_to_keep=1)[:, 0]
    assert (output.logits[0] - expected).abs().max() < 1e-4


def test_greedy_ids_are_those_of_a_loop_over_forward():
    """Decoding, against forward on the growing conversation."""
    model, row = shared_model(), prompt(videos=[(3, 4, 6)], seed=4)
    inputs = batch(row)
    ids = inputs["input_ids"]
    generated = greedy(model, inputs)
    question = torch.zeros_like(ids)
    question[0, -10:-5] = 1
    with_question = greedy(model, {**inputs, "query_mask": question})
    for _ in range(NEW):
        mask = torch.cat([question, question.new_zeros(1, ids.shape[1] - question.shape[1])], dim=1)
        call = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids), "query_mask": mask}
        ids = torch.cat([ids, next_token(main_output(model, call))], dim=1)
    assert torch.equal(with_question, ids)
    assert generated.shape == ids.shape


def next_token(logits):
    logits = logits[:, -1:].clone()
    logits[..., EOS] = -torch.inf
    return logits.argmax(-1)


@pytest.mark.parametrize("beams", [2, 4])
def test_beams_of_a_batch_are_those_of_each_row_alone(beams):
    inputs = mixed_inputs()
    together = greedy(inputs=inputs, num_beams=beams)[:, inputs["input_ids"].shape[1] :]
    for b, row in enumerate(mixed_rows()):
        alone = greedy(inputs=batch(row), num_beams=beams)[0, len(row.ids) :]
        assert torch.equal(together[b], alone)


def test_beams_return_their_scores_and_as_many_sequences_as_asked():
    inputs = mixed_inputs()
    output = greedy(num_beams=3, num_return_sequences=2, return_dict_in_generate=True, output_scores=True)
    assert output.sequences.shape == (6, inputs["input_ids"].shape[1] + NEW)
    assert output.sequences_scores.shape == (6,) and torch.isfinite(output.sequences_scores).all()
    repeated = inputs["input_ids"].repeat_interleave(2, dim=0)
    assert torch.equal(output.sequences[:, : repeated.shape[1]], repeated)


def test_sampling_with_a_seed_is_repeatable_and_returns_as_many_as_asked():
    model, inputs = shared_model(), mixed_inputs()
    samples = []
    for _ in range(2):
        torch.manual_seed(3)
        samples.append(model.generate(**inputs, do_sample=True, num_return_sequences=2, max_new_tokens=NEW))
    assert torch.equal(*samples) and len(samples[0]) == 6


def test_sampling_of_beams_runs():
    torch.manual_seed(0)
    ids = shared_model().generate(**mixed_inputs(), do_sample=True, num_beams=2, max_new_tokens=NEW)
    assert len(ids) == 3


def test_assisted_decoding_with_a_copy_of_the_model_is_greedy():
    model, inputs = tiny_model(), batch(prompt(videos=[(3, 4, 6)], images=[(1, 4, 4)]))
    assert torch.equal(greedy(model, inputs, assistant_model=copy.deepcopy(model)), greedy(model, inputs))


def test_assisted_decoding_with_another_model_is_greedy():
    model, inputs = tiny_model(), batch(prompt(videos=[(3, 4, 6)]))
    assert torch.equal(greedy(model, inputs, assistant_model=tiny_model(seed=5)), greedy(model, inputs))


def test_assisted_decoding_of_a_text_is_greedy():
    model, inputs = tiny_model(), batch(prompt(question=7))
    assert torch.equal(greedy(model, inputs, assistant_model=copy.deepcopy(model)), greedy(model, inputs))


def test_prompt_lookup_is_greedy():
    row = prompt(videos=[(3, 4, 6)], question=8)
    row.ids[-13:-5] = row.ids[-13:-9] * 2
    inputs = batch(row)
    assert torch.equal(greedy(inputs=inputs, prompt_lookup_num_tokens=3), greedy(inputs=inputs))


def test_embeddings_of_a_text_generate_what_its_ids_generate():
    model, inputs = shared_model(), batch(prompt(question=5), prompt(question=20, seed=2))
    width = inputs["input_ids"].shape[1]
    expected = greedy(model, inputs)[:, width:]
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    stock = greedy(stock_twin(model), {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]})
    assert torch.equal(stock, expected)
    ours = greedy(model, {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]})
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_that_is_prefilled_in_chunks_generates_the_same(chunk):
    if Version("5.23") > TRANSFORMERS:
        with pytest.raises(ValueError, match="needs Transformers 5.23 or later"):
            greedy(prefill_chunk_size=chunk)
    else:
        assert torch.equal(greedy(prefill_chunk_size=chunk), greedy())


def test_generate_passes_the_shortened_prompt_to_logits_processors():
    seen = []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(tuple(input_ids.shape))
            return scores

    output = greedy(logits_processor=LogitsProcessorList([Spy()]), return_dict_in_generate=True)
    width = output.qtsplus.columns.shape[1]
    assert seen == [(3, width + step) for step in range(NEW)]


def test_generate_refuses_an_argument_that_nobody_knows():
    with pytest.raises(ValueError, match="no_such_argument"):
        shared_model().generate(**mixed_inputs(), no_such_argument=1, max_new_tokens=2)


def test_a_further_turn_from_the_returned_cache_is_a_run_over_the_whole_conversation():
    model = tiny_model(selection="all")
    inputs = batch(prompt(videos=[(2, 4, 6)]))
    first = greedy(model, inputs, return_dict_in_generate=True)
    turn = torch.tensor([[IM_END, NEWLINE, IM_START, USER, NEWLINE, 40, 41, IM_END, NEWLINE, IM_START, 493, NEWLINE]])
    conversation = torch.cat([first.sequences, turn], dim=1)
    call = {"input_ids": conversation, "attention_mask": torch.ones_like(conversation)}
    continued = greedy(model, {**call, "past_key_values": first.past_key_values})
    again = greedy(model, {**inputs, **call})
    assert torch.equal(continued, again)


def test_generate_does_not_change_the_generation_config_or_the_inputs():
    model, inputs = tiny_model(), mixed_inputs()
    settings, copies = model.generation_config.to_dict(), {k: v.clone() for k, v in inputs.items()}
    model.generate(**inputs, max_length=inputs["input_ids"].shape[1] + 3)
    assert model.generation_config.to_dict() == settings
    assert all(torch.equal(inputs[name], value) for name, value in copies.items())


def test_generate_in_training_mode_uses_the_gate_of_inference():
    model, inputs = tiny_model(gate="gumbel"), mixed_inputs()
    expected = greedy(model, inputs)
    history = model.model.qtsplus.rho_history.clone()
    model.train()
    assert torch.equal(greedy(model, inputs), expected)
    assert torch.equal(model.model.qtsplus.rho_history, history)


def test_continuous_batching_answers_text_and_refuses_a_video():
    model, rows = tiny_model(), [prompt(question=6), prompt(question=9, seed=3)]
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=511)
    small = {
        "generation_config": config,
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
    }
    # Below 5.24 the attention of stock Qwen2.5-VL fails there.
    texts = rows if Version("5.24") <= TRANSFORMERS else []
    made = model.generate_batch([row.ids for row in texts], **small)
    for row, output in zip(texts, made.values(), strict=True):
        expected = model.generate(**batch(row), generation_config=config)[0, len(row.ids) :].tolist()
        assert output.generated_tokens == expected
    video = prompt(videos=[(2, 4, 4)])
    with pytest.raises(ValueError, match="8 video placeholders, but no video pixels"):
        model.generate_batch([rows[0].ids, video.ids], **small)
    manager = model.init_continuous_batching(**small)
    with pytest.raises(ValueError, match="8 video placeholders, but no video pixels"):
        manager.add_requests([video.ids])
