"""Attention distillation: the selector's scores learn from what the model attends to when it reads every visual token.

The teacher is the model itself, with all visual tokens and without re-encoding. Its language model runs as it always
does; in the chosen layers an attention function of our own notes a few rows beside it: those of the positions that
predict the answer. No layer's full attention matrix is ever held.
"""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import send_to_device
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..inputs_qtsplus import take_inputs
from .collator import VideoQACollator
from .dataset import IGNORED, SkippedRecord, VideoQADataset
from .distillation import EVERYTHING, evaluating
from .features import AttentionTargets, fingerprint, write_tensors
from .lora import base_model

NOTED_ATTENTION = "qtsplus_noted"


@torch.no_grad()
def answer_attention(
    model: nn.Module, inputs: Mapping[str, Any], labels: torch.Tensor, layers: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """
    How the model with all visual tokens shares its attention out among them while it answers.

    The mean over heads and over the positions that predict the answer, summed over the layers, of the softmax over all
    that a position sees; of it the visual tokens' part, which is made to sum to 1. A row with earlier turns counts its
    last answer alone: the others answer other questions.

    Args:
        model: a QTSplus model, or a `PeftModel` of one; put into evaluation mode for as long.
        inputs: the model's, with `input_ids` `[B, S]`.
        labels: `[B, S]` of the full prompt.
        layers: of the language model, counted from 0; all if `None`.

    Returns:
        per row `[M_b]` float32, empty in rows without visual tokens or without an answer.
    """
    base = base_model(model)
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids) if inputs.get("attention_mask") is None else inputs["attention_mask"]
    visual, _ = take_inputs(dict(inputs))
    candidates = base.model.candidates(ids, mask, visual)
    answers = [row[real][1:].nonzero()[:, 0] for row, real in zip(_last_answers(labels), mask.bool(), strict=True)]
    rows = [_Row(answer, tokens) for answer, tokens in zip(answers, candidates, strict=True)]
    with evaluating(model), _noting(base.model.language_model, layers, rows):
        model(**{**inputs, **EVERYTHING}, use_cache=False, logits_to_keep=1)
    return [row.target() for row in rows]


def relevance_divergences(log_relevance: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """
    `KL(target || softmax(log r))` of each row that has a target.

    Args:
        log_relevance, targets: per row `[M_b]` float32; a target sums to 1, or is empty.

    Returns:
        `[rows with a target]`.

    Raises:
        ValueError: a target for other visual tokens than were scored.
    """
    divergences = []
    for row, (scores, target) in enumerate(zip(log_relevance, targets, strict=True)):
        if not len(target):
            continue
        if len(scores) != len(target):
            raise ValueError(f"Row {row} has {len(target)} targets for {len(scores)} scored visual tokens.")
        target = target.to(scores.device, scores.dtype)
        divergences.append((torch.xlogy(target, target) - target * scores.log_softmax(0)).sum())
    return torch.stack(divergences) if divergences else torch.zeros(0)


def _last_answers(labels: torch.Tensor) -> torch.Tensor:
    """`[B, S]` bool: of every row's supervised tokens the last ones without a gap."""
    supervised = labels != IGNORED
    gaps_behind = (~supervised).flip(1).cumsum(1).flip(1)
    fewest = gaps_behind.masked_fill(~supervised, labels.shape[1] + 1).amin(1, keepdim=True)
    return supervised & (gaps_behind == fewest)


def note_targets(
    model: Any,
    dataset: VideoQADataset,
    collator: VideoQACollator,
    folder: str | os.PathLike,
    layers: Sequence[int] | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> AttentionTargets:
    """
    [`answer_attention`] of every example that `folder` does not hold yet, for a teacher that training never changes;
    every process of a distributed run takes its share. The dataset then gives the targets with its examples.

    Args:
        model: the teacher, used where it is.
        dataset: with features, whose identity is the videos'.
        folder: one that may be shared by runs; targets of another model or of other layers are never mistaken.
        autocast_dtype: as mixed-precision training would.
    """
    assert dataset.features is not None
    selector = model.config.qtsplus_config
    settings = [
        dataset.features.folder.name,
        layers,
        selector.select_images,
        selector.position_ids,
        str(autocast_dtype),
    ]
    name = fingerprint({"language_model": model.model.language_model}, settings)
    targets = AttentionTargets(Path(folder) / f"attention-{name}", dataset.features)
    targets.folder.mkdir(parents=True, exist_ok=True)
    dataset.targets = targets
    state = PartialState()
    mine = range(state.process_index, len(dataset), state.num_processes)
    device = next(model.parameters()).device
    bar = track(
        mine, "Reading with all tokens", disable=not state.is_main_process, console=Console(stderr=True), transient=True
    )
    with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
        for index in bar:
            record, example = dataset.records[index], dataset[index]
            if isinstance(example, SkippedRecord) or record.video is None or "attention" in example:
                continue
            batch = collator([example])
            given = {key: send_to_device(batch[key], device) for key in batch if key not in ("skipped", "source_ids")}
            (attention,) = answer_attention(model, given, given.pop("labels"), layers)
            path = targets.file(record.video, record.fps, example["input_ids"], example["labels"])
            write_tensors(path, {"attention": attention.cpu()})
    state.wait_for_everyone()
    return targets


# --------------------------------------------------------------------------------------------------------------------
# The rows, noted while the language model runs
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class _Row:
    """
    One row of the batch, in places among its real tokens.

    Args:
        answer: `[n]`, the tokens that predict the answer's.
        visual: `[M]`.
        columns: `[S_b]`, where the language model has the row's real tokens.
        attention: `[M]`, summed over the layers so far.
    """

    answer: torch.Tensor
    visual: torch.Tensor
    columns: torch.Tensor | None = None
    attention: torch.Tensor | None = None

    @property
    def taught(self) -> bool:
        return len(self.answer) > 0 and len(self.visual) > 0

    def note(self, queries: torch.Tensor, keys: torch.Tensor, scaling: float, window: int | None) -> None:
        """Adds a layer: queries `[heads, S, head_dim]` and keys `[kv_heads, S, head_dim]` of the language model."""
        assert self.columns is not None
        # Layers may lie on several devices.
        columns, answer, visual = (places.to(keys.device) for places in (self.columns, self.answer, self.visual))
        attention = attention_to_tokens(queries[:, columns[answer]], keys[:, columns], answer, visual, scaling, window)
        attention = attention.to(self.visual.device)
        self.attention = attention if self.attention is None else self.attention + attention

    def target(self) -> torch.Tensor:
        if self.attention is None:
            return torch.zeros(0, device=self.visual.device)
        return (self.attention / self.attention.sum().clamp(min=torch.finfo(torch.float32).tiny)).float()


def attention_to_tokens(
    queries: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """
    Causal attention from some places of a sequence to some of its tokens: the mean over heads and places, `[M]`.

    Args:
        queries: `[heads, n, head_dim]`, those of `places` alone.
        keys: `[kv_heads, S, head_dim]`, all of them.
        places: `[n]`, where the queries stand.
        tokens: `[M]`, where the tokens stand.
        scaling: of the scores.
        window: how many tokens a place sees, itself included; all before it if `None`.
    """
    (heads, count, _), (kv_heads, length, _) = queries.shape, keys.shape
    precise = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.to(precise).unflatten(0, (kv_heads, -1)) * scaling
    keys = keys.to(precise).transpose(1, 2)[:, None]
    order = torch.arange(length, device=keys.device)
    total = torch.zeros(len(tokens), dtype=precise, device=keys.device)
    with torch.autocast(keys.device.type, enabled=False):
        for block in torch.arange(count, device=keys.device).split(max(1, 2**24 // (heads * length))):
            distance = places[block, None] - order
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            scores = (grouped[:, :, block] @ keys).masked_fill(hidden, -torch.inf)
            total += scores.softmax(-1)[..., tokens].sum((0, 1, 2))
    return total / (heads * count)


def attention_modules(language_model: Any, layers: Sequence[int] | None) -> list[Any]:
    """
    The attention of some layers of a language model, or of all that have one (others are recurrent).

    Raises:
        ValueError: a layer that is not there, or has no attention.
    """
    found = {index: layer.self_attn for index, layer in enumerate(language_model.layers) if hasattr(layer, "self_attn")}
    unknown = [layer for layer in layers or () if layer not in found]
    if unknown:
        raise ValueError(f"relevance_layers has {unknown}: expected layers with attention, of {list(found)}.")
    return list(found.values()) if layers is None else [found[layer] for layer in layers]


@contextmanager
def _noting(language_model: Any, layers: Sequence[int] | None, rows: list[_Row]) -> Iterator[None]:
    """While it lasts, the chosen layers note their attention in `rows`."""
    modules = attention_modules(language_model, layers)
    configs = [module.config for module in modules]

    def find_columns(module, args, kwargs):
        mask, embeds = kwargs["attention_mask"], kwargs["inputs_embeds"]
        real = torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask
        for row, columns in zip(rows, real, strict=True):
            row.columns = columns.nonzero()[:, 0]

    hook = language_model.register_forward_pre_hook(find_columns, with_kwargs=True)
    try:
        for module, config in zip(modules, configs, strict=True):
            # A copy, since all layers share one; the mask is still made for the model's own attention function.
            module.config = copy.copy(config)
            module.config._attn_implementation = NOTED_ATTENTION
            module.config.noted_rows = rows
            module.config.own_attention = config._attn_implementation
        yield
    finally:
        hook.remove()
        for module, config in zip(modules, configs, strict=True):
            module.config = config


def noted_attention_forward(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention function, after the rows have noted what they need; see [`answer_attention`]."""
    for row, queries, keys in zip(module.config.noted_rows, query, key, strict=True):
        if row.taught:
            row.note(queries, keys, kwargs["scaling"], kwargs.get("sliding_window"))
    own = module.config.own_attention
    # Every model file has an "eager" of its own; the others compute the same from the same mask.
    function = ALL_ATTENTION_FUNCTIONS["sdpa" if own == "eager" else own]
    return function(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(NOTED_ATTENTION, noted_attention_forward)

__all__ = ["answer_attention", "attention_modules", "attention_to_tokens", "note_targets", "relevance_divergences"]
