"""The budget that predicts what an answer would lose, and the one that is a share of the relevance."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from qtsplus.model.budget_qtsplus import DOUBLINGS, QTSplusLossHead, cheapest_count, is_near
from qtsplus.training.budget import CHEAPEST, LOST, loss_differences
from tiny import batch, prompt, tiny_config, tiny_model
from training_examples import assert_same_training, make_trainer, steps, trained

LOSS = {
    "budget": "loss",
    "gate": "detached",
    "rho_min": 0.01,
    "rho_max": 0.9,
    "n_max": 64,
    "lambda_t": 0.0,
    "lambda_m": 0.0,
    "lambda_s": 0.0,
}
FALLING = torch.tensor([3.0, 1.5, 0.2, 0.1, 0.0, 0.0, 0.0])  # losses with 1, 2, 4, ... tokens


def config_of(**fields):
    return tiny_config(**fields).qtsplus_config


@pytest.mark.parametrize(
    ("price", "least", "most", "expected"),
    [
        (10.0, 1, 64, 1),
        (0.5, 1, 64, 4),
        (1e-6, 1, 64, 16),
        (1e-6, 1, 10, 10),
        (1e-6, 30, 64, 30),
        (10.0, 3, 64, 3),
    ],
)
def test_the_cheapest_count_is_where_a_token_stops_to_be_worth_its_price(price, least, most, expected):
    config = config_of(**LOSS, token_price=price)
    assert cheapest_count(FALLING, config, least, most) == expected


def test_predicted_losses_fall_with_the_count_whatever_the_head_has_learned():
    torch.manual_seed(0)
    head = QTSplusLossHead(16, 8)
    log_relevance = torch.randn(40).log_softmax(0) - 0.2
    losses = head(torch.randn(3, 16), log_relevance, is_near(log_relevance))
    assert losses.shape == (DOUBLINGS,)
    assert (losses.diff() <= 0).all()
    assert losses[-1] > 0


def test_weak_tokens_of_a_longer_video_change_nothing():
    head = QTSplusLossHead(16, 8)
    query = torch.randn(3, 16)
    short = torch.tensor([0.4, 0.3, 0.1])
    weak = torch.full((1000,), 0.0004)
    strong = short[:2] * 4 / 7
    with_weak = torch.cat([weak, short / 2])
    with_strong = torch.cat([short / 2, strong])
    log_relevances = [relevance.log() for relevance in (short, with_weak, with_strong)]
    expected, same, other = [head(query, scores, is_near(scores)) for scores in log_relevances]
    assert_close(same, expected)
    assert not torch.allclose(other, expected)


def test_the_differences_are_those_of_the_counts_that_a_row_allows():
    predicted = torch.zeros(3, 4)
    measured = torch.tensor(
        [
            [3.0, 2.0, 1.0, 1.5],
            [9.0, 1.0, 7.0, 7.0],
            [1.0, 1.0, 1.0, 1.0],
        ]
    )
    differences = loss_differences(predicted, measured, torch.tensor([8, 3, 1]))
    of_first = torch.tensor([1.5, 0.5, 0.0, 0.0])
    of_second = torch.tensor([LOST, 0.0])
    first = F.smooth_l1_loss(torch.zeros(4), of_first)
    second = F.smooth_l1_loss(torch.zeros(2), of_second)
    assert_close(differences, torch.stack([first, second]))


@pytest.fixture(scope="module")
def rows():
    """Samples of 64 and of 24 visual tokens, and one of none."""
    return [
        prompt(videos=[(4, 8, 8)], seed=1),
        prompt(videos=[(2, 4, 8), (2, 4, 4)], seed=2),
        prompt(seed=3),
    ]


@pytest.fixture(scope="module")
def inputs(rows):
    return batch(*rows)


@torch.no_grad()
def selection_of(model, inputs, **options):
    return model(**inputs, **options).qtsplus


@pytest.mark.parametrize("null_token", [False, True])
def test_a_batch_chooses_as_its_rows_do(rows, inputs, null_token):
    settings = {**LOSS, "null_token": null_token, "reduction": "mean", "token_price": 0.01}
    model = tiny_model(**settings)
    together = selection_of(model, inputs)
    for index, row in enumerate(rows[:2]):
        alone = selection_of(model, batch(row))
        assert torch.equal(together.kept_indices[index], alone.kept_indices[0])
        assert together.n[index] >= 1
    assert together.n[2] == 0
    if null_token:
        assert (together.seen[:2] > 0).all()
        assert (together.seen[:2] < 1).all()
    else:
        assert together.seen is None


def test_an_untaught_head_keeps_the_least(inputs):
    model = tiny_model(budget="loss", rho_min=0.25, rho_max=0.9).eval()
    assert selection_of(model, inputs).n.tolist() == [16, 6, 0]


def test_retention_and_the_cap_come_first(inputs):
    model = tiny_model(**LOSS, token_price=1e-9)
    assert selection_of(model, inputs, retention=0.25).n.tolist() == [16, 6, 0]
    assert selection_of(model, inputs, max_visual_tokens=2).n.max() <= 2


def test_the_null_token_takes_relevance_and_nothing_else(inputs):
    plain = tiny_model(reduction="sum")
    model = tiny_model(reduction="sum", null_token=True)
    model.load_state_dict(plain.state_dict(), strict=False)
    found = selection_of(model, inputs, retention=0.3)
    expected = selection_of(plain, inputs, retention=0.3)
    for row in (0, 1):
        seen = float(found.seen[row])
        relevance = found.log_relevance[row] - math.log(seen)
        assert_close(relevance, expected.log_relevance[row], atol=1e-5, rtol=1e-5)
        assert torch.equal(found.kept_indices[row], expected.kept_indices[row])


# --- In training ---


@pytest.mark.slow
def test_the_head_learns_what_answers_lose(tmp_path):
    """The same twelve examples again and again, of a model that nothing else changes."""
    trainer = trained(
        tmp_path,
        selector={**LOSS, "reencode_layers": 0},
        learning_rate=1e-2,
        max_steps=30,
        optim="adamw_torch",
        freeze_scores=True,
    )
    errors = [line["loss_budget"] for line in steps(trainer)]
    assert sum(errors[-3:]) < 0.7 * sum(errors[:3])


def test_the_price_is_set_in_training_and_saved(tmp_path):
    trainer = make_trainer(tmp_path, selector={**LOSS, "target_n": 7}, max_steps=2)
    before = trainer.selector_config.token_price
    trainer.train()
    price = trainer.selector_config.token_price
    assert price != before
    assert steps(trainer)[-1]["token_price"] == price
    trainer.save_model(str(tmp_path / "model"))
    saved = type(trainer.model).from_pretrained(tmp_path / "model")
    assert saved.config.qtsplus_config.token_price == pytest.approx(price)


def test_the_price_holds_the_mean_count(tmp_path):
    """Also where one question in four asks for many more tokens than the target."""
    trainer = make_trainer(tmp_path, selector={**LOSS, "target_n": 12})
    predicted = trainer.budget.predicted
    for num_tokens in (96, 6, 6, 6):
        predicted.append((2.0 / 2 ** torch.arange(DOUBLINGS), num_tokens))
    trainer.budget.set_price()
    config = trainer.selector_config
    counts = []
    for losses, num_tokens in predicted:
        least = math.ceil(config.rho_min * num_tokens)
        most = math.ceil(config.rho_max * num_tokens)
        counts.append(cheapest_count(losses, config, least, most))
    assert abs(sum(counts) / 4 - 12) < 1


@pytest.mark.parametrize("target_n", [0.01, 1e6])
def test_a_target_that_the_bounds_forbid_does_not_drive_the_price_away(tmp_path, target_n):
    trainer = trained(tmp_path, selector={**LOSS, "target_n": target_n}, max_steps=3)
    assert CHEAPEST <= trainer.selector_config.token_price <= LOST


def test_a_resumed_run_sets_the_price_that_an_uninterrupted_one_sets(tmp_path):
    settings = {"selector": {**LOSS, "target_n": 2}, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trained(tmp_path / "whole", **settings)
    resumed = make_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert steps(resumed) == steps(whole)


def test_micro_batches_add_up_to_one_big_batch(tmp_path):
    settings = {"selector": LOSS, "freeze_language_model": False, "retention_range": [0.2, 0.6]}
    whole = trained(tmp_path, **settings)
    split = trained(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings)
    assert_same_training(whole, split)
    assert any("loss_budget" in line for line in steps(whole))


def test_a_batch_of_text_alone_teaches_no_budget(tmp_path):
    trainer = trained(tmp_path, selector=LOSS, per_device_train_batch_size=1, max_steps=6)
    has_budget = {"n_asked" in line for line in steps(trainer)}
    assert has_budget == {True, False}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budget": "head"}, "budget"),
        ({"token_price": 0.0}, "token_price"),
    ],
)
def test_fields_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(**fields)
