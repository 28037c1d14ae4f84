"""Attention distillation: its targets, its loss, and what it teaches."""

import pytest
import torch
import torch.nn.functional as F

from attention_twin import twin_targets
from naive import naive_log_relevance
from qtsplus.model.configuration_qtsplus import REDUCTIONS
from qtsplus.model.relevance_qtsplus import log_relevance
from qtsplus.model.selector_qtsplus import GATES
from qtsplus.training import QTSplusTrainingArguments
from qtsplus.training.attention import (
    AttentionChoice,
    answer_attention,
    attention_to_tokens,
    note_attention,
    relevance_divergences,
)
from qtsplus.training.lora import add_lora, base_model, lora_config
from tiny import batch, prompt, tiny_model
from training_examples import assert_same_training, collate, examples, make_trainer, steps

VIDEO = (2, 4, 8)


def labelled(*rows, pad_left=False):
    """Inputs and labels on the last 5 tokens of each row."""
    inputs = batch(*rows, pad_left=pad_left)
    labels = torch.full_like(inputs["input_ids"], -100)
    for b in range(len(rows)):
        last = inputs["attention_mask"][b].nonzero()[-5:, 0]
        labels[b, last] = inputs["input_ids"][b, last]
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
    targets = answer_attention(model, {**inputs, "retention": 0.2}, labels)
    assert model.training
    assert [len(target) for target in targets] == [0, 8 + 16, 0, 16]
    for mine, theirs in zip(targets, twin_targets(model.eval(), inputs, labels), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_targets_of_a_row_are_as_it_is_alone(rows):
    model = tiny_model()
    together = answer_attention(model, *labelled(*rows))
    for target, row in zip(together, rows, strict=True):
        if row.videos:
            torch.testing.assert_close(target, answer_attention(model, *labelled(row))[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [((1, 3),), ((0, 2), (0, 1), (1, 0)), ((0, 0), (0, 1), (0, 2), (0, 3))])
def test_targets_of_chosen_heads_equal_eager_attention(rows, heads):
    model = tiny_model()
    inputs, labels = labelled(*rows)
    targets = answer_attention(model, inputs, labels, AttentionChoice(heads=heads))
    for mine, theirs in zip(targets, twin_targets(model, inputs, labels, heads=heads), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    if len(heads) == 4:  # a whole layer
        for mine, theirs in zip(targets, answer_attention(model, inputs, labels, AttentionChoice((0,))), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def test_the_rows_of_chosen_heads_alone_are_computed(rows, monkeypatch):
    computed = []

    def count(queries, *arguments):
        computed.append(len(queries))
        return attention_to_tokens(queries, *arguments)

    monkeypatch.setattr("qtsplus.training.attention.attention_to_tokens", count)
    inputs, labels = labelled(rows[0], rows[3])
    answer_attention(tiny_model(), inputs, labels, AttentionChoice(heads=((1, 0), (1, 2), (1, 3))))
    assert computed == [3, 3]


def test_heads_kept_apart_are_those_of_the_twin(rows):
    model = tiny_model()
    inputs, labels = labelled(*rows)
    noted = note_attention(model, inputs, labels)
    for layer, head in ((0, 1), (1, 3)):
        for row, expected in zip(noted, twin_targets(model, inputs, labels, heads=[(layer, head)]), strict=True):
            if len(expected):
                mine = row.by_head[layer][head]
                torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_adapters_take_part_in_the_teaching(rows):
    model = tiny_model()
    inputs, labels = labelled(*rows)
    plain = answer_attention(model, inputs, labels)
    adapted = add_lora(model, lora_config(4)).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    targets = answer_attention(adapted, inputs, labels)
    assert (targets[0] - plain[0]).abs().max() > 1e-3
    for mine, theirs in zip(targets, twin_targets(base_model(adapted), inputs, labels), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_the_last_answer_counts(rows):
    """The other turns' answers are supervised too, but answer other questions."""
    model = tiny_model()
    inputs, labels = labelled(rows[3])
    expected = answer_attention(model, inputs, labels)
    labels[0, -20:-16] = inputs["input_ids"][0, -20:-16]
    torch.testing.assert_close(answer_attention(model, inputs, labels), expected, atol=0, rtol=0)


@pytest.mark.parametrize("window", [None, 5])
def test_attention_to_tokens_is_causal_and_may_have_a_window(window):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(heads, 20, 8, generator=generator) for heads in (4, 2))
    places, tokens = torch.tensor([9, 12, 19]), torch.tensor([2, 3, 7, 8, 15])
    scores = queries @ keys.repeat_interleave(2, 0).transpose(1, 2) * 0.3
    distance = torch.arange(20)[:, None] - torch.arange(20)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    full = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    found = attention_to_tokens(queries[:, places], keys, places, tokens, 0.3, window)
    torch.testing.assert_close(found, full[:, places][:, :, tokens].mean(1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_divergence_and_its_gradients_are_the_textbook_ones(reduction):
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(*shape, generator=generator) for shape in ((4, 5, 8), (2, 30, 8))]
    target = torch.randn(30, generator=generator).softmax(0)
    target[3] = 0
    target /= target.sum()
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in states]
        if dtype == torch.float32:
            scores = log_relevance(*inputs, reduction=reduction)
            (divergence,) = relevance_divergences([scores, scores], [target, target[:0]])
        else:
            scores = naive_log_relevance(*inputs, reduction=reduction)
            divergence = F.kl_div(scores.log_softmax(0), target.double(), reduction="sum")
        results.append((divergence.double(), *torch.autograd.grad(divergence, inputs)))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), expected.double(), atol=1e-6, rtol=1e-5)


def test_with_a_null_token_what_the_text_took_is_taught_too():
    shares, target = torch.tensor([0.5, 0.2, 0.1]), torch.tensor([0.25, 0.25, 0.0])
    (divergence,) = relevance_divergences([shares.log()], [target])
    choice = F.kl_div((shares / 0.8).log(), target / 0.5, reduction="sum")
    torch.testing.assert_close(divergence, choice)
    (divergence,) = relevance_divergences([shares.log()], [target], null_token=True)
    seen = F.kl_div(torch.tensor([0.8, 0.2]).log(), torch.tensor([0.5, 0.5]), reduction="sum")
    torch.testing.assert_close(divergence, choice + seen)


def test_a_teacher_that_looks_mostly_at_text_teaches_the_choice_as_much():
    """Of a pretrained model the visual tokens have a tenth of all attention, and the choice was a tenth of the loss."""
    target, losses = torch.tensor([0.1, 0.1, 0.8]), []
    for mass in (1.0, 0.1):
        right, wrong = (mass * choice for choice in (target, target.flip(0)))
        (wrongly, rightly) = relevance_divergences([wrong.log(), right.log()], [mass * target] * 2, null_token=True)
        losses.append(wrongly - rightly)
    torch.testing.assert_close(losses[0], losses[1])


def test_the_words_of_the_question_may_look(rows):
    model = tiny_model()
    looking = answer_attention(model, *labelled(*rows), AttentionChoice((1,), positions="question"))
    assert [len(row) for row in looking] == [16, 8 + 16, 0, 16]
    model.model.language_model.set_attn_implementation("eager")
    for row, words, found in zip(rows, (5, 9, 5, 5), looking, strict=True):
        if row.videos:
            everything = {"selection": "all", "reencode": False, "use_cache": False, "output_attentions": True}
            attention = model(**batch(row), **everything).attentions[1][0].mean(0)
            visual = torch.tensor(row.ids) == model.config.video_token_id
            question = slice(len(row.ids) - 11 - words, len(row.ids) - 11)  # in front of an answer of four words
            torch.testing.assert_close(found, attention[question][:, visual].mean(0), atol=1e-5, rtol=1e-5)


def test_both_count_alike(rows):
    model, given = tiny_model(), labelled(*rows)
    each = [answer_attention(model, *given, AttentionChoice(positions=who)) for who in ("answer", "question", "both")]
    for answer, question, both in zip(*each, strict=True):
        torch.testing.assert_close(both, (answer + question) / 2)
        assert not len(both) or not torch.allclose(answer, question)


def test_what_ends_the_turn_is_no_part_of_the_answer(rows):
    """Of an answer of one word, its attention would be half."""
    model = tiny_model()
    inputs, labels = labelled(rows[0])
    labels[:] = -100
    ends = (inputs["input_ids"][0] == model.config.turn_end_token_id).nonzero()[-1, 0]
    labels[0, ends - 1] = inputs["input_ids"][0, ends - 1]
    expected = answer_attention(model, inputs, labels)
    labels[0, ends] = model.config.turn_end_token_id
    torch.testing.assert_close(answer_attention(model, inputs, labels), expected, atol=0, rtol=0)


def test_targets_for_other_tokens_are_refused():
    with pytest.raises(ValueError, match="Row 1 has 3 targets for 4 scored visual tokens"):
        relevance_divergences([torch.zeros(2), torch.zeros(4)], [torch.zeros(0), torch.ones(3) / 3])


# --------------------------------------------------------------------------------------------------------------------
# In training
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_reach_all_that_scores(reduction):
    model = tiny_model(scoring_layers=2, gate="detached", reduction=reduction).train()
    inputs = collate(examples(4))
    labels = inputs.pop("labels")
    inputs.pop("source_ids")
    targets = answer_attention(model, inputs, labels)
    relevance_divergences(model(**inputs).qtsplus.log_relevance, targets).sum().backward()
    for layer in model.model.qtsplus.scoring_layers:
        for part in (layer.q_norm, layer.kv_norm, layer.q_proj, layer.k_proj):
            assert part.weight.grad.abs().max() > 0
    assert model.model.language_model.layers[0].self_attn.q_proj.weight.grad is None


def test_the_detached_gate_keeps_what_inference_keeps_and_has_no_gradient():
    scores = torch.randn(20, generator=torch.Generator().manual_seed(0)).log_softmax(0).requires_grad_()
    kept, gates, threshold = GATES["detached"](scores, torch.tensor(5.0), 0.5, 5, 100)
    assert torch.equal(kept, scores.topk(5).indices.sort().values)
    assert torch.equal(gates, torch.ones(5)) and not gates.requires_grad and threshold == 0


def test_with_the_detached_gate_answers_teach_the_scores_nothing():
    model = tiny_model(gate="detached").train()
    inputs = collate(examples(4))
    labels = inputs.pop("labels")
    inputs.pop("source_ids")
    model(**inputs, labels=labels, retention=0.3).logits.sum().backward()
    scoring = model.model.qtsplus.scoring_layers[0]
    assert not scoring.q_proj.weight.grad.any() and not scoring.k_proj.weight.grad.any()
    assert model.model.qtsplus.reencode_layers[0].q_proj.weight.grad.any()
    assert model.model.language_model.layers[0].self_attn.q_proj.weight.grad.any()


def test_with_the_detached_gate_the_budget_teaches_the_scores_nothing():
    model = tiny_model(gate="detached").train()
    inputs = collate(examples(4))
    for name in ("labels", "source_ids"):
        inputs.pop(name)
    qtsplus = model(**inputs).qtsplus
    (qtsplus.loss_t + qtsplus.loss_m + qtsplus.rho.sum()).backward()
    selector = model.model.qtsplus
    assert selector.budget.mlp[0].weight.grad.any()
    taught = selector.scoring_layers[0].q_proj.weight.grad
    assert taught is None or not taught.any()


def test_the_loss_gains_its_weighted_mean(tmp_path):
    plain = make_trainer(tmp_path, max_steps=1)
    plain.train()
    taught = make_trainer(tmp_path, max_steps=1, relevance_weight=0.5, relevance_heads=[(1, 0), (0, 3)])
    taught.train()
    line, without = steps(taught)[0], steps(plain)[0]
    assert line["loss_relevance"] > 0 and "loss_relevance" not in without
    assert line["loss"] == pytest.approx(without["loss"] + 0.5 * line["loss_relevance"], rel=1e-5)
    assert line["loss_lm"] == pytest.approx(without["loss_lm"], rel=1e-6)


def unanswered(rows):
    """As `collate`, but rows with a number of words that 3 divides have no answer."""
    inputs = collate(rows)
    inputs["labels"][[len(row.ids) % 3 == 0 for row in rows]] = -100
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
        trainer.data_collator = unanswered
        trainer.train()
    rows = examples(12)
    answered = [bool(row.videos) and len(row.ids) % 3 != 0 for row in rows]
    assert 0 < sum(answered) < sum(bool(row.videos) for row in rows)
    assert_same_training(whole, split)


def test_a_batch_of_text_alone_adds_nothing(tmp_path):
    trainer = make_trainer(tmp_path, relevance_weight=1.0, per_device_train_batch_size=1, max_steps=1)
    trainer.train()
    line = steps(trainer)[0]
    assert "loss_relevance" not in line and line["loss"] == pytest.approx(line["loss_lm"], rel=1e-5)


def overlap_and_divergence(model, inputs, labels) -> tuple[float, float]:
    """Share of the teacher's top quarter among the selector's, and the divergence."""
    targets = answer_attention(model, inputs, labels)
    with torch.no_grad():
        scores = model(**inputs).qtsplus.log_relevance
    shares = []
    for score, target in zip(scores, targets, strict=True):
        if len(target):
            n = len(target) // 4
            shares.append(len(set(score.topk(n).indices.tolist()) & set(target.topk(n).indices.tolist())) / n)
    return sum(shares) / len(shares), float(relevance_divergences(scores, targets).mean())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_twenty_steps_bring_the_selector_nearer_to_the_teacher(tmp_path, reduction):
    trainer = make_trainer(
        tmp_path,
        selector={"gate": "detached", "reduction": reduction, "lambda_t": 0, "lambda_m": 0, "lambda_s": 0},
        relevance_weight=1.0,
        max_steps=20,
        learning_rate=1e-2,
        optim="adamw_torch",
        disable_tqdm=True,
    )
    inputs = collate(examples(12))
    labels = inputs.pop("labels")
    inputs.pop("source_ids")
    model = trainer.model.eval()
    shared, divergence = overlap_and_divergence(model, inputs, labels)
    trainer.train()
    shared_after, divergence_after = overlap_and_divergence(model.eval(), inputs, labels)
    assert divergence_after < 0.5 * divergence
    assert shared_after > shared + 0.2


def test_what_cannot_be_taught_is_refused(tmp_path):
    for arguments, message in (
        ({"relevance_weight": -1.0}, "relevance_weight=-1.0: expected at least 0"),
        ({"relevance_weight": 1.0, "freeze_selector": True}, "leave freeze_selector and freeze_scores false"),
        ({"relevance_layers": []}, r"relevance_layers=\[\]: expected different layers"),
        ({"relevance_heads": []}, r"relevance_heads=\[\]: expected different \(layer, head\) pairs"),
        ({"relevance_heads": [(1, 1), [1, 1]]}, "expected different"),
        ({"relevance_heads": [(1, 1)], "relevance_layers": [0]}, "exclude each other"),
        ({"relevance_positions": "prompt"}, "relevance_positions='prompt': expected 'answer', 'question' or 'both'"),
        ({"relevance_layers": [1, 1]}, r"relevance_layers=\[1, 1\]: expected different layers"),
    ):
        with pytest.raises(ValueError, match=message):
            QTSplusTrainingArguments(output_dir=str(tmp_path), **arguments)
    with pytest.raises(ValueError, match=r"name layer 2; expected layers with attention, of \[0, 1\]"):
        make_trainer(tmp_path, relevance_weight=1.0, relevance_layers=[0, 2])
    for pair, message in (
        ((2, 0), "name layer 2"),
        ((0, 4), "name head 4; expected heads from 0 to 3"),
        ((0, -1), "head -1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, relevance_weight=1.0, relevance_heads=[pair])
    with pytest.raises(ValueError, match="selection='all'"):
        make_trainer(tmp_path, relevance_weight=1.0, selector={"selection": "all"})
