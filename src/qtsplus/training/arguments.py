"""Arguments of [`QTSplusTrainer`]: the `training` section of a recipe. The other sections are in recipe.py."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, create_model
from transformers import TrainingArguments

from ..common.validation import STRICT, build
from ..data.records import Fraction, Share

Head = tuple[int, int]
Heads = Annotated[list[Head], Field(min_length=1)]

# Fields of Transformers, which looks at their ranges when it starts to train, or not at all.
_RANGES = {
    "per_device_train_batch_size": PositiveInt,
    "per_device_eval_batch_size": PositiveInt,
    "gradient_accumulation_steps": PositiveInt,
    "num_train_epochs": PositiveFloat,
    "learning_rate": PositiveFloat,
    "weight_decay": NonNegativeFloat,
    "adam_beta1": Share,
    "adam_beta2": Share,
    "adam_epsilon": NonNegativeFloat,
    "max_grad_norm": NonNegativeFloat | None,
    "label_smoothing_factor": Share,
    "logging_steps": NonNegativeFloat,
    "save_steps": NonNegativeFloat,
    "save_total_limit": NonNegativeInt | None,
    "dataloader_num_workers": NonNegativeInt,
    "seed": NonNegativeInt,
}


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

    > The objective; its weights stand in the model's `qtsplus_config`

        sft_loss: `"token_mean"` is the mean over all supervised tokens of an optimizer step. `"sum_of_sources"` is the
            paper's `L_mcq + L_vqa`: the means over each source's tokens, added.
        dual_learning_rate: with `budget="rho"` and a `target_n`, the relative step of the ascent on the dual variable
            alpha: a budget that is exceeded by 100% raises `alpha * target_n` by this much per step.
        retention_range: lowest and highest fraction of the visual tokens. In a share of the steps the fraction is drawn
            from here, evenly on a logarithmic scale, instead of predicted, so that the model also serves whoever asks
            for a `retention`.
        retention_share: that share; the prediction learns in the other steps.

    > Distillation from a teacher's attention

        relevance_weight: weight of the divergence between the selector's scores and what the model itself, with all
            visual tokens, attends to while it answers. The scores then need no gradient of the gate: set `gate` of
            `qtsplus_config` to `"detached"`.
        relevance_heads: the (layer, head) pairs of the language model whose attention is summed, counted from 0; all if
            absent. `qtsplus calibrate` finds those that look at what an answer rests on.
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
    lora_rank: NonNegativeInt = 0
    lora_alpha: PositiveFloat = 32.0
    sft_loss: Literal["token_mean", "sum_of_sources"] = "token_mean"
    dual_learning_rate: NonNegativeFloat = 0.1
    retention_range: tuple[Fraction, Fraction] | None = None
    retention_share: Share = 0.5
    relevance_weight: NonNegativeFloat = 0.0
    relevance_heads: Heads | None = None
    relevance_positions: Literal["answer", "question", "both"] = "answer"
    max_skipped: Share = 0.1
    # The dataset's items are dictionaries of several records' needs, which only our collator understands.
    remove_unused_columns: bool = False

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            hint = " Or: --set training.bf16=false --set model.dtype=float32." if "bf16" in str(error) else ""
            raise ValueError(f"{error}{hint}") from error
        kinds = QTSplusTrainingArguments.__annotations__ | _RANGES
        types: dict = {name: (kind, ...) for name, kind in kinds.items()}
        ours = {name: getattr(self, name) for name in types}
        build("", create_model("Fields", __config__=STRICT, **types), ours)
        if self.max_steps == 0:
            raise ValueError("max_steps is 0; expected at least 1, or -1 to train for num_train_epochs.")
        if self.resume_from_checkpoint is not None:
            raise ValueError("resume_from_checkpoint has no effect here: use --resume, or trainer.train's argument.")
        retentions = self.retention_range
        if retentions is not None and retentions[0] > retentions[1]:
            raise ValueError(f"retention_range={retentions}: expected the lowest fraction first.")
        keeps_scores = self.freeze_selector or self.freeze_scores
        keeps_base = self.freeze_language_model and self.freeze_vision_model
        if self.lora_rank and (keeps_scores or not keeps_base):
            raise ValueError(
                "lora_rank trains adapters on a frozen language model, and the selector: leave "
                "freeze_language_model and freeze_vision_model true, freeze_selector and freeze_scores false."
            )
        if self.relevance_weight and keeps_scores:
            raise ValueError("relevance_weight teaches the scores: leave freeze_selector and freeze_scores false.")
