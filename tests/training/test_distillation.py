"""The teacher's logits, with all visual tokens."""

import pytest
import torch

from qtsplus.training.distillation import divergence, own_logits, teacher_logits
from tiny import stock_twin, tiny_model
from training_examples import collate, examples, make_trainer, steps


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    batch = collate(examples(4))
    batch.pop("source_ids")
    return batch


def test_a_model_s_own_teacher_is_the_stock_model(inputs):
    """Re-encoding is left out, so a model teaches itself with what its frozen language model knew."""
    model = tiny_model(rho_max=0.1).train()
    labels = inputs.pop("labels")
    own = own_logits(model, {**inputs, "retention": 0.2}, labels)
    stock = teacher_logits(stock_twin(model), inputs, labels)
    torch.testing.assert_close(own, stock, atol=1e-4, rtol=1e-4)
    assert model.training


def test_divergence_is_the_textbook_one():
    student, teacher = torch.randn(6, 9), torch.randn(6, 9)
    assert divergence(teacher, teacher, 2.0).abs().max() < 1e-6
    expected = torch.nn.functional.kl_div(
        (student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none"
    ).sum(-1)
    torch.testing.assert_close(divergence(student, teacher, 2.0), 4 * expected)
    with pytest.raises(ValueError, match="as many tokens"):
        divergence(student, teacher[:5], 1.0)


@pytest.mark.parametrize("given", [False, True])
def test_distillation_adds_its_weighted_mean(tmp_path, given):
    plain = make_trainer(tmp_path, max_steps=1)
    plain.train()
    taught = make_trainer(tmp_path, max_steps=1, distillation_weight=0.5, distillation_temperature=2.0)
    if given:
        taught.teacher = stock_twin(tiny_model())
    taught.train()
    line, without = steps(taught)[0], steps(plain)[0]
    assert line["loss_teacher"] > 0
    assert line["loss"] == pytest.approx(without["loss"] + 0.5 * line["loss_teacher"], rel=1e-5)
    assert line["loss_lm"] == pytest.approx(without["loss_lm"], rel=1e-6)
