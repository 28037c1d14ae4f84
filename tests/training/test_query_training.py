"""Training with each kind of query states: what is taught, and what is left alone."""

import pytest

from qtsplus.model.fields_qtsplus import QUERY_STATES, REDUCTIONS
from qtsplus.training.attention import AttentionChoice, answer_attention, relevance_divergences
from tiny import tiny_model
from training_examples import inputs_and_labels


@pytest.mark.parametrize("kind", QUERY_STATES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_distillation_reaches_all_that_scores_and_nothing_else(kind, reduction):
    model = tiny_model(query_states=kind, gate="detached", reduction=reduction, scoring_layers=2).train()
    inputs, labels = inputs_and_labels()
    targets = answer_attention(model, inputs, labels, AttentionChoice())
    divergences = relevance_divergences(model(**inputs).qtsplus.log_relevance, targets)
    divergences.sum().backward()
    selector = model.model.qtsplus
    for layer in selector.scoring_layers:
        for part in (layer.q_norm, layer.kv_norm, layer.q_proj, layer.k_proj):
            assert part.weight.grad.any()
    for name, parameter in selector.question_layers.named_parameters():
        if not name.endswith("k_proj.bias"):  # it changes no attention
            assert parameter.grad.any(), name
    language_model = model.model.language_model
    taught = set()
    for name, parameter in language_model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            taught.add(name)
    assert taught == {"embed_tokens.weight"}
