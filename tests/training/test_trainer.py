"""The objective: its terms, their means over an optimizer step, and the log."""

import json

import pytest
import torch
import torch.nn.functional as F

from qtsplus.model.selector_qtsplus import GATES
from qtsplus.training.trainer import STATE_FILE
from tiny import run, tiny_model
from training_examples import (
    assert_same_training,
    collate,
    examples,
    inputs_and_labels,
    make_trainer,
    steps,
    trained,
)

PENALTIES = ("loss_t", "loss_m", "loss_s")


@pytest.mark.parametrize("gate", GATES)
def test_micro_batches_add_up_to_one_big_batch(tmp_path, gate):
    """
    Rows have different answer lengths, and micro-batches without a video count for nothing in the penalties. The
    sampled gate draws row by row, so the cut does not change a row's noise either. A Trainer seeds torch when it is
    made, so the second one is made after the first one's training.
    """
    settings = {
        "selector": {"target_n": 3, "lambda_s": 5.0, "gate": gate},
        "freeze_language_model": False,
        "dual_learning_rate": 20.0,
    }
    whole = trained(tmp_path, **settings)
    split = trained(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings)
    assert_same_training(whole, split)
    assert whole.budget.alpha > 0
    assert whole.budget.alpha == pytest.approx(split.budget.alpha, rel=1e-5)
    samples_with_video = 9
    assert whole.selector.rho_history[1] == samples_with_video
    assert split.selector.rho_history[1] == samples_with_video


def test_sum_of_sources_splits_too(tmp_path):
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = trained(tmp_path, sft_loss="sum_of_sources")
    assert_same_training(whole, trained(tmp_path, sft_loss="sum_of_sources", **halves))
    line = steps(whole)[0]
    terms = [line.get(f"loss_{source}", 0.0) for source in ("mcq", "vqa", "caption")]
    terms += [line[name] for name in PENALTIES]
    assert line["loss"] == pytest.approx(sum(terms), rel=1e-5)


def test_loss_is_the_models_own(tmp_path):
    """On one batch and with a fixed prior, the Trainer's loss is what the model returns for the same labels."""
    prior = {"rho_prior": 0.3, "lambda_s": 2.0}
    model = tiny_model(gate="noiseless", rho_min=0.1, rho_max=0.9, n_max=10, **prior).train()
    inputs, labels = inputs_and_labels()
    expected = model(**inputs, labels=labels).loss.item()
    trainer = trained(tmp_path, selector=prior, max_steps=1)
    assert steps(trainer)[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_first_step_has_no_prior_and_later_ones_the_mean_of_all_before(tmp_path):
    trainer = trained(tmp_path, selector={"lambda_s": 1.0}, max_steps=2)
    first, second = steps(trainer)
    assert first["loss_s"] == 0 < second["loss_s"]
    history = trainer.selector.rho_history
    total, count = history.tolist()
    assert count == 3 + 2
    mean = (first["rho"] * 3 + second["rho"] * 2) / 5
    assert total / 2**32 / count == pytest.approx(mean, rel=1e-5)
    before = history.clone()
    trainer.evaluate(examples(4))
    assert torch.equal(before, history)


def test_every_quantity_is_logged(tmp_path):
    trainer = trained(tmp_path, selector={"target_n": 3}, max_steps=1)
    (line,) = steps(trainer)
    quantities = {"loss_lm", "rho", "n", "n_asked", "visual_tokens", "kept_fraction", "alpha", *PENALTIES}
    assert quantities <= line.keys()
    assert {"loss_mcq", "loss_vqa", "loss_caption"} & line.keys()
    evaluated = trainer.evaluate(examples(4))
    assert evaluated["eval_n"] > 0
    assert "eval_loss_t" not in evaluated
    trainer.predict(examples(1))
    assert trainer.evaluate(examples(4))["eval_loss"] == evaluated["eval_loss"]


def test_a_model_that_keeps_everything_has_no_penalty_and_no_history(tmp_path):
    trainer = trained(tmp_path, selector={"selection": "all"}, freeze_language_model=False)
    line = steps(trainer)[0]
    assert line["loss"] == pytest.approx(line["loss_lm"], rel=1e-6)
    assert line["kept_fraction"] == 1
    assert trainer.selector.rho_history.tolist() == [0, 0]


def test_the_best_model_has_the_price_that_it_had(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trained(
        tmp_path,
        selector={"budget": "loss", "rho_min": 0.01, "target_n": 3},
        max_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_n",
        **settings,
    )
    best = trainer.state.best_model_checkpoint
    saved = json.loads((tmp_path / best / STATE_FILE).read_text())
    assert best.endswith("checkpoint-2")
    price = trainer.selector_config.token_price
    assert price == saved["token_price"]
    assert price != steps(trainer)[-1]["token_price"]


@pytest.mark.slow
@pytest.mark.parametrize(("logit", "target"), [(2.0, 5), (-3.0, 6)])
def test_the_dual_variable_leads_the_mean_count_to_its_target_from_both_sides(tmp_path, logit, target):
    """The prior stands for a task that wants to keep more; rho starts at 0.8 or at 0.14."""
    trainer = make_trainer(
        tmp_path,
        selector={"target_n": target, "lambda_t": 0, "lambda_m": 0, "lambda_s": 5.0, "rho_prior": 0.8, "n_max": 100},
        max_steps=120,
        learning_rate=2e-3,
        optim="adamw_torch",
        adam_beta2=0.9,
        lr_scheduler_type="cosine",
        freeze_selector=True,
        disable_tqdm=True,
    )
    budget = trainer.model.model.qtsplus.budget.requires_grad_(True)
    torch.nn.init.constant_(budget.mlp[2].bias, logit)
    trainer.train()
    asked = torch.tensor([line["n_asked"] for line in steps(trainer)])
    first = asked[:3].mean() / target
    last = asked[-12:].mean() / target
    assert abs(first - 1) > 0.4
    assert abs(last - 1) < 0.05
    assert trainer.budget.alpha > 0


def test_bf16_training_runs_with_a_mixed_batch(tmp_path):
    rounded = trained(tmp_path, bf16=True, freeze_language_model=False)
    exact = trained(tmp_path, freeze_language_model=False)
    for line, expected in zip(steps(rounded), steps(exact), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=0.05)


def test_evaluation_is_a_mean_over_tokens(tmp_path):
    """Also over batches, whose number of tokens differs."""
    inputs, labels = inputs_and_labels()
    model = make_trainer(tmp_path).model.eval()
    output = run(model, inputs)
    short_labels = model.compact_labels(labels, inputs["input_ids"], output.qtsplus.columns)
    predictions = output.logits[:, :-1].flatten(0, 1)
    next_tokens = short_labels[:, 1:].flatten()
    loss = F.cross_entropy(predictions, next_tokens).item()

    for batch_size in (4, 1):
        trainer = make_trainer(tmp_path, per_device_eval_batch_size=batch_size)
        evaluated = trainer.evaluate()
        assert evaluated["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_the_longest_video_of_the_training_is_noted(tmp_path):
    batch = collate(examples(4))
    seconds = batch["video_grid_thw"][:, 0] * torch.as_tensor(batch["second_per_grid_ts"])
    trained(tmp_path, max_steps=1).save_model()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["qtsplus_config"]["trained_seconds"] == pytest.approx(float(seconds.max()), abs=0.05)
    longer = trained(tmp_path / "again", selector={"trained_seconds": 3600.0}, max_steps=1)
    longer.save_model()
    assert longer.selector_config.trained_seconds == 3600
