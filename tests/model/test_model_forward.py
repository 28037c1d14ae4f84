"""What Transformers asks of every model of its own, asked of ours: embeddings and the forward pass."""

import pytest
import torch
from torch import nn

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
from tiny import VIDEO_PAD, batch, prompt, stock_twin, tiny_model

# Embeddings ----------------------------------------------------------------------------------------------------------


@CLASSES
def test_the_input_embeddings_can_be_read_and_replaced(cls):
    model = build(cls)
    new = nn.Embedding(512, 64)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    assert torch.isfinite(main_output(model, mixed_inputs())).all()


@CLASSES
@TIED
@pytest.mark.parametrize("size", [530, 506])
def test_resized_embeddings_keep_the_old_rows_work_and_are_saved(tmp_path, cls, tied, size):
    model, inputs = build(cls, tied=tied), mixed_inputs()
    old, before = model.get_input_embeddings().weight.detach().clone(), main_output(model, inputs)
    model.resize_token_embeddings(size)
    kept = min(size, 512)
    assert model.get_input_embeddings().weight.shape == (size, 64)
    assert model.config.text_config.vocab_size == size
    assert torch.equal(model.get_input_embeddings().weight[:kept], old[:kept])
    after = main_output(model, inputs)
    if cls is BACKBONE:
        assert torch.equal(after, before)
        return
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert after.shape[-1] == size
    torch.testing.assert_close(after[..., :kept], before[..., :kept], atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(main_output(FULL.from_pretrained(tmp_path), inputs), after)
    loss = model.train()(**with_labels(inputs)).loss
    loss.backward()
    assert torch.isfinite(loss)


# Forward -------------------------------------------------------------------------------------------------------------


@CLASSES
def test_eager_and_sdpa_attention_agree(tmp_path, cls):
    model, inputs = build(cls), mixed_inputs()
    model.save_pretrained(tmp_path)
    eager = cls.from_pretrained(tmp_path, attn_implementation="eager")
    sdpa = cls.from_pretrained(tmp_path, attn_implementation="sdpa")
    for one, name in ((eager, "eager"), (sdpa, "sdpa")):
        assert one.config._attn_implementation == one.config.text_config._attn_implementation == name
        assert one.config.vision_config._attn_implementation == name
    assert (real_output(eager, inputs) - real_output(sdpa, inputs)).abs().max() < 1e-4


def test_hidden_states_and_attentions_have_the_shape_of_the_shortened_prompt():
    model, inputs = tiny_model(), mixed_inputs()
    model.set_attn_implementation("eager")
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    output.hidden_states[0].retain_grad()
    output.logits.sum().backward()
    assert output.hidden_states[0].grad.any()
    with torch.no_grad():
        model.config.text_config.output_hidden_states = True
        assert len(model(**inputs).hidden_states) == 3, "as the configuration asks"
    rows, width = output.qtsplus.columns.shape
    assert width < inputs["input_ids"].shape[1] and output.logits.shape[:2] == (rows, width)
    assert [tuple(h.shape) for h in output.hidden_states] == [(rows, width, 64)] * 3
    assert [tuple(a.shape) for a in output.attentions] == [(rows, 4, width, width)] * 2
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    real = output.qtsplus.columns >= 0
    weights = output.attentions[0].sum(-1).transpose(1, 2)[real]
    torch.testing.assert_close(weights, torch.ones_like(weights))


@CLASSES
def test_return_dict_false_gives_the_same_values_as_a_tuple(cls):
    model, inputs = build(cls), mixed_inputs()
    if cls is FULL:
        inputs = with_labels(inputs)
    with torch.no_grad():
        named, plain = model(**inputs), model(**inputs, return_dict=False)
    assert isinstance(plain, tuple) and len(plain) == len(named.to_tuple())
    names = list(named)
    assert names == [*(("loss", "logits") if cls is FULL else ("last_hidden_state",)), CACHE,
                     "image_outputs", "video_outputs", "qtsplus"]  # fmt: skip
    for name, value in zip(names, plain, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, named[name])


def test_a_text_takes_a_four_dimensional_mask_as_stock_does():
    model, inputs = shared_model(), batch(prompt(question=9))
    length = inputs["input_ids"].shape[1]
    causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    call = {"input_ids": inputs["input_ids"], "attention_mask": causal}
    position_ids = torch.arange(length).expand(3, 1, -1)
    ours = main_output(model, call, position_ids=position_ids)
    assert (ours - main_output(stock_twin(model), call, position_ids=position_ids)).abs().max() < 1e-4
    assert (ours - main_output(model, inputs)).abs().max() < 1e-4


def test_a_four_dimensional_mask_over_a_video_is_refused():
    inputs = batch(prompt(videos=[(2, 4, 6)]))
    length = inputs["input_ids"].shape[1]
    with pytest.raises(ValueError, match=r"attention_mask .*: expected input_ids' shape"):
        shared_model()(**{**inputs, "attention_mask": torch.zeros(1, 1, length, length)})


@CLASSES
def test_embeddings_of_a_text_are_as_good_as_its_ids(cls):
    model, inputs = build(cls), batch(prompt(question=5), prompt(question=20, seed=2))
    if cls is FULL:  # whose first output is the loss then
        inputs = with_labels(inputs)
    expected = model(**inputs)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    again = model(**inputs, inputs_embeds=embeds)
    assert torch.equal(again[0], expected[0]) and (cls is BACKBONE or torch.equal(again.logits, expected.logits))


def test_the_loss_is_the_cross_entropy_of_the_shifted_logits_of_the_shortened_prompt():
    model, inputs = shared_model(), with_labels(mixed_inputs())
    with torch.no_grad():
        output = model(**inputs)
    columns = output.qtsplus.columns
    labels = inputs["labels"].masked_fill(torch.isin(inputs["input_ids"], torch.tensor([499, VIDEO_PAD])), -100)
    labels = labels.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -100)
    expected = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)


def without_first_label(inputs):
    """A row's first token is predicted from the padding in front of it, if there is any."""
    inputs = with_labels(inputs)
    inputs["labels"].masked_fill_(inputs["attention_mask"].cumsum(1) == 1, -100)
    return inputs


def test_labels_that_are_shifted_already_are_refused_beside_a_video():
    inputs = with_labels(mixed_inputs())
    with pytest.raises(ValueError, match="Got shift_labels beside images or videos: expected labels"):
        shared_model()(**inputs, shift_labels=inputs["labels"])


def test_at_full_length_every_column_has_a_state_and_the_loss_is_the_same():
    model, inputs = tiny_model(), without_first_label(mixed_inputs())
    short = model(**inputs)
    model.model.full_length = True
    full = model(**inputs, output_hidden_states=True)
    real = short.qtsplus.columns >= 0
    places = short.qtsplus.columns[real]
    rows = torch.arange(len(real))[:, None].expand_as(real)[real]
    assert full.logits.shape[:2] == full.hidden_states[0].shape[:2] == inputs["input_ids"].shape
    assert torch.equal(full.logits[rows, places], short.logits[real])
    torch.testing.assert_close(full.loss, short.loss)
    assert (full.qtsplus.columns >= 0).sum() == real.sum()
    assert torch.equal(full.qtsplus.columns[rows, places], places)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3), tiny_model().generate(**inputs, max_new_tokens=3))
