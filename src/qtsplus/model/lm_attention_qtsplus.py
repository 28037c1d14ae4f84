"""Which visual tokens the language model itself attends to: `Candidates.log_attention`, for selection without training.

A row's visual tokens are dealt into groups of frames that lie apart, so that every group sees the whole span of time.
Each group runs with the prompt's text through the first layers of the language model, up to layer k. There the last
word of the prompt, from which the answer begins, looks at the group's tokens; nobody else's attention is computed. So
FlexSelect does (arXiv 2506.00993); here groups are compared by how much attention each takes from the same text.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from .layout_qtsplus import QTSplusBackboneMixin, lay_out_again
from .methods_qtsplus import no_question, take_rows
from .prompt_qtsplus import Features, Grid, Layout, PromptRow, SelectionInputs, find_questions, given_queries, splice
from .selector_qtsplus import QTSplusOutput

DEPTH = 0.65  # of the layers: where published work reads (18 and 19 of 28, 23 of 36), unless a model was calibrated
READING_ATTENTION = "qtsplus_reading"

# --- Which layer and which heads ---


def attention_layer(text_config: Any, layer: int | None = None) -> int:
    """
    The layer whose attention is read, counted from 0: the given one, or the full-attention layer nearest to [`DEPTH`].
    `ValueError` for one that is not there or has no full attention.
    """
    depth, full = text_config.num_hidden_layers, full_attention_layers(text_config)
    if layer is None:
        return min(full, key=lambda index: (abs(index - int(DEPTH * depth)), index))
    if layer not in full:
        kind = f"is {text_config.layer_types[layer]}" if 0 <= layer < depth else f"is none of the {depth} layers"
        raise ValueError(
            f"QTSplusConfig got attention_layer={layer}, which {kind}; expected a layer of the language model with "
            f"full attention, one of {full}."
        )
    return layer


def full_attention_layers(text_config: Any) -> list[int]:
    """Those that a language model has, counted from 0; others are recurrent, or see a window."""
    types = getattr(text_config, "layer_types", None) or ["full_attention"] * text_config.num_hidden_layers
    return [index for index, kind in enumerate(types) if kind == "full_attention"]


def check_attention(text_config: Any, selector: Any) -> None:
    """Raises `ValueError` for an `attention_layer` or `attention_heads` that this language model does not have."""
    if selector.attention_layer is not None:
        attention_layer(text_config, selector.attention_layer)
    heads, count = selector.attention_heads or (), text_config.num_attention_heads
    if any(not 0 <= head < count for head in heads):
        raise ValueError(f"QTSplusConfig got attention_heads={list(heads)}; expected heads from 0 to {count - 1}.")


# --- Groups ---


def frame_groups(grids: Sequence[Sequence[int]], group_size: int, device: Any = None) -> tuple[torch.Tensor, ...]:
    """
    `[m]` int64, ascending, the tokens of each group of frames, which are dealt in turn as cards: at most `group_size`
    of them, or one frame, of videos of (time, height, width) tokens.
    """
    sizes = torch.tensor([height * width for time, height, width in grids for _ in range(time)], device=device)
    count = -(-len(sizes) // max(1, group_size // int(sizes.max())))
    groups = (torch.arange(len(sizes), device=device) % count).repeat_interleave(sizes)
    return groups.sort(stable=True).indices.split(groups.bincount().tolist())


@dataclass
class GroupAttention:
    """What the last words of a prompt see of one group. Attention is the softmax over all that they see."""

    log_weights: torch.Tensor  # [m] float32, log of the attention to each of its tokens, the mean over heads and words
    log_odds: torch.Tensor  # [heads, words], the log-sum-exp of the scores of its tokens less that of the text's


def look(
    queries: torch.Tensor, keys: torch.Tensor, looking: torch.Tensor, visual: torch.Tensor, scaling: float
) -> GroupAttention:
    """
    What words at `looking` `[P]`, with `[heads, P, head_dim]` queries, see of a group's tokens at `visual` `[m]` among
    `[kv_heads, S, head_dim]` keys.
    """
    with torch.autocast(keys.device.type, enabled=False):
        grouped = queries.float().unflatten(0, (len(keys), -1)) * scaling
        scores = (grouped.flatten(1, 2) @ keys.float().transpose(1, 2)).view(*queries.shape[:2], -1)
        hidden = torch.arange(keys.shape[1], device=keys.device) > looking[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        seen = scores[..., visual]
        text = scores.index_fill(-1, visual, -torch.inf).logsumexp(-1)
        together = seen.logsumexp(-1)
        log_weights = (seen - torch.logaddexp(together, text)[..., None]).flatten(0, 1).logsumexp(0)
        return GroupAttention(log_weights - torch.tensor(float(text.numel())).log(), together - text)


# --- The first layers of the language model ---


class LayerReader(nn.Module):
    """Stands in place of a layer of the language model: has its queries and keys read, and computes no more."""

    def __init__(self, layer: Any, read: Callable[[torch.Tensor, torch.Tensor, float], None]):
        super().__init__()
        # A copy that shares the weights, so that nothing of the model itself is changed.
        attention: Any = copy.copy(layer.self_attn)
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = READING_ATTENTION
        attention.read = read
        self.input_layernorm, self.self_attn = layer.input_layernorm, attention

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        # A layer may live elsewhere.
        rotary = tuple(part.to(normed.device) for part in kwargs.pop("position_embeddings"))
        attention = self.self_attn
        # The class's own forward: a hook on the model's attention would run that.
        type(attention).forward(attention, hidden_states=normed, position_embeddings=rotary, **kwargs)
        return hidden_states


def reading_attention_forward(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Has queries `[1, heads, S, head_dim]` and keys read; attends to nothing."""
    module.read(query[0], key[0], kwargs["scaling"])
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register(READING_ATTENTION, reading_attention_forward)


@dataclass
class Reading:
    """The prompts of a batch as they are read: with the questions that select."""

    layout: Layout
    looking: list[torch.Tensor]  # per row [P], the tokens that look, among its real ones


def reading_of(model: QTSplusBackboneMixin, layout: Layout, selection: SelectionInputs) -> Reading:
    """The prompts with the questions that select: one that is passed apart replaces the prompt's own."""
    questions = find_questions(model, layout, selection.query_mask)
    queries = given_queries(selection, len(layout.rows))
    if queries is not None:
        layout, questions = _with_queries(model, layout, questions, queries)
    rows = zip(layout.input_ids, layout.rows, questions, strict=True)
    return Reading(layout, [_looking(model, ids[row.columns], question, row.candidates) for ids, row, question in rows])


def _with_queries(
    model: QTSplusBackboneMixin, layout: Layout, questions: Sequence[torch.Tensor], queries: Sequence[torch.Tensor]
) -> tuple[Layout, list[torch.Tensor]]:
    """The layout of the prompts with other questions in place of their own, and which of its tokens those are."""
    prompts, starts = [], []
    for ids, mask, row, asked, new in zip(layout.input_ids, layout.mask, layout.rows, questions, queries, strict=True):
        text = mask.clone().bool()
        words = row.columns[asked]
        text[words] = False
        start = int(words[0]) if len(words) else len(ids)
        front, behind = ids[:start][text[:start]], ids[start:][text[start:]]
        prompts.append(torch.cat([front, new.to(ids), behind]))
        starts.append(len(front))
    again, masks = lay_out_again(model, layout, prompts), []
    for row, start, query in zip(again.rows, starts, queries, strict=True):
        masks.append((row.columns >= start) & (row.columns < start + len(query)))
    return again, masks


def _looking(
    model: QTSplusBackboneMixin, ids: torch.Tensor, question: torch.Tensor, candidates: torch.Tensor
) -> torch.Tensor:
    """
    `[1]`, the place from which the answer begins: the last token of the last header behind the question, which may have
    calls of tools in front of it. Where no turn is opened there, the question's last word looks, or the last token of
    all if a video stands behind that. Without a question nobody looks (`[0]`).
    """
    words = question.nonzero()[:, 0]
    if not len(words):
        return words
    last, header = int(words[-1]), len(model.config.user_turn_token_ids)
    opened = (ids[last + 1 :] == model.config.user_turn_token_ids[0]).nonzero()[:, 0]
    stop = min(last + 1 + int(opened[-1]) + header, len(ids) - 1) if len(opened) else last
    if len(candidates) and stop < int(candidates[-1]):
        stop = len(ids) - 1
    return torch.tensor([stop], device=ids.device)


def log_attention(
    model: QTSplusBackboneMixin,
    read: Callable[[], Reading],
    index: int,
    sources: Sequence[torch.Tensor],
    grids: Sequence[Grid],
    features: Features,
) -> torch.Tensor:
    """
    `[M]` float32 of a row's candidates: the logarithm of the attention that the looking tokens give to each, the mean
    over heads. With one group it is that of the whole model in its layer.

    Args:
        read: gives the prompts as they are read; called when this is.
        sources: the features of the row's candidates, `[k, token_width]` of each video.
        grids: (time, height, width) of each of them.
        features: those of the batch.
    """
    reading = read()
    row, looking = reading.layout.rows[index], reading.looking[index]
    if not len(looking):
        raise no_question(index, len(row.candidates))
    device = row.columns.device
    groups = frame_groups(grids, model.config.qtsplus_config.attention_group, device)
    result, log_odds = torch.empty(len(row.candidates), device=device), []
    for chosen in groups:
        tokens, place = take_rows(sources, chosen), row.keep(chosen).cumsum(0) - 1
        seen = _read_group(model, reading.layout, index, row.only(chosen), tokens, features, place[looking])
        result[chosen] = seen.log_weights - seen.log_weights.logsumexp(0)
        log_odds.append(seen.log_odds)
    # In one softmax over the text and all groups: they are compared by how much they outweigh the same text.
    odds = torch.stack([torch.zeros_like(log_odds[0]), *log_odds])
    for chosen, share in zip(groups, odds.softmax(0)[1:].flatten(1).mean(1), strict=True):
        result[chosen] += share.log()
    return result


def _read_group(
    model: Any,
    layout: Layout,
    index: int,
    row: PromptRow,
    tokens: torch.Tensor,
    features: Features,
    looking: torch.Tensor,
) -> GroupAttention:
    """The attention of one group: of the shortened prompt that would hold it alone."""
    alone = replace(layout, input_ids=layout.input_ids[index][None], mask=layout.mask[index][None], rows=[row])
    every = torch.arange(len(tokens), device=tokens.device)
    compact = splice(model, alone, features, [tokens], QTSplusOutput(kept_indices=(every,)), pad_left=False)
    embeds = model.get_input_embeddings()(compact.input_ids)
    config = model.config.qtsplus_config
    heads = None if config.attention_heads is None else list(config.attention_heads)
    looks: list[GroupAttention] = []

    def read(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> None:
        share, there = len(queries) // len(keys), looking.to(keys.device)
        if heads is not None:
            queries, keys = queries[heads], keys[[head // share for head in heads]]
        looks.append(look(queries[:, there], keys, there, row.candidates.to(keys.device), scaling))

    layer, layers = attention_layer(model.config.text_config, config.attention_layer), model.language_model.layers
    first: Any = copy.copy(model.language_model)  # shares its weights, with these layers in place of all, and no norm
    few = nn.ModuleList([*layers[:layer], LayerReader(layers[layer], read)])
    first._modules = {**first._modules, "layers": few, "norm": nn.Identity()}
    kind = tokens.device.type
    # Without autocast's cache, which would keep weights that were cast here for a pass that needs their gradient.
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    with torch.no_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
        type(first).forward(
            first,
            **model.language_inputs(embeds, compact.input_ids, compact.features),
            attention_mask=compact.attention_mask,
            position_ids=compact.position_ids,
            use_cache=False,
            output_hidden_states=False,
            output_attentions=False,
        )
    (group,) = looks
    return GroupAttention(*(part.to(tokens.device) for part in (group.log_weights, group.log_odds)))
