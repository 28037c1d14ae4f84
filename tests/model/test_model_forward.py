"""What Transformers asks of every model of its own, asked of ours: embeddings and the forward pass."""

import inspect

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from model_checks import (
    BACKBONE,
    CLASSES,
    FULL,
    TIED,
    build,
    main_output,
    mixed_inputs,
    real_output,
    shared_model,
    with_labels,
)
from qtsplus.model.prompt_qtsplus import CACHE
from tiny import assert_same, batch, prompt, run, stock_twin, tiny_model, token_types

# Embeddings ----------------------------------------------------------------------------------------------------------


@CLASSES
@TIED
@pytest.mark.parametrize("size", [530, 506])
def test_resized_embeddings_keep_the_old_rows_work_and_are_saved(tmp_path, cls, tied, size):
    model = build(cls, tied=tied)
    inputs = mixed_inputs()
    old = model.get_input_embeddings().weight.detach().clone()
    before = main_output(model, inputs)
    model.resize_token_embeddings(size)
    kept = min(size, 512)
    weight = model.get_input_embeddings().weight
    assert weight.shape == (size, 64)
    assert model.config.text_config.vocab_size == size
    assert_same(weight[:kept], old[:kept])
    after = main_output(model, inputs)
    if cls is BACKBONE:
        assert_same(after, before)
        return
    assert (model.lm_head.weight is weight) == tied
    assert after.shape[-1] == size
    assert_close(after[..., :kept], before[..., :kept], atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    assert_same(main_output(FULL.from_pretrained(tmp_path), inputs), after)
    loss = model.train()(**with_labels(inputs)).loss
    loss.backward()
    assert torch.isfinite(loss)


# Forward -------------------------------------------------------------------------------------------------------------


@CLASSES
def test_eager_and_sdpa_attention_agree(tmp_path, cls):
    inputs = mixed_inputs()
    build(cls).save_pretrained(tmp_path)
    outputs = []
    for name in ("eager", "sdpa"):
        model = cls.from_pretrained(tmp_path, attn_implementation=name)
        for config in (model.config, model.config.text_config, model.config.vision_config):
            assert config._attn_implementation == name
        outputs.append(real_output(model, inputs))
    assert_close(*outputs, atol=1e-4, rtol=0)


def test_hidden_states_and_attentions_have_the_shape_of_the_shortened_prompt():
    model = tiny_model()
    inputs = mixed_inputs()
    model.set_attn_implementation("eager")
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    first, *_, last = output.hidden_states
    first.retain_grad()
    output.logits.sum().backward()
    assert first.grad.any()
    assert_same(model.lm_head(last), output.logits)
    rows, width = output.qtsplus.columns.shape
    assert width < inputs["input_ids"].shape[1]
    for states in output.hidden_states:
        assert states.shape == (rows, width, 64)
    for weights in output.attentions:
        assert weights.shape == (rows, 4, width, width)
    model.config.text_config.output_hidden_states = True
    assert len(run(model, inputs).hidden_states) == 3, "as the configuration asks"


@CLASSES
def test_return_dict_false_gives_the_same_values_as_a_tuple(cls):
    model = build(cls)
    inputs = mixed_inputs()
    first = ["last_hidden_state"]
    if cls is FULL:
        inputs = with_labels(inputs)
        first = ["loss", "logits"]
    named = run(model, inputs)
    plain = run(model, inputs, return_dict=False)
    assert list(named) == [*first, CACHE, "image_outputs", "video_outputs", "qtsplus"]
    assert len(plain) == len(named)
    for name, value in zip(first, plain, strict=False):
        assert_same(value, named[name])


def test_a_text_takes_a_four_dimensional_mask_as_stock_does():
    model = shared_model()
    inputs = batch(prompt(question=9))
    length = inputs["input_ids"].shape[1]
    causal = torch.full((1, 1, length, length), torch.finfo(torch.float32).min).triu(1)
    position_ids = torch.arange(length).expand(3, 1, -1)
    masked = {**inputs, "attention_mask": causal, "position_ids": position_ids}
    logits = main_output(model, masked)
    assert_close(logits, main_output(stock_twin(model), masked), atol=1e-4, rtol=0)
    assert_close(logits, main_output(model, inputs), atol=1e-4, rtol=0)


@CLASSES
def test_embeddings_of_a_text_are_as_good_as_its_ids(cls):
    model = build(cls)
    inputs = batch(prompt(question=5), prompt(question=20, seed=2))
    if cls is FULL:
        inputs = with_labels(inputs)
    expected = model(**inputs)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    again = model(**inputs, inputs_embeds=embeds)
    for name in ("last_hidden_state",) if cls is BACKBONE else ("loss", "logits"):
        assert_same(again[name], expected[name])


def test_the_loss_is_the_cross_entropy_of_the_shifted_logits_of_the_shortened_prompt():
    inputs = with_labels(mixed_inputs())
    output = run(shared_model(), inputs)
    columns = output.qtsplus.columns
    is_visual = token_types(inputs["input_ids"]) != 0
    labels = inputs["labels"].masked_fill(is_visual, -100)
    labels = labels.gather(1, columns.clamp(min=0))
    labels = labels.masked_fill(columns < 0, -100)
    predictions = output.logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(predictions, labels[:, 1:].flatten())
    assert_close(output.loss, expected)


def test_labels_that_are_shifted_already_are_refused_beside_a_video():
    inputs = with_labels(mixed_inputs())
    with pytest.raises(ValueError, match="Got shift_labels beside images or videos: expected labels"):
        shared_model()(**inputs, shift_labels=inputs["labels"])


class Logits(nn.Module):
    """What is exported: a model that returns one tensor."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


@pytest.mark.filterwarnings("ignore")  # PyTorch's, about Transformers' own code
def test_a_text_only_forward_is_exported_and_traced():
    model = Logits(shared_model())
    input_ids = torch.arange(5, 25)[None]
    inputs = (input_ids, torch.ones_like(input_ids))
    with torch.no_grad():
        expected = model(*inputs)
        exported = torch.export.export(model, inputs).module()
        traced = torch.jit.trace(model, inputs)
        assert_same(exported(*inputs), expected)
        assert_same(traced(*inputs), expected)


def test_the_members_of_a_model_can_be_listed():
    members = dict(inspect.getmembers(shared_model().model))
    assert "qtsplus" in members
