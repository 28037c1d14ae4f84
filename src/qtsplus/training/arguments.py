"""Arguments of [`QTSplusTrainer`]."""

from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.training_args import OptimizerNames

from ..common.validation import STRICT

SFT_LOSSES = ("token_mean", "sum_of_sources")
# Fields of Transformers that change nothing here, or not what they say: what they may be, and why.
_WITHOUT_EFFECT: dict[str, tuple[tuple, str]] = {
    "average_tokens_across_devices": ((True,), "losses are means over the tokens of all processes"),
    "label_names": ((None, ["labels"]), "the collator gives labels"),
    "length_column_name": (("length",), "a record tells no length before its video is read"),
    "remove_unused_columns": ((False,), "it would remove what the collator needs"),
    "resume_from_checkpoint": ((None,), "use --resume, or trainer.train's argument"),
    "train_sampling_strategy": (("random", "sequential"), "a record tells no length before its video is read"),
    "use_cache": ((False,), "training keeps no cache"),
    "use_liger_kernel": ((False,), "Liger has no kernels for this model"),
}
# What Transformers takes without a word, or with an error from deep inside a run.
_AT_LEAST_ONE = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
_AT_LEAST_ZERO = (
    "learning_rate",
    "language_model_learning_rate",
    "vision_learning_rate",
    "weight_decay",
    "max_grad_norm",
    "relevance_weight",
    "dual_learning_rate",
    "dual_damping",
    "lora_rank",
    "dataloader_num_workers",
    "neftune_noise_alpha",
)
_RANGES = (
    (_AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
    (_AT_LEAST_ZERO, lambda value: value >= 0, "at least 0"),
    (("num_train_epochs", "lora_alpha"), lambda value: value > 0, "more than 0"),
    (("lora_dropout", "label_smoothing_factor"), lambda value: 0 <= value < 1, "at least 0 and less than 1"),
    (("max_skipped", "retention_share"), lambda value: 0 <= value <= 1, "a share in [0, 1]"),
    (("seed", "data_seed"), lambda value: 0 <= value < 2**32, "a whole number from 0 to 4294967295"),
    (("sft_loss",), lambda value: value in SFT_LOSSES, f"one of {SFT_LOSSES}"),
    (("relevance_positions",), lambda value: value in ("answer", "question", "both"), "'answer', 'question' or 'both'"),
    (("max_steps",), lambda value: value == -1 or value >= 1, "at least 1, or -1 to go by num_train_epochs"),
)


@dataclass
class QTSplusTrainingArguments(TrainingArguments):
    r"""
    [`TrainingArguments`] and what training a selector adds.

    > What is trained

    Args:
        freeze_selector: keep the selector as it is, to train a base model.
        freeze_scores: keep what scores the tokens; the budget and the re-encoder learn.
        freeze_language_model: `True` is QTSplus-3B, `False` is QTSplus-3B-FT. The token embeddings and the output head
            belong to the language model.
        freeze_vision_model: the vision tower with its merger.
        lora_rank: above 0, adapters of this rank on the frozen language model.
        lora_alpha: scale of the adapters, `lora_alpha / lora_rank`.
        lora_dropout: dropout in front of the adapters.

    > Learning rates; `learning_rate` is the selector's, and that of every part that names none

        language_model_learning_rate: of the language model or its adapters.
        vision_learning_rate: of the vision tower.

    > The objective; its weights stand in the model's `qtsplus_config`

        sft_loss: `"token_mean"` is the mean over all supervised tokens of an optimizer step. `"sum_of_sources"` is the
            paper's `L_mcq + L_vqa`: the means over each source's tokens, added.
        dual_learning_rate: with a `target_n`, the step of the ascent on the dual variable alpha, relative: a budget
            that is exceeded by 100% raises `alpha * target_n` by this much per step.
        dual_damping: what the last step's relative excess adds to `alpha * target_n`. Ascent alone (0) swings around
            its target for as long as a short training lasts.
        retention_range: lowest and highest fraction of the visual tokens. In a share of the steps the fraction is drawn
            from here, evenly on a logarithmic scale, instead of predicted, so that the model also serves whoever asks
            for a `retention`.
        retention_share: that share; the prediction learns in the other steps.

    > Distillation from a teacher's attention

        relevance_weight: weight of the divergence between the selector's scores and what the model itself, with all
            visual tokens, attends to while it answers. The scores then need no gradient of the gate: set `gate` of
            `qtsplus_config` to `"detached"`.
        relevance_layers: the layers of the language model whose attention is summed, counted from 0; all if absent.
        relevance_heads: (layer, head) pairs in place of whole layers; `qtsplus calibrate` finds those that look at what
            an answer rests on.
        relevance_positions: who attends: `"answer"`, what predicts the answer's words, `"question"`, its own words, or
            `"both"`.

    > Records that cannot be used

        max_skipped: the share of the records that may be skipped before the run stops.

    Raises:
        ValueError: arguments that exclude each other or are out of range.
    """

    __pydantic_config__ = STRICT

    freeze_selector: bool = False
    freeze_scores: bool = False
    freeze_language_model: bool = True
    freeze_vision_model: bool = True
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    language_model_learning_rate: float | None = None
    vision_learning_rate: float | None = None
    sft_loss: str = "token_mean"
    dual_learning_rate: float = 0.1
    dual_damping: float = 2.0
    retention_range: list[float] | None = None
    retention_share: float = 0.5
    relevance_weight: float = 0.0
    relevance_layers: list[int] | None = None
    relevance_heads: list[tuple[int, int]] | None = None
    relevance_positions: str = "answer"
    max_skipped: float = 0.1
    # The dataset's items are dictionaries of several records' needs, which only our collator understands.
    remove_unused_columns: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for names, holds, expected in _RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise ValueError(f"{name}={value!r}: expected {expected}.")
        self._check_effects()
        self._check_teaching()

    def _check_teaching(self) -> None:
        """Refuses arguments of ours that exclude each other."""
        bounds = self.retention_range
        if bounds is not None and not (len(bounds) == 2 and 0 < bounds[0] <= bounds[1] <= 1):
            raise ValueError(f"retention_range={bounds}: expected a lowest and a highest fraction in (0, 1].")
        frozen = self.freeze_language_model and self.freeze_vision_model
        if self.lora_rank and (self.freeze_selector or self.freeze_scores or not frozen):
            raise ValueError(
                "lora_rank trains adapters on a frozen language model, and the selector: leave "
                "freeze_language_model and freeze_vision_model true, freeze_selector and freeze_scores false."
            )
        if self.relevance_weight and (self.freeze_selector or self.freeze_scores):
            raise ValueError("relevance_weight teaches the scores: leave freeze_selector and freeze_scores false.")
        if self.relevance_layers is not None and self.relevance_heads is not None:
            raise ValueError("relevance_layers and relevance_heads exclude each other: leave one of them out.")
        for name in ("relevance_layers", "relevance_heads"):
            places = getattr(self, name)
            if places is not None and not 0 < len(places) == len(set(map(str, places))):
                raise ValueError(f"{name}={places}: expected at least one, and each once.")

    def _check_effects(self) -> None:
        """Refuses what Transformers takes, but what would do nothing here or end the run later."""
        for name, (values, reason) in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if value not in values:
                expected = " or ".join(map(repr, values))
                raise ValueError(f"{name}={value!r} has no effect here: {reason}. Expected {expected}.")
        parallel: Any = self.parallelism_config
        if parallel is not None and max(parallel.cp_size, parallel.sp_size) > 1:
            raise ValueError("parallelism_config splits sequences: selection needs whole prompts: leave cp and sp 1.")
        own_rates = self.language_model_learning_rate is not None or self.vision_learning_rate is not None
        projects = OptimizerNames(self.optim).value.startswith(("galore", "apollo"))
        if self.optim_target_modules is not None and (own_rates or not projects):
            raise ValueError(
                "optim_target_modules has no effect here: expected a GaLore or APOLLO optim, and no learning rates of "
                "the language model's or the vision tower's own."
            )
        if self.load_best_model_at_end and self.eval_strategy == "no":
            raise ValueError("load_best_model_at_end needs evaluation: set eval_strategy, or leave it out.")
        known = get_available_reporting_integrations()
        for name in sorted(self.report_to or ()):
            if name not in known:
                raise ValueError(f"report_to names {name}, which is not installed or not known.")
