"""The Trainer of Transformers with the paper's objective, its dual variable and its diagnostics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from peft import PeftModel
from pydantic import with_config
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from typing_extensions import TypedDict

from ..common.folders import reading
from ..common.journals import STORED, read_stored, write_json
from ..data.records import SOURCES
from ..model.budget_qtsplus import DOUBLINGS, kept_count
from .arguments import QTSplusTrainingArguments
from .attention import AttentionChoice, answer_attention, check_relevance, evaluating, relevance_divergences
from .budget import RhoControl, RunningMeans, loss_differences
from .dataset import IGNORED, VideoQACollator, VideoQADataset, warn_skipped
from .freezing import prepare_parts, score_parameters
from .lora import active_selector, base_model, save_selector_config
from .sharding import choose_layers, keep_gathered, layer_class

STATE_FILE = "qtsplus_state.json"
FEW = 1000  # records before which the share of those that cannot be used may be chance


@with_config(STORED)
class _State(TypedDict):
    """What [`STATE_FILE`] holds beside a checkpoint, see [`RhoControl`]."""

    alpha: float
    excess: float
    predicted: list[list[float]]  # for each recent question, its losses with 1, 2, 4, ... tokens
    num_tokens: list[int]  # the visual tokens of the same questions
    token_price: float
    trained_seconds: float | None


# Names in the log.
_TERMS = ("loss_t", "loss_m", "loss_s", "loss_relevance", "loss_budget")
_LOSSES = ("loss_lm", "loss_mcq", "loss_vqa", "loss_caption") + _TERMS
_BUDGET = ("rho", "n", "n_asked", "kept_fraction", "visual_tokens")


@dataclass(frozen=True)
class StepCounts:
    """The counts by which the terms of an optimizer step are divided, since each term is a mean."""

    tokens: Tensor  # [len(SOURCES)] int64, the supervised tokens of each source
    with_vision: Tensor  # [], the samples with visual tokens
    answered: Tensor  # [], the samples among them that have an answer

    @classmethod
    def of(cls, numbers: Tensor) -> "StepCounts":
        """Names the numbers of [`QTSplusTrainer._count`]."""
        return cls(tokens=numbers[:-2], with_vision=numbers[-2], answered=numbers[-1])


class _StepCallback(TrainerCallback):
    """Updates the budget at the end of an optimizer step, before anything is logged or saved."""

    def __init__(self, trainer: "QTSplusTrainer"):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.budget.finish_step(self.trainer.sum_over_processes)


class QTSplusTrainer(Trainer):
    r"""
    Trains a QTSplus model on the paper's objective (Equation 5),

        L_SFT + lambda_t (rho M)^2 / n_max^2 + lambda_m rho M / n_max + lambda_s (rho - rho_bar)^2
              + alpha (rho M - target_n) + relevance_weight * KL(attention || softmax(log r))
              + |predicted - measured losses|

    `attention` is the model's own attention to each visual token while it answers with all of them
    ([`answer_attention`]). Of the M visual tokens `rho M` are kept, at most `n_max`. rho_bar is `rho_prior`. Without a
    prior it is the mean of rho over all earlier steps, and in the first step the term is 0.

    Every term is a mean over a whole optimizer step, however the step is divided into micro-batches and processes.
    L_SFT is a mean over the supervised tokens, the KL divergence over the samples with visual tokens and an answer, and
    every other term over the samples with visual tokens.

    With `budget="rho"`, alpha >= 0 holds the mean of `n = min(ceil(rho M), n_max)` at `target_n`. After each step
    `alpha += dual_learning_rate * excess / target_n`, where `excess = mean n / target_n - 1` is at most 1. The
    objective takes `alpha + 2 excess / target_n`, as in the modified differential multiplier method (Platt and Barr,
    1988), so that short trainings do not swing around the target.

    With `budget="loss"` rho has no gradient. The head learns how much higher the loss of an answer is with 1, 2, 4, ...
    tokens, in the steps that draw no `retention`. Before each line of the log, `token_price` is set so that the last
    256 questions of this process would keep `target_n` tokens on average, by the head's predictions.

    Logged beside the loss, as means since the last line: `loss_lm` and its parts by source, `loss_t`, `loss_m`,
    `loss_s`, `loss_relevance`, `loss_budget`, `rho`, `n` (kept), `n_asked` (what the budget head asks for in
    training), `kept_fraction` (n / M), `visual_tokens` (M), and with a `target_n` the current `alpha` or
    `token_price`. Evaluation logs the same with the prefix of its metrics, and `skipped`, the share of records that
    cannot be used. The loss of an evaluation is L_SFT alone, a mean over all its supervised tokens.

    Args:
        model: such as a `Qwen2_5_VLQTSplusForConditionalGeneration`, or a `PeftModel` of one, whose frozen parts stay
            frozen.
        args: see [`QTSplusTrainingArguments`]; they decide what is frozen and where adapters are added.
        kwargs: as for [`Trainer`]; batches have what [`VideoQACollator`] makes, `source_ids` too.
    """

    arguments_class: type[QTSplusTrainingArguments] = QTSplusTrainingArguments
    dataset_class: type[VideoQADataset] = VideoQADataset
    collator_class: type[VideoQACollator] = VideoQACollator
    loss_names: tuple[str, ...] = _LOSSES  # all that may be logged

    args: QTSplusTrainingArguments
    model: Any  # a model or a PeftModel, never None here
    _counts: StepCounts  # of the optimizer step, from its beginning

    def __init__(self, model: nn.Module, args: QTSplusTrainingArguments, **kwargs):
        model = prepare_parts(model, args)
        super().__init__(model=model, args=args, **kwargs)
        base = base_model(model)
        # A sharded model has a second copy of tied weights. Whoever resumes ties them again, and misses nothing.
        base._keys_to_ignore_on_save.update(base.all_tied_weights_keys)
        # Keeps the Trainer from dividing by the number of micro-batches: the losses below are means over the step.
        self.model_accepts_loss_kwargs = True
        self.selector = active_selector(model)
        self.selector_config = base.config.qtsplus_config
        # If the scores train, an earlier calibration does not hold for them.
        score_weights = score_parameters(self.selector)
        if any(weight.requires_grad for weight in score_weights):
            self.selector_config.seen_threshold = None
            self.selector_config.seen_area = None
        check_relevance(base, args)
        # Records of this process: those that could not be used, and all.
        self.skipped = 0
        self.drawn = 0
        names = self.loss_names + _BUDGET + ("loss", "skipped")
        # In training (`True`) and in evaluation (`False`).
        self.running = {training: RunningMeans(names, args.device) for training in (True, False)}
        self._retention: float | None = None
        self._longest = torch.zeros(1, device=args.device)  # seconds of the longest video so far, in this process
        self.budget = RhoControl(self.selector, args, self.running)
        self.add_callback(_StepCallback(self))

    # --- The objective ---

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """As stock; counts the tokens and samples of this optimizer step, see [`StepCounts`]."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = torch.zeros(len(SOURCES) + 2, dtype=torch.int64, device=self.args.device)
        for batch in batches:
            counts += self._count(batch).to(counts.device)
            self._longest = torch.maximum(self._longest, _longest_video(batch).to(self._longest))
            skipped = warn_skipped(batch)
            self.skipped += skipped
            self.drawn += skipped + int((batch["labels"] != IGNORED).any(1).sum())
        planned = self.state.max_steps * self.get_total_train_batch_size(self.args)
        fewest = min(FEW, planned, len(self.train_dataset)) / self.args.world_size  # type: ignore[arg-type]
        self._check_skipped(self.skipped / max(self.drawn, fewest))
        counts = self.sum_over_processes(counts)
        self._counts = StepCounts.of(counts)
        self.budget.start_step()
        self._retention = _draw_retention(self.args, self.state.global_step)
        return batches, self._counts.tokens.sum()

    def _get_num_items_in_batch(self, batch_samples, device):
        return None  # counted above, by source

    def compute_loss(
        self,
        model,
        inputs,
        return_outputs=False,
        num_items_in_batch=None,
    ):
        """The part of the optimizer step's objective that this micro-batch contributes."""
        inputs = dict(inputs)
        inputs.pop("skipped", None)
        counts = self._counts if model.training else StepCounts.of(self._count(inputs))
        labels = inputs.pop("labels")
        sources = inputs.pop("source_ids")
        has_own_budget = self._retention is None
        if model.training and not has_own_budget:
            inputs["retention"] = self._retention
        args = self.args
        outputs, token_losses, rows = self.answer(model, inputs, labels, args.label_smoothing_factor)
        qtsplus = outputs.qtsplus
        loss = self._answer_loss(token_losses, sources[rows], counts, model.training)
        penalties = self.budget.loss(qtsplus, counts.with_vision, model.training, has_own_budget)
        if model.training:
            if args.relevance_weight > 0:
                divergences = self._relevance_divergences(qtsplus, inputs, labels)
                loss = loss + args.relevance_weight * self._mean("loss_relevance", divergences, counts.answered)
            if has_own_budget and self.selector_config.budget == "loss" and not args.freeze_selector:
                errors = self._prediction_errors(inputs, labels, qtsplus)
                loss = loss + self._mean("loss_budget", errors, counts.with_vision)
            # Distributed training averages the gradients of the processes, but here they must be added up.
            loss = (loss + penalties) * self.accelerator.num_processes
        outputs["loss"] = loss
        return (loss, outputs) if return_outputs else loss

    def _mean(
        self,
        name: str,
        losses: Tensor,
        samples: Tensor,
    ) -> Tensor:
        """This micro-batch's part of a mean over the samples of the step, whose number is `samples`."""
        self.running[True].add(name, losses)
        return losses.sum() / samples.clamp(min=1)

    def _answer_loss(
        self,
        token_losses: Tensor,
        sources: Tensor,
        counts: StepCounts,
        training: bool,
    ) -> Tensor:
        """L_SFT of this micro-batch, from the cross-entropy `[n]` of its supervised tokens and their sources `[n]`."""
        running = self.running[training]
        running.add("loss_lm", token_losses)
        # The host waits once for all sources.
        losses_and_sources = torch.stack([token_losses.detach(), sources.to(token_losses)])
        losses, source_of_token = losses_and_sources.cpu()
        for index, source in enumerate(SOURCES):
            running.add(f"loss_{source}", losses[source_of_token == index])
        tokens = counts.tokens
        if self.args.sft_loss == "token_mean":
            tokens = tokens.sum().expand(len(tokens))
        tokens = tokens.clamp(min=1)
        shares = token_losses / tokens[sources]
        return shares.sum()

    def _get_eval_sampler(self, eval_dataset):
        """As stock; but the last batches of several processes are filled with nothing, where stock repeats records."""
        processes = self.args.world_size
        if processes == 1 or not isinstance(eval_dataset, VideoQADataset):
            return super()._get_eval_sampler(eval_dataset)
        missing = -len(eval_dataset) % (processes * self.args.eval_batch_size)
        return [*range(len(eval_dataset)), *[None] * missing]

    def evaluation_loop(self, *args, **kwargs):
        """As stock; the logged means start from 0, since an earlier `predict` adds to them but logs nothing."""
        self.running[False].totals.zero_()
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """As stock; the labels are shortened as the prompt is, so that each stands at the index of its token."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        running = self.running[False]
        supervised = inputs["labels"] != IGNORED
        running.add("loss", loss.expand(int(supervised.sum())))
        skipped = warn_skipped(inputs)
        records = skipped + int(supervised.any(1).sum())
        running.add("skipped", torch.arange(records) < skipped)
        if prediction_loss_only:
            return loss, None, None
        labels = self._compact(inputs["labels"], inputs["input_ids"], outputs.qtsplus)
        return loss, outputs.logits, labels

    def _compact(self, labels: Tensor, input_ids: Tensor, qtsplus) -> Tensor:
        """`[B, S]` labels -> `[B, S']`, the labels of the kept columns."""
        if qtsplus is None or qtsplus.columns is None:
            return labels
        return base_model(self.model).compact_labels(labels, input_ids, qtsplus.columns)

    def answer(
        self,
        model,
        inputs,
        labels: Tensor,
        smoothing: float = 0.0,
    ):
        """The model's outputs; and of each of the n supervised tokens, the cross-entropy `[n]` and the row `[n]`."""
        outputs = model(**inputs, use_cache=False)
        labels = self._compact(labels, inputs["input_ids"], outputs.qtsplus)
        targets = labels[:, 1:]
        is_supervised = targets != IGNORED
        rows, columns = is_supervised.nonzero(as_tuple=True)
        logits = outputs.logits[:, :-1]
        losses = F.cross_entropy(
            logits[rows, columns].float(),
            targets[rows, columns],
            reduction="none",
            label_smoothing=smoothing,
        )
        return outputs, losses, rows

    def _prediction_errors(self, inputs, labels, qtsplus) -> Tensor:
        """The errors of the losses that the budget head predicts, `[k]` for the samples of [`loss_differences`]."""
        config = self.selector_config
        most = torch.tensor(
            [kept_count(config.rho_max, total, config.n_max) for total in qtsplus.num_tokens.tolist()],
            device=labels.device,
        )
        # Every process makes the same number of passes, since the processes of one model run in step.
        largest = self.accelerator.gather(most.max()).max()
        passes = min(int(largest).bit_length(), DOUBLINGS)
        measured = torch.zeros(len(labels), passes, device=labels.device)  # the answer's loss with 1, 2, 4, ... tokens
        limited = dict(inputs, retention=1.0)
        with evaluating(self.model), torch.no_grad():  # tokens are chosen as in inference
            for exponent in range(passes):
                limited["max_visual_tokens"] = 2**exponent
                _, token_losses, rows = self.answer(self.model, limited, labels)
                measured[:, exponent].index_add_(0, rows, token_losses)
        predicted = qtsplus.predicted_losses[most > 1]
        questions = zip(predicted.detach().cpu(), qtsplus.num_tokens[most > 1].tolist(), strict=True)
        self.budget.predicted += gather_object(list(questions))  # all processes have one price
        return loss_differences(qtsplus.predicted_losses[:, :passes], measured, most)

    def attention_targets(self, inputs: Mapping, labels: Tensor) -> Sequence[Tensor]:
        """The attention from which the scores of each row learn, see [`answer_attention`]."""
        return answer_attention(self.model, inputs, labels, AttentionChoice.of(self.args))

    def _relevance_divergences(self, qtsplus, inputs, labels) -> Tensor:
        """The divergences of the scores from the attention, `[k]` for the samples with visual tokens and an answer."""
        targets = self.attention_targets(inputs, labels)  # in every process, since each may hold a part of the layers
        if qtsplus.log_relevance is None:
            return torch.zeros(0, device=labels.device)
        null_token = self.selector_config.null_token
        return relevance_divergences(qtsplus.log_relevance, targets, null_token).to(labels.device)

    def _count(self, batch: Mapping) -> Tensor:
        """`[len(SOURCES) + 2]` int64: supervised tokens by source, samples with vision, and those with an answer."""
        supervised = batch["labels"][:, 1:] != IGNORED
        tokens = supervised.sum(1)
        by_source = tokens.new_zeros(len(SOURCES))
        by_source.index_add_(0, batch["source_ids"], tokens)
        with_vision = (batch["input_ids"] == base_model(self.model).config.video_token_id).any(1)
        answered = with_vision & (tokens > 0)
        return torch.cat([by_source, torch.stack([with_vision.sum(), answered.sum()])])

    def sum_over_processes(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values.clone(), reduction="sum")

    # --- The log ---

    def _check_skipped(self, share: float) -> None:
        """Raises `ValueError` where more than the share `max_skipped` of the records have been skipped."""
        most = self.args.max_skipped
        if share > most:
            raise ValueError(
                f"{share:.1%} of the records cannot be used, as the warnings above say; expected at most {most:.1%}. "
                "Remove them (`qtsplus data check` lists them), or raise training.max_skipped."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As stock; adds the means since the last line to the logs of training and evaluation."""
        self.budget.set_price()
        if "loss" in logs:
            logs.update(self.running[True].pop(self.sum_over_processes))
            if self.selector_config.target_n is not None:
                logs |= self.budget.price()
        for name in list(logs):
            if name.startswith("eval") and name.endswith("_loss"):
                means = self.running[False].pop(self.sum_over_processes)
                self._check_skipped(means.get("skipped", 0.0))
                for mean, value in means.items():
                    logs[name.removesuffix("loss") + mean] = value
        super().log(logs, start_time)

    # --- Sharding and checkpoints ---

    def _prepare_for_training(self, *args, **kwargs):
        """As stock; only the layers of the language model are sharded, see sharding.py."""
        model = base_model(self.model)
        layer = layer_class(model)
        choose_layers(self.accelerator.state, model)
        prepared = super()._prepare_for_training(*args, **kwargs)
        keep_gathered(self.model, layer)
        return prepared

    def save_model(self, *args, **kwargs) -> None:
        """As stock; notes the longest video of the training in the configuration, for warnings about longer videos."""
        self._raise_trained_seconds(float(self.accelerator.gather(self._longest).max()))
        super().save_model(*args, **kwargs)

    def _raise_trained_seconds(self, seconds: float | None) -> None:
        if seconds:
            known = self.selector_config.trained_seconds or 0.0
            self.selector_config.trained_seconds = max(known, round(seconds, 1))

    def _save(self, output_dir=None, state_dict=None) -> None:
        """As stock, with an adapter's `qtsplus_config`."""
        super()._save(output_dir, state_dict)
        if isinstance(self.model, PeftModel) and self.args.should_save:
            save_selector_config(self.model, output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            config = self.selector_config
            state = {
                "alpha": self.budget.alpha,
                "excess": self.budget.excess,
                "predicted": [losses.tolist() for losses, _ in self.budget.predicted],
                "num_tokens": [num_tokens for _, num_tokens in self.budget.predicted],
                "token_price": config.token_price,
                "trained_seconds": config.trained_seconds,
            }
            write_json(Path(output_dir, STATE_FILE), state)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        with reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        with reading(f"{checkpoint}, by a recipe that has to train the same parameters,"):
            super()._load_optimizer_and_scheduler(checkpoint)
        self._load_budget(checkpoint)

    def _load_best_model(self) -> None:
        """As stock; restores the token price of that checkpoint too."""
        super()._load_best_model()
        self._load_budget(self.state.best_model_checkpoint)

    def _load_budget(self, checkpoint: str | None) -> None:
        path = Path(str(checkpoint), STATE_FILE)
        if path.exists():
            state = read_stored(path, _State)
            self.budget.restore(state)
            self._raise_trained_seconds(state["trained_seconds"])


def _longest_video(batch: Mapping) -> Tensor:
    """The seconds of the longest video of a batch, a scalar."""
    if "video_grid_thw" not in batch:
        return torch.zeros(())
    steps = batch["video_grid_thw"][:, 0]
    return (steps * torch.as_tensor(batch["second_per_grid_ts"], device=steps.device)).max()


def _draw_retention(args: QTSplusTrainingArguments, step: int) -> float | None:
    """
    The fraction to keep in this optimizer step, log-uniform in `retention_range` and the same in every process; `None`
    leaves it to the model's own budget.
    """
    if args.retention_range is None:
        return None
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    chance, place = torch.rand(2, generator=generator).tolist()
    if chance >= args.retention_share:
        return None
    low, high = args.retention_range
    return low * (high / low) ** place
