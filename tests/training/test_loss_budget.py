"""The budget that predicts what an answer would lose, and the one that is a share of the relevance."""

import math

import pytest
import torch
import torch.nn.functional as F

from qtsplus.model.budget_qtsplus import DOUBLINGS, QTSplusLossHead, cheapest_count
from qtsplus.training.budget import CHEAPEST, LOST, loss_differences
from tiny import batch, prompt, tiny_config, tiny_model
from training_examples import assert_same_training, make_trainer, steps

FREE = {"lambda_t": 0.0, "lambda_m": 0.0, "lambda_s": 0.0}
LOSS = {"budget": "loss", "gate": "detached", "rho_min": 0.01, "rho_max": 0.9, "n_max": 64, **FREE}


def config_of(**fields):
    return tiny_config(**fields).qtsplus_config


def test_the_cheapest_count_is_where_a_token_stops_to_be_worth_its_price():
    losses = torch.tensor([3.0, 1.5, 0.2, 0.1, 0.0, 0.0, 0.0])
    for price, expected in ((10.0, 1), (0.5, 4), (1e-6, 16)):
        assert cheapest_count(losses, config_of(**{**LOSS, "token_price": price}), 1, 64) == expected
    config = config_of(**{**LOSS, "token_price": 1e-6})
    assert cheapest_count(losses, config, 1, 10) == 10
    assert cheapest_count(losses, config, 30, 64) == 30
    assert cheapest_count(losses, config_of(**{**LOSS, "token_price": 10.0}), 3, 64) == 3


@pytest.mark.parametrize("most", [1, 2, 3, 5, 17, 63, 64])
@pytest.mark.parametrize("least", [1, 2, 3])
def test_the_cheapest_count_keeps_its_bounds(least, most):
    config = config_of(**LOSS)
    for seed in range(20):
        losses = torch.rand(7, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values
        count = cheapest_count(losses, config, min(least, most), most)
        assert min(least, most) <= count <= most


def test_predicted_losses_fall_with_the_count_whatever_the_head_has_learned():
    torch.manual_seed(0)
    head = QTSplusLossHead(16, 8)
    losses = head(torch.randn(3, 16), torch.randn(40).log_softmax(0) - 0.2)
    assert losses.shape == (DOUBLINGS,) and (losses.diff() <= 0).all() and losses[-1] > 0
    with pytest.raises(StopIteration):
        next(p for p in head.bfloat16().parameters() if p.dtype == torch.float32)
    assert head(torch.randn(3, 16).bfloat16(), torch.zeros(1)).dtype == torch.float32


def test_weak_tokens_of_a_longer_video_change_nothing():
    head, query = QTSplusLossHead(16, 8), torch.randn(3, 16)
    short = torch.tensor([0.4, 0.3, 0.1])
    long = torch.cat([torch.full((1000,), 0.0004), short / 2])
    torch.testing.assert_close(head(query, long.log()), head(query, short.log()))
    assert not torch.allclose(head(query, torch.cat([short / 2, short[:2] * 4 / 7]).log()), head(query, short.log()))


def test_the_differences_are_those_of_the_counts_that_a_row_allows():
    measured = torch.tensor([[3.0, 2.0, 1.0, 1.5], [9.0, 1.0, 7.0, 7.0], [1.0, 1.0, 1.0, 1.0]])
    predicted = torch.zeros(3, 4)
    differences = loss_differences(predicted, measured, torch.tensor([8, 3, 1]))
    expected = [
        F.smooth_l1_loss(torch.zeros(4), torch.tensor([1.5, 0.5, 0.0, 0.0])),
        F.smooth_l1_loss(torch.zeros(2), torch.tensor([LOST, 0.0])),
    ]
    torch.testing.assert_close(differences, torch.stack(expected))


@pytest.fixture(scope="module")
def inputs():
    rows = [prompt(videos=[(4, 8, 8)], seed=1), prompt(videos=[(2, 4, 8), (2, 4, 4)], seed=2), prompt(seed=3)]
    return batch(*rows)


@pytest.mark.parametrize("budget", ["mass", "loss"])
@pytest.mark.parametrize("null_token", [False, True])
def test_a_batch_chooses_as_its_rows_do(inputs, budget, null_token):
    rows = [prompt(videos=[(4, 8, 8)], seed=1), prompt(videos=[(2, 4, 8), (2, 4, 4)], seed=2), prompt(seed=3)]
    model = tiny_model(**{**LOSS, "budget": budget}, null_token=null_token, reduction="mean", token_price=0.01)
    with torch.no_grad():
        together = model(**inputs).qtsplus
        alone = [model(**batch(row)).qtsplus for row in rows]
    for index, one in enumerate(alone[:2]):
        assert torch.equal(together.kept_indices[index], one.kept_indices[0])
    assert together.n[2] == 0 and (together.n[:2] >= 1).all()
    if null_token:
        assert (together.seen[:2] > 0).all() and (together.seen[:2] < 1).all()
    else:
        assert together.seen is None


def test_another_cap_leaves_the_head_as_it_is(inputs, tmp_path):
    model = tiny_model(**LOSS)
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path)
    other.config.qtsplus_config.n_max = 3
    with torch.no_grad():
        mixed = other(**inputs, retention=[0.5, 0.5, 0.5]).qtsplus
        assert other(**inputs).qtsplus.n.max() <= 3 and mixed.n.max() <= 3
    assert mixed.predicted_losses.shape == (3, DOUBLINGS)
    assert tiny_model(**{**LOSS, "n_max": 99_999}).load_state_dict(model.state_dict())


def test_an_untaught_head_keeps_the_least(inputs):
    with torch.no_grad():
        chosen = tiny_model(budget="loss", rho_min=0.25, rho_max=0.9).eval()(**inputs).qtsplus
    assert chosen.n.tolist() == [16, 6, 0]


def test_retention_and_the_cap_come_first(inputs):
    model = tiny_model(**LOSS, token_price=1e-9)
    with torch.no_grad():
        assert model(**inputs, retention=0.25).qtsplus.n.tolist() == [16, 6, 0]
        assert model(**inputs, max_visual_tokens=2).qtsplus.n.max() <= 2


@pytest.mark.slow
def test_the_head_learns_what_answers_lose(tmp_path):
    """The same twelve examples again and again, of a model that nothing else changes."""
    selector = {**LOSS, "reencode_layers": 0}
    settings = {"learning_rate": 1e-2, "max_steps": 30, "optim": "adamw_torch", "freeze_scores": True}
    trainer = make_trainer(tmp_path, selector=selector, **settings)
    trainer.train()
    lines = [line["loss_budget"] for line in steps(trainer)]
    assert sum(lines[-3:]) < 0.7 * sum(lines[:3])


def test_the_price_holds_the_mean_count_and_is_saved(tmp_path):
    selector = {**LOSS, "target_n": 7.0, "rho_max": 1.0}
    trainer = make_trainer(tmp_path, selector=selector, max_steps=20, dual_learning_rate=0.5)
    before = trainer.selector_config.token_price
    trainer.train()
    after = trainer.selector_config.token_price
    assert after != before
    lines = steps(trainer)
    assert lines[-1]["token_price"] == pytest.approx(after)
    asked = [line["n_asked"] for line in lines]
    assert abs(sum(asked[-6:]) / 6 - 7) < 1.5 < abs(sum(asked[:3]) / 3 - 7)
    trainer.save_model(str(tmp_path / "model"))
    saved = type(trainer.model).from_pretrained(tmp_path / "model")
    assert saved.config.qtsplus_config.token_price == pytest.approx(after)


@pytest.mark.parametrize("target_n, price", [(0.01, LOST), (1e6, CHEAPEST)])
def test_a_target_that_the_bounds_forbid_does_not_drive_the_price_away(tmp_path, target_n, price):
    trainer = make_trainer(tmp_path, selector={**LOSS, "target_n": target_n}, max_steps=8, dual_learning_rate=5.0)
    trainer.train()
    assert trainer.selector_config.token_price == price


def test_micro_batches_add_up_to_one_big_batch(tmp_path):
    settings = {"selector": LOSS, "freeze_language_model": False, "retention_range": [0.2, 0.6]}
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    split = make_trainer(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings)
    split.train()
    assert_same_training(whole, split)
    assert any("loss_budget" in line for line in steps(whole))


def test_a_batch_of_text_alone_teaches_no_budget(tmp_path):
    trainer = make_trainer(tmp_path, selector=LOSS, per_device_train_batch_size=1, max_steps=6)
    trainer.train()
    assert any("n_asked" not in line for line in steps(trainer)) and any("n_asked" in line for line in steps(trainer))


def test_a_budget_without_a_head_leaves_the_head_alone(tmp_path):
    trainer = make_trainer(tmp_path, selector={**LOSS, "budget": "mass"})
    assert not any(p.requires_grad for p in trainer.selector.budget.parameters())
    trainer.train()


def test_fields_out_of_range_are_refused():
    for field, value in (("budget", "head"), ("token_price", 0.0), ("relevance_mass", 1.5)):
        with pytest.raises(ValueError, match=field):
            config_of(**{field: value})
    with pytest.raises(ValueError, match="target_n=7, budget='mass'; expected a target_n with another budget"):
        config_of(budget="mass", target_n=7)


def test_the_null_token_takes_relevance_and_nothing_else(inputs):
    plain = tiny_model(reduction="sum")
    model = tiny_model(reduction="sum", null_token=True)
    model.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        ours, theirs = (one(**inputs, retention=0.3).qtsplus for one in (model, plain))
    for own, other, seen in zip(ours.log_relevance[:2], theirs.log_relevance[:2], ours.seen[:2].tolist(), strict=True):
        torch.testing.assert_close(own - math.log(seen), other, atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, ours.kept_indices, theirs.kept_indices))
