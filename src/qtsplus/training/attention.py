"""Attention distillation: the selector's scores learn from what the model attends to when it reads every visual token.

The teacher is the model itself, with all visual tokens and without re-encoding. Its language model runs as it always
does; in the chosen layers an attention function of our own notes a few rows beside it: those of the positions that
predict the answer. No layer's full attention matrix is ever held.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model.layout_qtsplus import lay_out
from ..model.lm_attention_qtsplus import reading_of
from ..model.prompt_qtsplus import Layout, SelectionInputs, find_questions, take_inputs
from .arguments import QTSplusTrainingArguments
from .dataset import IGNORED
from .lora import base_model

# A model that reads every visual token and re-encodes none.
EVERYTHING = {"selection": "all", "reencode": False, "retention": None, "max_visual_tokens": None}
NOTED_ATTENTION = "qtsplus_noted"
REST = 1e-6  # the least share that is told from none, in float32


@dataclass(frozen=True)
class AttentionChoice:
    """Which attention of a language model is a target."""

    layers: tuple[int, ...] | None = None  # whose attention is summed over all heads, counted from 0; all if `None`
    heads: tuple[tuple[int, int], ...] | None = None  # (layer, head) pairs, in place of whole layers
    # Who looks: what predicts the answer, the "question"'s words, "both", each as much as the other, or of the "prompt"
    # what `lm_attention` looks from.
    positions: str = "answer"

    @classmethod
    def of(cls, args: QTSplusTrainingArguments) -> "AttentionChoice":
        """As a recipe has it."""
        layers, heads = args.relevance_layers, args.relevance_heads
        return cls(
            None if layers is None else tuple(layers),
            None if heads is None else tuple((layer, head) for layer, head in heads),
            args.relevance_positions,
        )

    @property
    def chosen_layers(self) -> tuple[int, ...] | None:
        """The layers that are read, in order; `None` for all of them."""
        return self.layers if self.heads is None else tuple(sorted({layer for layer, _ in self.heads}))

    def of_layer(self, layer: int) -> list[int] | None:
        """The heads of a chosen layer that count; `None` for all of them."""
        return None if self.heads is None else [head for place, head in self.heads if place == layer]


EVERY_LAYER = AttentionChoice()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for as long as it lasts."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def answer_attention(
    model: nn.Module, inputs: Mapping[str, Any], labels: torch.Tensor, choice: AttentionChoice = EVERY_LAYER
) -> list[torch.Tensor]:
    """
    How a model in evaluation mode, with all visual tokens, shares its attention out among them while it answers: per
    row `[M_b]` float32, empty in rows without visual tokens or without an answer.

    The mean over positions, heads and layers of the softmax over all that a position sees; of it the visual tokens'
    part, so that it sums to what the text leaves. A row with earlier turns counts only its last answer, by `labels`
    `[B, S]` of the full prompt.
    """
    with evaluating(model), noting_attention(model, inputs, labels, choice) as rows:
        model(**{**inputs, **EVERYTHING}, use_cache=False, logits_to_keep=1)
    return [row.target() for row in rows]


def relevance_divergences(
    log_relevance: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], null_token: bool = False
) -> torch.Tensor:
    """
    `KL(target || softmax(log r))` of each row `[M_b]` that has a target, both made to sum to 1: `[rows with a target]`;
    a `ValueError` for one of other visual tokens than were scored. A target sums to at most 1, or is empty. With a
    `null_token` its sum is taught to that of r too, apart: one divergence of all would count the choice among the
    tokens by their sum, which is small in a pretrained model.
    """
    divergences = []
    for row, (scores, target) in enumerate(zip(log_relevance, targets, strict=True)):
        if not len(target):
            continue
        if len(scores) != len(target):
            raise ValueError(f"Row {row} has {len(target)} targets for {len(scores)} scored visual tokens.")
        target = target.to(scores.device, scores.dtype)
        mass, seen = target.sum().clamp(min=REST), scores.exp().sum()
        divergence = F.kl_div(scores.log_softmax(0), target / mass, reduction="sum")
        if null_token:
            sums = torch.stack([mass, 1 - mass, seen, 1 - seen]).clamp(min=REST)
            divergence = divergence + F.kl_div(sums[2:].log(), sums[:2], reduction="sum")
        divergences.append(divergence)
    return torch.stack(divergences) if divergences else torch.zeros(0)


def _last_answers(labels: torch.Tensor, turn_end: int) -> torch.Tensor:
    """
    `[B, S]` bool: of every row's supervised tokens the last ones without a gap, but for what ends the turn. That rests
    on nothing, and of a one-word answer it would be half.
    """
    supervised = labels != IGNORED
    gaps_behind = (~supervised).flip(1).cumsum(1).flip(1)
    fewest = gaps_behind.masked_fill(~supervised, labels.shape[1] + 1).amin(1, keepdim=True)
    return supervised & (gaps_behind == fewest) & (labels != turn_end)


def check_relevance(model: Any, args: QTSplusTrainingArguments) -> None:
    """Raises `ValueError` for a selector that is never asked, and for layers or heads that the model does not have."""
    if not args.relevance_weight:
        return
    selection = model.config.qtsplus_config.selection
    if selection != "qtsplus":
        raise ValueError(f"relevance_weight teaches the scores of selection='qtsplus', and here {selection=}.")
    attention_modules(model.model.language_model, AttentionChoice.of(args))


# --- The rows, noted while the language model runs ---


@dataclass
class _Row:
    """One row of the batch, in places among its real tokens."""

    places: list[torch.Tensor]  # each [n], the tokens that are looked from; the mean of each counts alike
    visual: torch.Tensor  # [M]
    columns: torch.Tensor | None = None  # [S_b], where the language model has the row's real tokens
    attention: torch.Tensor | None = None  # [M], summed over heads and layers so far
    heads: int = 0  # how many those are
    by_head: dict[int, torch.Tensor] | None = None  # per layer [heads, M], where that is asked for

    @property
    def taught(self) -> bool:
        return all(map(len, self.places)) and len(self.visual) > 0

    def note(
        self,
        layer: int,
        heads: list[int] | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> None:
        """Adds a layer: queries `[heads, S, head_dim]` and keys `[kv_heads, S, head_dim]` of the language model."""
        assert self.columns is not None
        # Layers may lie on several devices.
        columns, visual = self.columns.to(keys.device), self.visual.to(keys.device)
        if heads is not None:
            keys = keys[[head * len(keys) // len(queries) for head in heads]]
            queries = queries[heads]
        keys, parts = keys[:, columns], [places.to(keys.device) for places in self.places]
        each = [attention_to_tokens(queries[:, columns[p]], keys, p, visual, scaling, window) for p in parts]
        shares = torch.stack(each).mean(0).to(self.visual.device)
        self.attention = shares.sum(0) if self.attention is None else self.attention + shares.sum(0)
        self.heads += len(shares)
        if self.by_head is not None:
            self.by_head[layer] = shares

    def target(self) -> torch.Tensor:
        if self.attention is None:
            return torch.zeros(0, device=self.visual.device)
        return (self.attention / self.heads).float()


def attention_to_tokens(
    queries: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """
    Causal attention to some `tokens` `[M]` of a sequence, with keys `[kv_heads, S, head_dim]`, from some of its
    `places` `[n]`, with queries `[heads, n, head_dim]`: `[heads, M]`, the mean over the places. Each sees a `window` of
    tokens, itself included; all before it if `None`.
    """
    (heads, count, _), length = queries.shape, keys.shape[1]
    precise = torch.promote_types(queries.dtype, torch.float32)
    total = torch.zeros(heads, len(tokens), dtype=precise, device=keys.device)
    for block in torch.arange(count, device=keys.device).split(max(1, 2**24 // (heads * length))):
        total += attention_rows(queries[:, block], keys, places[block], scaling, window)[..., tokens].sum(1)
    return total / count


def attention_rows(
    queries: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, scaling: float, window: int | None = None
) -> torch.Tensor:
    """Causal attention from some places of a sequence to all of it, `[heads, n, S]`; as in [`attention_to_tokens`]."""
    precise = torch.promote_types(queries.dtype, torch.float32)
    distance = places[:, None] - torch.arange(keys.shape[1], device=keys.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    with torch.autocast(keys.device.type, enabled=False):
        grouped = queries.to(precise).unflatten(0, (len(keys), -1)) * scaling
        scores = grouped @ keys.to(precise).transpose(1, 2)[:, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).flatten(0, 1)


def attention_modules(language_model: Any, choice: AttentionChoice = EVERY_LAYER) -> dict[int, Any]:
    """
    By layer the attention of the chosen layers of a language model, or of all that have one (others are recurrent); a
    `ValueError` for a layer that is not there or has no attention, or a head that is not there.
    """
    found = {index: layer.self_attn for index, layer in enumerate(language_model.layers) if hasattr(layer, "self_attn")}
    unknown = [layer for layer in choice.layers or () if layer not in found]
    if unknown:
        raise ValueError(f"relevance_layers has {unknown}: expected layers with attention, of {list(found)}.")
    for layer, head in choice.heads or ():
        if layer not in found or not 0 <= head < found[layer].config.num_attention_heads:
            heads = language_model.config.num_attention_heads
            raise ValueError(
                f"relevance_heads has [{layer}, {head}]: expected pairs of a layer with attention, of {list(found)}, "
                f"and of a head from 0 to {heads - 1}."
            )
    return {layer: found[layer] for layer in (found if choice.chosen_layers is None else choice.chosen_layers)}


def _places(
    model: Any, layout: Layout, query_mask: torch.Tensor | None, labels: torch.Tensor, positions: str
) -> list[torch.Tensor]:
    """Per row, the places among its real tokens that are looked from; none in a row without an answer."""
    pairs = zip(_last_answers(labels, model.config.turn_end_token_id), layout.rows, strict=True)
    answers = [answer[row.columns][1:].nonzero()[:, 0] for answer, row in pairs]
    if positions == "answer":
        return answers
    if positions == "question":
        looking = [words.nonzero()[:, 0] for words in find_questions(model, layout, query_mask)]
    else:
        looking = reading_of(model, layout, SelectionInputs(query_mask)).looking
    return [places[: len(places) * bool(len(answer))] for places, answer in zip(looking, answers, strict=True)]


@contextmanager
def noting_attention(
    model: nn.Module,
    inputs: Mapping[str, Any],
    labels: torch.Tensor,
    choice: AttentionChoice = EVERY_LAYER,
    by_head: bool = False,
) -> Iterator[list[_Row]]:
    """While it lasts, a pass over these inputs with all tokens notes what [`answer_attention`] needs."""
    base = base_model(model).model
    visual, selection = take_inputs(dict(inputs))
    layout = lay_out(base, visual, inputs["input_ids"], inputs.get("attention_mask"))
    groups = ("answer", "question") if choice.positions == "both" else (choice.positions,)
    places = zip(*(_places(base, layout, selection.query_mask, labels, group) for group in groups), strict=True)
    rows = [
        _Row(list(seen_from), row.candidates, by_head={} if by_head else None)
        for seen_from, row in zip(places, layout.rows, strict=True)
    ]
    with noting(base.language_model, rows, choice):
        yield rows


@contextmanager
def noting(language_model: Any, rows: Sequence[Any], choice: AttentionChoice = EVERY_LAYER) -> Iterator[None]:
    """While it lasts, every row of a batch takes notes of each chosen layer's queries and keys, as [`_Row`] does."""
    modules = attention_modules(language_model, choice)
    configs = {layer: module.config for layer, module in modules.items()}

    def find_columns(module, args, kwargs):
        mask, embeds = kwargs["attention_mask"], kwargs["inputs_embeds"]
        real = torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask
        for row, columns in zip(rows, real, strict=True):
            row.columns = columns.nonzero()[:, 0]

    hook = language_model.register_forward_pre_hook(find_columns, with_kwargs=True)
    try:
        for layer, module in modules.items():
            # A copy, since all layers share one; the mask is still made for the model's own attention function.
            module.config = copy.copy(configs[layer])
            module.config._attn_implementation = NOTED_ATTENTION
            module.config.noted = [partial(row.note, layer, choice.of_layer(layer)) for row in rows if row.taught]
            module.config.noted_rows = [index for index, row in enumerate(rows) if row.taught]
            module.config.own_attention = configs[layer]._attn_implementation
        yield
    finally:
        hook.remove()
        for layer, module in modules.items():
            module.config = configs[layer]


def noted_attention_forward(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention function, after the rows have noted what they need; see [`answer_attention`]."""
    for note, row in zip(module.config.noted, module.config.noted_rows, strict=True):
        note(query[row], key[row], kwargs["scaling"], kwargs.get("sliding_window"))
    own = module.config.own_attention
    # Every model file has an "eager" of its own; the others compute the same from the same mask.
    function = ALL_ATTENTION_FUNCTIONS["sdpa" if own == "eager" else own]
    return function(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(NOTED_ATTENTION, noted_attention_forward)
