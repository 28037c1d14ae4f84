"""Training with each kind of query states: what is taught, and what is left alone."""

import pytest
import torch

from qtsplus.model.configuration_qtsplus import QUERY_STATES, REDUCTIONS
from qtsplus.training.attention import answer_attention, relevance_divergences
from tiny import tiny_model
from training_examples import collate, examples, make_trainer

EACH = pytest.mark.parametrize("kind", QUERY_STATES)


def distilled(kind, **selector):
    """A model after the backward pass of attention distillation alone."""
    model = tiny_model(query_states=kind, gate="detached", **selector).train()
    inputs = collate(examples(4))
    labels = inputs.pop("labels")
    inputs.pop("source_ids")
    targets = answer_attention(model, inputs, labels)
    relevance_divergences(model(**inputs).qtsplus.log_relevance, targets).sum().backward()
    return model


@EACH
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_distillation_reaches_the_scores_and_the_layer(kind, reduction):
    model = distilled(kind, reduction=reduction)
    selector = model.model.qtsplus
    for layer in (selector.scoring_layers[0], *selector.question_layers):
        assert layer.q_proj.weight.grad.abs().max() > 0 and layer.k_proj.weight.grad.abs().max() > 0
    if kind == "layer":
        for name, parameter in selector.question_layers.named_parameters():
            assert parameter.grad is not None and (parameter.grad.abs().max() > 0 or name.endswith("k_proj.bias")), name
    trained = {name for name, p in model.model.language_model.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == {"embed_tokens.weight"}


def test_the_teacher_is_the_same_whatever_the_student_asks_by():
    inputs = collate(examples(4))
    labels = inputs.pop("labels")
    inputs.pop("source_ids")
    plain, student = tiny_model(), tiny_model(query_states="layer")
    student.load_state_dict(plain.state_dict(), strict=False)
    for one, other in zip(*(answer_attention(model, inputs, labels) for model in (plain, student)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("kind", "lora_rank"), [*zip(QUERY_STATES, (0, 4), strict=True)])
def test_fifteen_steps_of_distillation(kind, lora_rank, tmp_path):
    trainer = make_trainer(
        tmp_path,
        selector={"query_states": kind, "gate": "detached", "lambda_t": 0, "lambda_m": 0, "lambda_s": 0},
        relevance_weight=1.0,
        max_steps=15,
        learning_rate=1e-2,
        lora_rank=lora_rank,
        optim="adamw_torch",
        disable_tqdm=True,
    )
    trainer.train()
    losses = [line["loss_relevance"] for line in trainer.state.log_history if "loss_relevance" in line]
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
