"""The library's Trainer with dense supervision of a small base, and with Muon for its matrices."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from qtsplus.training.freezing import part_of
from qtsplus.training.lora import base_model
from qtsplus.training.trainer import QTSplusTrainer

from .arguments import TinyWorldTrainingArguments
from .dataset import TinyWorldCollator, TinyWorldDataset
from .looking import LOOKS, Looks, looking_losses, watching
from .muon import MuonBeside, matrix_names, split_matrices
from .naming import TokenWords, naming_losses, with_features
from .rivals import Rivals, watching_scores
from .targets import note_targets


class TinyWorldTrainer(QTSplusTrainer):
    """
    Adds to the objective of [`QTSplusTrainer`]

        naming_weight * naming + looking_weight * looking + sparing_weight * sparing,

    dense supervision of a base ([`naming_losses`], [`looking_losses`]): means over the samples with visual tokens. They
    are logged as `loss_naming`, `loss_looking`, `loss_following` and `loss_sparing`. With `rivals`
    the relevance stage has its divergence once more, over the tokens of other videos too (`loss_rivals`).

    Args:
        model: as for [`QTSplusTrainer`].
        args: see [`TinyWorldTrainingArguments`].
        kwargs: as for [`QTSplusTrainer`].
    """

    arguments_class = TinyWorldTrainingArguments
    dataset_class = TinyWorldDataset
    collator_class = TinyWorldCollator
    _others = ("loss_naming", "loss_rivals")
    loss_names = (*QTSplusTrainer.loss_names, *_others, *(f"loss_{kind}" for kind in LOOKS))

    args: TinyWorldTrainingArguments
    _watched: Any = None  # what the next pass is to be watched for

    def __init__(self, model: nn.Module, args: TinyWorldTrainingArguments, **kwargs: Any):
        super().__init__(model, args, **kwargs)
        if isinstance(self.train_dataset, TinyWorldDataset):
            self.train_dataset.dense = max(args.naming_weight, args.looking_weight, args.sparing_weight) > 0
            self.train_dataset.about = args.rivals > 0
            if args.relevance_weight:
                self._keep_targets(self.train_dataset)

    def _keep_targets(self, dataset: TinyWorldDataset) -> None:
        """Has a base that does not train read every record once, before training."""
        if dataset.features is not None and self.args.freeze_language_model and not self.args.lora_rank:
            dataset.targets = note_targets(self.model.to(self.args.device), dataset, self.args)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """
        As ever, with what a batch's `token_words` and `needles` teach; the attention that teaches the scores is kept
        for rivals. A base that keeps everything learns to read with gaps.
        """
        inputs = dict(inputs)
        self._rivals = Rivals(inputs.get("about", ()), inputs.get("attention", ()))
        token_words, needles, *_ = (inputs.pop(name, None) for name in ("token_words", "needles", "about", "attention"))
        if model.training and self._retention is not None and self.selector_config.selection == "all":
            inputs["selection"] = "random"
        named = token_words is not None and model.training and self.args.naming_weight > 0
        if named:
            inputs = with_features(base_model(self.model), inputs)
        self._watched = needles, token_words
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            assert self._counts is not None
            labels, samples = inputs["labels"], self._counts.with_vision.clamp(min=1)
            inputs = {name: inputs[name] for name in inputs.keys() - {"labels", "source_ids", "skipped"}}
            further = self._dense_losses(inputs, labels, token_words if named else None, self._looks, outputs)
            for name, (weight, losses) in further.items():
                loss = loss + weight * losses.sum() / samples * self.accelerator.num_processes
                self.running[True].add(name, losses)
            outputs["loss"] = loss
        return (loss, outputs) if return_outputs else loss

    def answer(self, model, inputs, labels, smoothing=0.0):
        """As ever; the first pass over a micro-batch is watched."""
        watched, self._watched = self._watched, None
        if watched is None:
            return super().answer(model, inputs, labels, smoothing)
        with watching_scores(self.selector, self._rivals), self._watching(inputs, labels, *watched) as self._looks:
            return super().answer(model, inputs, labels, smoothing)

    def attention_targets(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> Sequence[torch.Tensor]:
        """What is kept, or else what the model attends to now."""
        if getattr(self.train_dataset, "targets", None) is None:
            return super().attention_targets(inputs, labels)
        return self._rivals.targets or [torch.zeros(0)] * len(labels)

    def _watching(
        self, inputs: Mapping[str, Any], labels: torch.Tensor, needles: Any, token_words: Any
    ) -> AbstractContextManager[Sequence[Looks]]:
        """Notes who looks how far at what, where that is taught and no token is left out."""
        args = self.args
        taught = self.model.training and max(args.looking_weight, args.sparing_weight) > 0
        if needles is None or not taught or "retention" in inputs:
            return nullcontext(())
        return watching(base_model(self.model), inputs, labels, needles, args.looking_layer, token_words)

    def _dense_losses(
        self,
        inputs: Mapping[str, Any],
        labels: torch.Tensor,
        token_words: Sequence[TokenWords | None] | None,
        looks: Sequence[Looks],
        outputs: Any,
    ) -> dict[str, tuple[float, torch.Tensor]]:
        """By name the weight, and the losses of the rows that have any."""
        args, found = self.args, {}
        if token_words is not None:
            losses = naming_losses(base_model(self.model), inputs, labels, outputs, token_words, args.looking_layer)
            found["loss_naming"] = args.naming_weight, losses
        for kind in LOOKS:
            weight = args.sparing_weight if kind == "sparing" else args.looking_weight
            losses = looking_losses(looks, kind, args.looking_share if kind == "looking" else None)
            if weight and len(losses):
                found[f"loss_{kind}"] = weight, losses
        if args.rivals and args.relevance_weight and self._rivals.about:
            null_token = self.selector_config.null_token
            losses = self._rivals.divergences(self.selector, args.rivals, null_token).to(labels.device)
            found["loss_rivals"] = args.relevance_weight, losses
        return found

    def _groups(self, model: Any) -> list[dict[str, Any]]:
        """The optimizer's groups: with weight decay or without, of the language model or of other parts."""
        decayed = self.get_decay_parameter_names(model)
        rates = self.args.learning_rate, self.args.language_model_learning_rate or self.args.learning_rate
        groups: dict[tuple[bool, bool], dict[str, Any]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                own = part_of(name) == "language_model"
                decays = name in decayed
                group = {"params": [], "weight_decay": self.args.weight_decay * decays, "lr": rates[own]}
                groups.setdefault((own, decays), group)["params"].append(parameter)
        return list(groups.values())

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As ever; with the language model's own rate, and with a `muon_scale` Muon for the matrices."""
        args = self.args
        if (args.muon_scale is None and args.language_model_learning_rate is None) or self.optimizer is not None:
            return super().create_optimizer(model)
        model = self.model if model is None else model
        kind, settings = self.get_optimizer_cls_and_kwargs(args, model)
        groups = self._groups(model)
        names = set() if args.muon_scale is None else matrix_names(model)
        matrices = [parameter for name, parameter in model.named_parameters() if name in names]
        by_muon, others = split_matrices(groups, matrices, args.muon_scale or 1)
        self.optimizer = kind(others, **settings)
        if by_muon:
            self.optimizer = MuonBeside(by_muon, self.optimizer)
        return self.optimizer
