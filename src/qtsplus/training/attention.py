"""Attention distillation: the selector's scores learn from what the model attends to when it reads every visual token.

The teacher is the model itself, with all visual tokens and without re-encoding. Its language model runs as it always
does; in the chosen layers an attention function of our own notes a few rows beside it: those of the positions that
predict the answer. No layer's full attention matrix is ever held.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model.layout_qtsplus import lay_out
from ..model.lm_attention_qtsplus import full_attention_layers, reading_of
from ..model.prompt_qtsplus import Layout, SelectionInputs, find_questions, take_inputs
from .arguments import QTSplusTrainingArguments
from .dataset import IGNORED
from .lora import base_model

# A model that reads every visual token and re-encodes none.
EVERYTHING = {"selection": "all", "reencode": False, "retention": None, "max_visual_tokens": None}
NOTED_ATTENTION = "qtsplus_noted"
HeadsByLayer = Mapping[int, list[int] | None]  # `None` for all heads of a layer
REST = 1e-6  # the least share that is told from none, in float32


@dataclass(frozen=True)
class AttentionChoice:
    """Which attention of a language model is a target."""

    heads: Sequence[tuple[int, int]] | None = None  # (layer, head) pairs, counted from 0; all if `None`
    # Who looks: what predicts the answer, the "question"'s words, "both", each as much as the other, or of the "prompt"
    # what `lm_attention` looks from.
    positions: str = "answer"

    @classmethod
    def of(cls, args: QTSplusTrainingArguments) -> "AttentionChoice":
        """As a recipe has it."""
        return cls(args.relevance_heads, args.relevance_positions)

    def by_layer(self, language_model) -> HeadsByLayer:
        """
        The chosen heads of a language model; a `ValueError` for a layer that is not there or has no attention, and for
        a head that is not there.
        """
        layers = list(attention_modules(language_model))
        if self.heads is None:
            return dict.fromkeys(layers)
        most = language_model.config.num_attention_heads - 1
        chosen: dict[int, list[int]] = {}
        for layer, head in sorted(self.heads, key=itemgetter(0)):
            if layer not in layers:
                raise ValueError(
                    f"relevance_heads name layer {layer}; expected layers with attention, which are {layers}."
                )
            if not 0 <= head <= most:
                raise ValueError(f"relevance_heads name head {head}; expected heads from 0 to {most}.")
            chosen.setdefault(layer, []).append(head)
        return chosen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for as long as it lasts."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def answer_attention(
    model: nn.Module,
    inputs: Mapping,
    labels: Tensor,
    choice: AttentionChoice,
) -> list[Tensor]:
    """
    How a model in evaluation mode, with all visual tokens, shares its attention out among them while it answers: per
    row `[M_b]` float32, empty in rows without visual tokens or without an answer.

    The mean over positions, heads and layers of the softmax over all that a position sees; of it the visual tokens'
    part, so that it sums to what the text leaves. A row with earlier turns counts only its last answer, by `labels`
    `[B, S]` of the full prompt.
    """
    rows = note_attention(model, inputs, labels, choice)
    return [row.target() for row in rows]


@torch.no_grad()
def note_attention(
    model: nn.Module,
    inputs: Mapping,
    labels: Tensor,
    choice: AttentionChoice,
) -> "list[NotedRow]":
    """The rows of a batch, with the attention of [`answer_attention`] by head."""
    base = base_model(model).model
    groups = [choice.positions]
    if choice.positions == "both":
        groups = ["answer", "question"]
    with evaluating(model):
        visual, selection = take_inputs(dict(inputs))
        layout = lay_out(base, visual, inputs["input_ids"], inputs.get("attention_mask"))
        places = [_places(base, layout, selection.query_mask, labels, group) for group in groups]
        rows = [
            NotedRow(seen_from, row.candidates.to(labels.device))
            for row, seen_from in zip(layout.rows, zip(*places, strict=True), strict=True)
        ]
        with noting(base.language_model, rows, choice.by_layer(base.language_model)):
            model(**dict(inputs) | EVERYTHING, use_cache=False, logits_to_keep=1)
    return rows


def relevance_divergences(
    log_relevance: Sequence[Tensor],
    targets: Sequence[Tensor],
    null_token: bool = False,
) -> Tensor:
    """
    `KL(target || softmax(log r))` of each row `[M_b]` that has a target, both made to sum to 1: `[rows with a target]`.
    A target sums to at most 1, or is empty. With a `null_token` the sum of r learns the sum of the target too, as a
    second divergence: in one divergence over all tokens the sum would hardly count, because it is small in a pretrained
    model.
    """
    divergences = []
    for scores, target in zip(log_relevance, targets, strict=True):
        if len(target) == 0:
            continue
        target = target.to(scores.device, scores.dtype)
        mass = target.sum().clamp(min=REST)
        divergence = F.kl_div(scores.log_softmax(0), target / mass, reduction="sum")
        if null_token:
            divergence = divergence + _divergence_of_sums(scores, mass)
        divergences.append(divergence)
    if not divergences:
        return torch.zeros(0)
    return torch.stack(divergences)


def _divergence_of_sums(scores: Tensor, mass: Tensor) -> Tensor:
    """How far the sum of r is from the sum `mass` of its target, beside the null token that has the rest of both."""
    seen = scores.exp().sum()
    sums = torch.stack([mass, 1 - mass, seen, 1 - seen])
    sums = sums.clamp(min=REST)
    return F.kl_div(sums[2:].log(), sums[:2], reduction="sum")


def _last_answers(labels: Tensor, turn_end: int) -> Tensor:
    """
    `[B, S]` bool: the last run of supervised tokens in every row, without the token that ends the turn. That token
    rests on nothing in the video, and in a one-word answer it would be half.
    """
    supervised = labels != IGNORED
    gaps = ~supervised
    gaps_behind = gaps.flip(1).cumsum(1).flip(1)
    fewest = gaps_behind.masked_fill(gaps, labels.shape[1] + 1)
    fewest = fewest.amin(1, keepdim=True)
    last = gaps_behind == fewest
    return supervised & last & (labels != turn_end)


def check_relevance(model, args: QTSplusTrainingArguments) -> None:
    """Raises `ValueError` for a selector that is never asked, and for layers or heads that the model does not have."""
    if not args.relevance_weight:
        return
    selection = model.config.qtsplus_config.selection
    if selection != "qtsplus":
        raise ValueError(f"relevance_weight teaches the scores of selection='qtsplus', and here {selection=}.")
    AttentionChoice.of(args).by_layer(model.model.language_model)


# --- The rows, noted while the language model runs ---


@dataclass
class NotedRow:
    """One row of the batch, in places among its real tokens."""

    places: Sequence[Tensor]  # each [n], the tokens that are looked from; the mean of each counts alike
    visual: Tensor  # [M]
    columns: Tensor = field(init=False)  # [S_b] on the host, where the language model has the row's real tokens
    by_head: dict[int, Tensor] = field(default_factory=dict)  # per layer [heads, M], the attention so far

    @property
    def taught(self) -> bool:
        return all(map(len, self.places)) and len(self.visual) > 0

    def note(
        self,
        layer: int,
        heads: list[int] | None,
        queries: Tensor,
        keys: Tensor,
        scaling: float,
    ) -> None:
        """Adds a layer: queries `[heads, S, head_dim]` and keys `[kv_heads, S, head_dim]` of the language model."""
        if heads is not None:
            group = len(queries) // len(keys)
            keys = keys[[head // group for head in heads]]
            queries = queries[heads]
        # Layers may be on several devices.
        columns = self.columns.to(keys.device, non_blocking=True)
        visual = self.visual.to(keys.device)
        keys = keys[:, columns]
        by_places = []
        for places in self.places:
            places = places.to(keys.device)
            looking = queries[:, columns[places]]
            by_places.append(attention_to_tokens(looking, keys, places, visual, scaling))
        shares = torch.stack(by_places).mean(0)
        self.by_head[layer] = shares.to(self.visual.device)

    def target(self) -> Tensor:
        """`[M]`, the mean over heads and layers; empty where nothing was noted."""
        count = len(self.visual) if self.by_head else 0
        total = torch.zeros(count, device=self.visual.device)
        heads = 0
        for shares in self.by_head.values():
            total = total + shares.sum(0)
            heads += len(shares)
        return (total / max(1, heads)).float()


def attention_to_tokens(
    queries: Tensor,
    keys: Tensor,
    places: Tensor,
    tokens: Tensor,
    scaling: float,
) -> Tensor:
    """
    Causal attention to some `tokens` `[M]` of a sequence, with keys `[kv_heads, S, head_dim]`, from some of its
    `places` `[n]`, with queries `[heads, n, head_dim]`: `[heads, M]`, the mean over the places.
    """
    heads, count, _ = queries.shape
    length = keys.shape[1]
    device = keys.device
    precise = torch.promote_types(queries.dtype, torch.float32)
    total = torch.zeros(heads, len(tokens), dtype=precise, device=device)
    rows_at_once = max(1, 2**24 // (heads * length))
    for queries_of_block, block in zip(queries.split(rows_at_once, 1), places.split(rows_at_once), strict=True):
        rows = attention_rows(queries_of_block, keys, block, scaling)
        total += rows[..., tokens].sum(1)
    return total / count


def attention_rows(
    queries: Tensor,
    keys: Tensor,
    places: Tensor,
    scaling: float,
) -> Tensor:
    """Causal attention from some places of a sequence to all of it, `[heads, n, S]`; as in [`attention_to_tokens`]."""
    precise = torch.promote_types(queries.dtype, torch.float32)
    device = keys.device
    hidden = torch.arange(keys.shape[1], device=device) > places[:, None]
    with torch.autocast(device.type, enabled=False):
        groups = queries.to(precise).unflatten(0, (len(keys), -1))
        scores = (groups * scaling) @ keys.to(precise).transpose(1, 2)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1).flatten(0, 1)


def attention_modules(language_model) -> dict[int, nn.Module]:
    """By layer the full attention of all layers that have it; others are recurrent or see a window."""
    layers = full_attention_layers(language_model.config)
    return {index: language_model.layers[index].self_attn for index in layers}


def _places(
    model,
    layout: Layout,
    query_mask: Tensor | None,
    labels: Tensor,
    positions: str,
) -> list[Tensor]:
    """Per row, the places among its real tokens that are looked from; none in a row without an answer."""
    answers = []
    last_answers = _last_answers(labels.cpu(), model.config.turn_end_token_id)
    for answer, row in zip(last_answers, layout.rows, strict=True):
        predicting = answer[row.columns][1:]
        answers.append(predicting.nonzero()[:, 0])
    if positions == "answer":
        return answers
    if positions == "question":
        questions = find_questions(model, layout, query_mask)
        looking = [words.nonzero()[:, 0] for words in questions]
    else:
        looking = []
        for place in reading_of(model, layout, SelectionInputs(query_mask)).looking:
            places = [] if place is None else [place]
            looking.append(torch.tensor(places, dtype=torch.long))
    for index, answer in enumerate(answers):
        if len(answer):
            answers[index] = looking[index]
    return answers


@contextmanager
def noting(
    language_model,
    rows: Sequence[Any],
    chosen: HeadsByLayer,
) -> Iterator[None]:
    """While it lasts, every row of a batch notes the queries and keys of the chosen heads, as [`NotedRow`] does."""
    modules: dict[int, Any] = attention_modules(language_model)
    configs = {layer: modules[layer].config for layer in chosen}

    def find_columns(module, args, kwargs):
        mask = kwargs["attention_mask"]
        if mask is None:
            mask = torch.ones_like(kwargs["inputs_embeds"][..., 0])
        for row, columns in zip(rows, mask.cpu(), strict=True):
            row.columns = columns.nonzero()[:, 0]

    hook = language_model.register_forward_pre_hook(find_columns, with_kwargs=True)
    try:
        for layer, own in configs.items():
            # A copy, since all layers share one; the mask is still made for the model's own attention function.
            config = copy.copy(own)
            config._attn_implementation = NOTED_ATTENTION
            config.noted = {}
            for index, row in enumerate(rows):
                if row.taught:
                    config.noted[index] = partial(row.note, layer, chosen[layer])
            config.own_attention = own._attn_implementation
            modules[layer].config = config
        yield
    finally:
        hook.remove()
        for layer, own in configs.items():
            modules[layer].config = own


def noted_attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """The model's own attention function, after the rows have noted what they need; see [`answer_attention`]."""
    for row, note in module.config.noted.items():
        note(query[row], key[row], kwargs["scaling"])
    own = module.config.own_attention
    # Every model file has an "eager" of its own; the others compute the same from the same mask.
    if own == "eager":
        own = "sdpa"
    return ALL_ATTENTION_FUNCTIONS[own](module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(NOTED_ATTENTION, noted_attention_forward)
