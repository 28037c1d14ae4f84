"""The objective: its terms, their means over an optimizer step, and the log."""

import json

import pytest
import torch
import torch.nn.functional as F

from qtsplus.model.selector_qtsplus import GATES
from qtsplus.training import QTSplusTrainingArguments
from qtsplus.training.trainer import STATE_FILE
from tiny import tiny_model
from training_examples import assert_same_training, collate, examples, make_trainer, steps


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
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    split = make_trainer(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings)
    split.train()
    assert_same_training(whole, split)
    assert whole.budget.alpha == pytest.approx(split.budget.alpha, rel=1e-5) and whole.budget.alpha > 0
    assert whole.selector.rho_history[1] == split.selector.rho_history[1] == 9


def test_sum_of_sources_splits_too(tmp_path):
    whole = make_trainer(tmp_path, sft_loss="sum_of_sources")
    split = make_trainer(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, sft_loss="sum_of_sources"
    )
    whole.train()
    split.train()
    assert_same_training(whole, split)
    line = steps(whole)[0]
    parts = sum(line.get(f"loss_{source}", 0.0) for source in ("mcq", "vqa", "caption"))
    penalties = line["loss_t"] + line["loss_m"] + line["loss_s"]
    assert line["loss"] == pytest.approx(parts + penalties, rel=1e-5)


def test_loss_is_the_models_own(tmp_path):
    """On one batch and with a fixed prior, the Trainer's loss is what the model returns for the same labels."""
    trainer = make_trainer(tmp_path, selector={"rho_prior": 0.3, "lambda_s": 2.0}, max_steps=1)
    inputs = collate(examples(4))
    inputs.pop("source_ids")
    settings = {"gate": "noiseless", "rho_min": 0.1, "rho_max": 0.9, "n_max": 10}
    model = tiny_model(**settings, rho_prior=0.3, lambda_s=2.0).train()
    expected = model(**inputs).loss.item()
    trainer.train()
    assert steps(trainer)[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_first_step_has_no_prior_and_later_ones_the_mean_of_all_before(tmp_path):
    trainer = make_trainer(tmp_path, selector={"lambda_s": 1.0}, max_steps=2)
    trainer.train()
    first, second = steps(trainer)
    assert first["loss_s"] == 0 < second["loss_s"]
    total, count = trainer.selector.rho_history.tolist()
    assert count == 3 + 2
    assert total / 2**32 / count == pytest.approx((first["rho"] * 3 + second["rho"] * 2) / 5, rel=1e-5)
    before = trainer.selector.rho_history.clone()
    trainer.evaluate(examples(4))
    assert torch.equal(before, trainer.selector.rho_history)


def test_every_quantity_is_logged(tmp_path):
    trainer = make_trainer(tmp_path, selector={"target_n": 3}, max_steps=1)
    trainer.train()
    line = steps(trainer)[0]
    for name in ("loss_lm", "loss_t", "loss_m", "loss_s", "rho", "n", "n_soft", "kept_fraction", "threshold", "alpha"):
        assert name in line
    assert line["hard_over_soft"] == pytest.approx(1, abs=0.3)
    assert any(f"loss_{source}" in line for source in ("mcq", "vqa", "caption"))
    trainer.evaluate(examples(4))
    evaluated = trainer.state.log_history[-1]
    assert evaluated["eval_loss"] == pytest.approx(evaluated["eval_loss_lm"], rel=0.2)
    assert evaluated["eval_n"] > 0 and "eval_loss_t" not in evaluated


def test_a_model_that_keeps_everything_has_no_penalty_and_no_history(tmp_path):
    trainer = make_trainer(tmp_path, selector={"selection": "all"}, freeze_language_model=False)
    trainer.train()
    line = steps(trainer)[0]
    assert line["loss"] == pytest.approx(line["loss_lm"], rel=1e-6) and line["kept_fraction"] == 1
    assert trainer.selector.rho_history.tolist() == [0, 0]


def test_dual_variable_rises_above_the_target_and_never_falls_below_zero(tmp_path):
    tight = make_trainer(tmp_path, selector={"target_n": 1}, max_steps=1, dual_learning_rate=2.0)
    tight.train()
    assert steps(tight)[0]["n_asked"] > 2  # an excess of more than 100% counts as 100%
    assert tight.budget.alpha == 2.0
    loose = make_trainer(tmp_path, selector={"target_n": 100}, max_steps=1)
    loose.train()
    assert loose.budget.alpha == 0


@pytest.mark.slow
@pytest.mark.parametrize(("logit", "target"), [(2.0, 5), (-3.0, 6)])
def test_dual_variable_lands_on_its_target_from_both_sides(tmp_path, logit, target):
    """Here the prior stands for the task, which wants to keep more; rho starts at 0.8 or at 0.14."""
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
    asked = [line["n_asked"] for line in steps(trainer)]
    assert abs(sum(asked[:3]) / 3 / target - 1) > 0.4
    assert sum(asked[-12:]) / 12 == pytest.approx(target, rel=0.05)
    assert trainer.budget.alpha > 0


def test_dual_variable_is_saved_and_restored(tmp_path):
    settings = {"selector": {"target_n": 2}, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    saved = json.loads((tmp_path / "whole/checkpoint-2" / STATE_FILE).read_text())
    assert 0 < saved["alpha"] < whole.budget.alpha
    resumed = make_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert (resumed.budget.alpha, resumed.budget.excess) == (whole.budget.alpha, whole.budget.excess)


def test_the_best_model_has_the_price_that_it_had(tmp_path):
    trainer = make_trainer(tmp_path, selector={"target_n": 2}, save_strategy="steps", save_steps=2, max_steps=4)
    trainer.train()
    last, best = trainer.budget.alpha, tmp_path / "checkpoint-2"
    trainer.state.best_model_checkpoint, trainer.skipped = str(best), {"late.mp4": "is damaged"}
    trainer._load_best_model()
    assert last != trainer.budget.alpha == json.loads((best / STATE_FILE).read_text())["alpha"]
    assert trainer.skipped == {"late.mp4": "is damaged"}


def test_gradient_checkpointing_changes_nothing(tmp_path):
    plain = make_trainer(tmp_path, freeze_language_model=False)
    recomputed = make_trainer(tmp_path, freeze_language_model=False, gradient_checkpointing=True)
    plain.train()
    recomputed.train()
    assert_same_training(plain, recomputed)


def test_bf16_training_runs_with_a_mixed_batch(tmp_path):
    trainer = make_trainer(tmp_path, bf16=True, freeze_language_model=False)
    trainer.train()
    reference = make_trainer(tmp_path, freeze_language_model=False)
    reference.train()
    for line, exact in zip(steps(trainer), steps(reference), strict=True):
        assert line["loss"] == pytest.approx(exact["loss"], rel=0.05)


def test_relevance_and_budget_stay_in_float32_under_autocast():
    model = tiny_model(rho_min=0.1, rho_max=0.9).train()
    inputs = collate(examples(4))
    with torch.no_grad():
        exact = model(**inputs).qtsplus
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(**inputs).qtsplus
    assert mixed.rho.dtype == torch.float32
    assert all(relevance.dtype == torch.float32 for relevance in mixed.relevance)
    torch.testing.assert_close(mixed.rho, exact.rho, atol=5e-3, rtol=0)


def test_evaluation_is_a_token_mean(tmp_path):
    trainer = make_trainer(tmp_path)
    inputs = collate(examples(4))
    trainer.model.eval()
    loss, outputs = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    labels = trainer.model.compact_labels(inputs["labels"], inputs["input_ids"], outputs.qtsplus.columns)
    expected = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)


def test_arguments_that_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="lora_rank"):
        QTSplusTrainingArguments(output_dir=str(tmp_path), lora_rank=4, freeze_language_model=False)
    with pytest.raises(ValueError, match="sft_loss"):
        QTSplusTrainingArguments(output_dir=str(tmp_path), sft_loss="sum")


def test_the_longest_video_of_the_training_is_noted(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    batch = collate(examples(4))
    expected = (batch["video_grid_thw"][:, 0] * torch.as_tensor(batch["second_per_grid_ts"])).max()
    trainer.train()
    trainer.save_model()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["qtsplus_config"]["trained_seconds"] == pytest.approx(float(expected), abs=0.05)
    again = make_trainer(tmp_path / "again", selector={"trained_seconds": 3600.0}, max_steps=1)
    again.train()
    again.save_model()
    assert again.selector_config.trained_seconds == 3600
