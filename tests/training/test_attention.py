"""Attention distillation: its targets, its loss, and what it teaches."""

import pytest
import torch
import torch.nn.functional as F

from attention_twin import twin_targets
from naive import naive_log_relevance
from qtsplus.model.fields_qtsplus import REDUCTIONS
from qtsplus.model.relevance_qtsplus import log_relevance
from qtsplus.model.selector_qtsplus import GATES
from qtsplus.training import QTSplusTrainingArguments
from qtsplus.training.attention import AttentionChoice, answer_attention, attention_to_tokens, relevance_divergences
from qtsplus.training.lora import add_lora, base_model, lora_config
from tiny import batch, prompt, run, tiny_model
from training_examples import (
    assert_same_training,
    collate,
    examples,
    make_trainer,
    steps,
    trained,
)

VIDEO = (2, 4, 8)
SECOND_LAYER = ((1, 0), (1, 1), (1, 2), (1, 3))


def assert_near(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def labelled(*rows, pad_left=False):
    """Inputs and labels on the last 5 tokens of each row."""
    inputs = batch(*rows, pad_left=pad_left)
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, mask in enumerate(inputs["attention_mask"]):
        last = mask.nonzero()[-5:, 0]
        labels[row, last] = inputs["input_ids"][row, last]
    return inputs, labels


@pytest.fixture(scope="module")
def rows():
    return [
        prompt(videos=[VIDEO], seed=1, generation=False),
        prompt(videos=[(2, 4, 4), VIDEO], images=[(1, 4, 4)], seed=2, question=9, generation=False),
        prompt(seed=3, generation=False),
        prompt(videos=[(4, 4, 4)], seed=4, turns=1, generation=False),
    ]


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_targets_equal_eager_attention(rows, pad_left, attention):
    model = tiny_model().train()
    model.model.language_model.set_attn_implementation(attention)
    inputs, labels = labelled(*rows, pad_left=pad_left)
    labels[0, 1:] = -100  # a row without an answer
    targets = answer_attention(model, dict(inputs, retention=0.2), labels, AttentionChoice())
    assert model.training
    assert list(map(len, targets)) == [0, 8 + 16, 0, 16]
    assert_near(targets, twin_targets(model.eval(), inputs, labels))


@pytest.mark.parametrize("heads", [((1, 3),), ((0, 2), (0, 1), (1, 0)), ((0, 0), (0, 1), (0, 2), (0, 3))])
def test_targets_of_chosen_heads_equal_eager_attention(rows, heads):
    model = tiny_model()
    inputs, labels = labelled(*rows)
    targets = answer_attention(model, inputs, labels, AttentionChoice(heads=heads))
    assert_near(targets, twin_targets(model, inputs, labels, heads=heads))


def test_adapters_take_part_in_the_teaching(rows):
    model = tiny_model()
    inputs, labels = labelled(*rows)
    plain = answer_attention(model, inputs, labels, AttentionChoice())
    adapted = add_lora(model, lora_config(4)).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    targets = answer_attention(adapted, inputs, labels, AttentionChoice())
    difference = targets[0] - plain[0]
    assert difference.abs().max() > 1e-3
    assert_near(targets, twin_targets(base_model(adapted), inputs, labels))


def test_the_last_answer_counts(rows):
    """The other turns' answers are supervised too, but answer other questions."""
    model = tiny_model()
    inputs, labels = labelled(rows[3])
    expected = answer_attention(model, inputs, labels, AttentionChoice())
    labels[0, -20:-16] = inputs["input_ids"][0, -20:-16]
    assert_near(answer_attention(model, inputs, labels, AttentionChoice()), expected, tolerance=0)


def test_the_end_of_the_turn_is_not_part_of_the_answer(rows):
    """Its attention would be half of an answer of one word."""
    model = tiny_model()
    inputs, labels = labelled(rows[0])
    ids = inputs["input_ids"][0]
    turn_end = model.config.turn_end_token_id
    end = int((ids == turn_end).nonzero()[-1])
    labels[:] = -100
    labels[0, end - 1] = ids[end - 1]
    expected = answer_attention(model, inputs, labels, AttentionChoice())
    labels[0, end] = turn_end
    assert_near(answer_attention(model, inputs, labels, AttentionChoice()), expected, tolerance=0)


def test_attention_to_tokens_is_causal():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(4, 20, 8, generator=generator)
    keys = torch.randn(2, 20, 8, generator=generator)
    places = torch.tensor([9, 12, 19])
    tokens = torch.tensor([2, 3, 7, 8, 15])
    scaling = 0.3
    found = attention_to_tokens(queries[:, places], keys, places, tokens, scaling)

    scores = scaling * queries @ keys.repeat_interleave(2, 0).transpose(1, 2)
    is_visible = torch.ones(20, 20).tril()
    scores[:, is_visible == 0] = -torch.inf
    full = scores.softmax(-1)
    of_places = full[:, places].mean(1)
    assert_near(found, of_places[:, tokens])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_divergence_and_its_gradients_are_the_textbook_ones(reduction):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(4, 5, 8, generator=generator, requires_grad=True)
    keys = torch.randn(2, 30, 8, generator=generator, requires_grad=True)
    target = torch.rand(30, generator=generator)
    target[3] = 0
    target /= target.sum()
    no_target = target[:0]
    scores = log_relevance(queries, keys, reduction=reduction)
    (divergence,) = relevance_divergences([scores, scores], [target, no_target])
    gradients = torch.autograd.grad(divergence, [queries, keys])

    exact_queries = queries.detach().double().requires_grad_()
    exact_keys = keys.detach().double().requires_grad_()
    exact_scores = naive_log_relevance(exact_queries, exact_keys, reduction=reduction)
    expected = F.kl_div(exact_scores.log_softmax(0), target.double(), reduction="sum")
    exact_gradients = torch.autograd.grad(expected, [exact_queries, exact_keys])
    assert_near(divergence.double(), expected)
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        assert_near(gradient.double(), exact)


def test_with_a_null_token_what_the_text_took_is_taught_too():
    shares = torch.tensor([0.5, 0.2, 0.1])
    target = torch.tensor([0.25, 0.25, 0.0])
    (divergence,) = relevance_divergences([shares.log()], [target])
    chosen = shares / 0.8
    wanted = target / 0.5
    choice = F.kl_div(chosen.log(), wanted, reduction="sum")
    assert_near(divergence, choice)
    (with_text,) = relevance_divergences([shares.log()], [target], null_token=True)
    visual_and_text = torch.tensor([0.8, 0.2])
    wanted_sums = torch.tensor([0.5, 0.5])
    split = F.kl_div(visual_and_text.log(), wanted_sums, reduction="sum")
    assert_near(with_text, choice + split)


def test_the_words_of_the_question_may_look(rows):
    model = tiny_model()
    choice = AttentionChoice(SECOND_LAYER, "question")
    targets = answer_attention(model, *labelled(*rows), choice)
    lengths = [len(target) for target in targets]
    assert lengths == [16, 8 + 16, 0, 16]
    model.model.language_model.set_attn_implementation("eager")
    for row, words, target in zip(rows, (5, 9, 5, 5), targets, strict=True):
        if not row.videos:
            continue
        output = run(
            model,
            batch(row),
            selection="all",
            reencode=False,
            use_cache=False,
            output_attentions=True,
        )
        (attention,) = output.attentions[1].mean(1)
        is_visual = torch.tensor(row.ids) == model.config.video_token_id
        stop = len(row.ids) - 11  # in front of an answer of four words
        by_question = attention[stop - words : stop]
        assert_near(target, by_question[:, is_visual].mean(0))


def test_answer_and_question_count_alike(rows):
    model = tiny_model()
    inputs, labels = labelled(*rows)
    answers = answer_attention(model, inputs, labels, AttentionChoice())
    questions = answer_attention(model, inputs, labels, AttentionChoice(positions="question"))
    both = answer_attention(model, inputs, labels, AttentionChoice(positions="both"))
    for answer, question, mean in zip(answers, questions, both, strict=True):
        assert_near(mean, (answer + question) / 2)
        assert len(mean) == 0 or not torch.allclose(answer, question)


# --- In training ---


def test_the_detached_gate_has_no_gradient():
    scores = torch.randn(20, requires_grad=True)
    _, gates, threshold = GATES["detached"](scores, torch.tensor(5.0), 0.5, 5, 100)
    assert not gates.requires_grad
    assert threshold == 0


def test_the_loss_gains_its_weighted_mean(tmp_path):
    plain = trained(tmp_path, max_steps=1)
    taught = trained(tmp_path, max_steps=1, relevance_weight=0.5, relevance_heads=[(1, 0), (0, 3)])
    (without,) = steps(plain)
    (line,) = steps(taught)
    assert "loss_relevance" not in without
    assert line["loss_relevance"] > 0
    assert line["loss"] == pytest.approx(without["loss"] + 0.5 * line["loss_relevance"], rel=1e-5)
    assert line["loss_lm"] == pytest.approx(without["loss_lm"], rel=1e-6)


def has_answer(row) -> bool:
    return len(row.ids) % 3 != 0


def some_unanswered(rows):
    """As `collate`, but some rows have no answer."""
    inputs = collate(rows)
    for index, row in enumerate(rows):
        if not has_answer(row):
            inputs["labels"][index] = -100
    return inputs


@pytest.mark.parametrize("freeze", [True, False])
def test_micro_batches_add_up_to_one_big_batch(tmp_path, freeze):
    """Among them some without a video and some without an answer."""
    settings = {
        "selector": {"gate": "detached", "reduction": "mean", "rho_prior": 0.3},
        "relevance_weight": 2.0,
        "freeze_language_model": freeze,
    }
    whole = make_trainer(tmp_path, **settings)
    split = make_trainer(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings)
    for trainer in (whole, split):
        trainer.data_collator = some_unanswered
        trainer.train()
    with_video = [row for row in examples(12) if row.videos]
    answered = list(filter(has_answer, with_video))
    assert 0 < len(answered) < len(with_video)
    assert_same_training(whole, split)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"relevance_weight": -1.0}, "relevance_weight is -1.0; expected at least 0"),
        ({"relevance_weight": 1.0, "freeze_selector": True}, "leave freeze_selector and freeze_scores false"),
        ({"relevance_heads": []}, r"relevance_heads is \[\]; expected .* at least 1 item"),
        ({"relevance_positions": "prompt"}, "relevance_positions is 'prompt'; expected 'answer', 'question' or 'both'"),
    ],
)
def test_arguments_that_teach_nothing_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        QTSplusTrainingArguments(output_dir=str(tmp_path), **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"relevance_heads": [(2, 0)]}, r"name layer 2; expected layers with attention, which are \[0, 1\]"),
        ({"relevance_heads": [(0, 4)]}, "name head 4; expected heads from 0 to 3"),
        ({"relevance_heads": [(0, -1)]}, "name head -1"),
        ({"selector": {"selection": "all"}}, "selection='all'"),
    ],
)
def test_layers_that_a_model_does_not_have_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, relevance_weight=1.0, **settings)
