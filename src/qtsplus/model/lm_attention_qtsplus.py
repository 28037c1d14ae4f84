"""Which visual tokens the language model itself attends to: `Candidates.log_attention`, for selection without training.

A row's visual tokens are dealt into groups of frames that are far apart, so that every group covers the whole span of
time. Each group runs with the prompt's text through the first layers of the language model, up to layer k. There the
last word of the prompt, from which the answer begins, attends to the group's tokens; no other attention is computed.
FlexSelect does the same (arXiv 2506.00993); here groups are compared by how much attention each takes from the text.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from .layout_qtsplus import QTSplusBackboneMixin, lay_out_again
from .methods_qtsplus import TensorSequence, no_question, take_rows
from .prompt_qtsplus import (
    CACHE,
    VIDEO,
    CompactPrompt,
    Features,
    Grid,
    Layout,
    SelectionInputs,
    find_questions,
    given_queries,
    splice,
)
from .selector_qtsplus import QTSplusOutput

# The fraction of the layers at which published work reads (18 and 19 of 28, 23 of 36), for models without calibration.
DEPTH = 0.65
READING_ATTENTION = "qtsplus_reading"

# --- Which layer and which heads ---


def attention_layer(text_config, layer: int | None = None) -> int:
    """
    The layer whose attention is read, counted from 0: the given one, or the full-attention layer nearest to [`DEPTH`].
    `ValueError` for a layer that does not exist or has no full attention.
    """
    full = full_attention_layers(text_config)
    if layer is None:
        target = int(DEPTH * text_config.num_hidden_layers)
        return min(full, key=lambda index: abs(index - target))
    if layer not in full:
        raise ValueError(
            f"QTSplusConfig got attention_layer={layer}; expected a layer of the language model with full attention, "
            f"one of {full}."
        )
    return layer


def full_attention_layers(text_config) -> list[int]:
    """The layers with full attention, counted from 0; the others are recurrent or see a window."""
    types = getattr(text_config, "layer_types", None)
    if not types:
        return list(range(text_config.num_hidden_layers))
    return [index for index, kind in enumerate(types) if kind == "full_attention"]


def check_attention(text_config, selector) -> None:
    """Raises `ValueError` for an `attention_layer` or `attention_heads` that this language model does not have."""
    attention_layer(text_config, selector.attention_layer)
    heads = selector.attention_heads
    last = text_config.num_attention_heads - 1
    if heads and max(heads) > last:
        raise ValueError(f"QTSplusConfig got attention_heads={list(heads)}; expected heads from 0 to {last}.")


# --- Groups ---


def frame_groups(grids: Sequence[Sequence[int]], group_size: int) -> tuple[Tensor, ...]:
    """
    `[m]` int64, ascending, the tokens of each group of frames. Frames are dealt to the groups in turn, like cards. A
    group has at most `group_size` tokens, or one frame.

    Args:
        grids: (time, height, width) of each video in tokens.
    """
    frame_sizes = []
    for time, height, width in grids:
        frame_sizes.extend([height * width] * time)
    frames_per_group = max(1, group_size // max(frame_sizes))
    num_groups = -(-len(frame_sizes) // frames_per_group)
    group_of_frame = torch.arange(len(frame_sizes), device="cpu") % num_groups
    group_of_token = group_of_frame.repeat_interleave(group_of_frame.new_tensor(frame_sizes))
    return tuple((group_of_token == group).nonzero()[:, 0] for group in range(num_groups))


@dataclass
class GroupAttention:
    """The attention of a prompt's last word to one group: a softmax over the group and the text before that word."""

    log_weights: Tensor  # [m] float32, log of the attention to each of its tokens, the mean over heads
    log_odds: Tensor  # [heads, 1], the log-sum-exp of the scores of its tokens less that of the text's


def look(
    queries: Tensor,
    keys: Tensor,
    place: Tensor,
    visual: Tensor,
    scaling: float,
    heads: Sequence[int] | None,
) -> GroupAttention:
    """
    The attention of a word of a prompt to a group's tokens in it.

    Args:
        queries: `[heads, k, head_dim]`, of the last tokens of the prompt, the word among them.
        keys: `[kv_heads, S, head_dim]`, of all its tokens.
        place: `[1]`, the place of the word; it and `visual` may be on another device.
        visual: `[m]`, the places of the group's tokens.
        heads: those that count; `None` for all.
    """
    home = visual.device
    place = place.to(keys.device)
    visual = visual.to(keys.device)
    if heads is not None:
        chosen = torch.tensor(heads, device=keys.device)
        keys = keys[chosen // (len(queries) // len(keys))]
        queries = queries[chosen]
    with torch.autocast(keys.device.type, enabled=False):
        query = queries[:, place - keys.shape[1]].float()
        grouped = query.reshape(len(keys), -1, query.shape[-1]) * scaling
        scores = grouped @ keys.float().transpose(1, 2)
        is_later = torch.arange(keys.shape[1], device=keys.device) > place
        scores = scores.reshape(len(query), -1)
        scores = scores.masked_fill(is_later, -torch.inf)
        visual_scores = scores[:, visual]
        text_total = scores.index_fill(-1, visual, -torch.inf).logsumexp(-1, keepdim=True)
        visual_total = visual_scores.logsumexp(-1, keepdim=True)
        total = torch.logaddexp(visual_total, text_total)
        log_weights = (visual_scores - total).logsumexp(0) - math.log(len(query))
        log_odds = visual_total - text_total
    return GroupAttention(log_weights.to(home), log_odds.to(home))


# --- The first layers of the language model ---


class LayerReader(nn.Module):
    """Replaces a layer of the language model: reads its queries and keys, and computes nothing else."""

    def __init__(self, layer: Any, read: Callable):
        super().__init__()
        # A copy that shares the weights leaves the model itself unchanged.
        attention = copy.copy(layer.self_attn)
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = READING_ATTENTION
        attention.read = read
        self.input_layernorm = layer.input_layernorm
        self.self_attn = attention

    def forward(self, hidden_states: Tensor, position_embeddings: TensorSequence, **kwargs) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        # With a device map, the layer may be on another device than the positions.
        rotary = tuple(part.to(normed.device) for part in position_embeddings)
        # The forward of the class is called because a hook on the model's attention would run the original.
        attention = self.self_attn
        type(attention).forward(attention, hidden_states=normed, position_embeddings=rotary, **kwargs)
        return hidden_states


class PassingCache(DynamicCache):
    """A cache that keeps nothing: behind a cache, Transformers does not search positions for packed sequences."""

    def update(self, keys, values, *args, **kwargs):  # type: ignore[override]
        return keys, values


def reading_attention_forward(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs):
    """Reads queries `[1, heads, S, head_dim]` and keys as `module.attention`; attends to nothing."""
    module.attention = module.read(query[0], key[0], scaling=kwargs["scaling"])
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register(READING_ATTENTION, reading_attention_forward)

# --- Which word looks ---


@dataclass
class Reading:
    """The prompts of a batch as they are read: with the questions that select."""

    layout: Layout
    looking: list[int | None]  # per row, the place of the token that looks among its real ones


def reading_of(
    model: QTSplusBackboneMixin,
    layout: Layout,
    selection: SelectionInputs,
) -> Reading:
    """The prompts with the questions that select: a question that is passed separately replaces the prompt's own."""
    questions = find_questions(model, layout, selection.query_mask)
    queries = given_queries(selection, len(layout.rows))
    if queries is not None:
        layout, questions = _with_queries(model, layout, questions, queries)
    looking = []
    user_turn = model.config.user_turn_token_ids
    for row, question in zip(layout.rows, questions, strict=True):
        is_video = model.token_types(row.ids) == VIDEO
        looking.append(looking_place(row.ids.tolist(), question.tolist(), is_video.tolist(), user_turn))
    return Reading(layout, looking)


def _with_queries(
    model: QTSplusBackboneMixin,
    layout: Layout,
    questions: TensorSequence,
    queries: TensorSequence,
) -> tuple[Layout, list[Tensor]]:
    """The layout of the prompts with other questions in place of their own, and which of its tokens they are."""
    prompts = []
    starts = []
    for index, query in enumerate(queries):
        # The whole prompt is laid out again, also where only a part of a video's tokens is there.
        ids = layout.input_ids[index]
        is_real = layout.mask[index].bool()
        words = layout.rows[index].columns[questions[index]]
        is_word = torch.zeros_like(is_real).index_fill(0, words, True)
        is_before = is_word.cumsum(0) == 0
        before = ids[is_real & is_before]
        behind = ids[is_real & ~is_before & ~is_word]
        prompts.append(torch.cat([before, query, behind]))
        starts.append(len(before))
    replaced = lay_out_again(model, layout, prompts)
    places = zip(replaced.rows, starts, queries, strict=True)
    masks = [(row.columns >= start) & (row.columns < start + len(query)) for row, start, query in places]
    return replaced, masks


def looking_place(
    ids: list[int],
    is_question: list[bool],
    is_video: list[bool],
    user_turn: Sequence[int],
) -> int | None:
    """
    The place from which the answer begins: the last token of the last header behind the question, which may have calls
    of tools in front of it. Where no turn is opened there, the question's last word looks, or the last token of all if
    a video follows that word. Without a question no token looks (`None`).

    Args:
        ids: the prompt of a row, without padding.
        is_question, is_video: whether each of them belongs to the question, or to a video.
        user_turn: the ids that open a user's turn.
    """
    if True not in is_question:
        return None
    end = len(ids) - 1
    place = end - is_question[::-1].index(True)
    behind = ids[place + 1 :][::-1]
    if user_turn[0] in behind:
        header = end - behind.index(user_turn[0])
        place = min(header + len(user_turn), end)
    if True in is_video[place:]:
        return end
    return place


# --- The attention to all groups ---


def log_attention(
    model: Any,
    read: Callable[[], Reading],
    index: int,
    sources: TensorSequence,
    grids: Sequence[Grid],
    features: Features,
) -> Tensor:
    """
    `[M]` float32 of a row's candidates: the logarithm of the attention that the looking token gives to each, the mean
    over heads. With one group it is that of the whole model in its layer.

    Args:
        read: gives the prompts as they are read; it is called only when the attention is needed.
        sources: the features of the row's candidates, `[k, token_width]` of each video.
        grids: (time, height, width) of each of these videos.
        features: the features of the batch.
    """
    reading = read()
    row = reading.layout.rows[index]
    looking = reading.looking[index]
    if looking is None:
        raise no_question(index, len(row.candidates))
    device = reading.layout.source_ids.device
    groups = frame_groups(grids, model.config.qtsplus_config.attention_group)
    log_shares = torch.empty(len(row.candidates), dtype=torch.float32, device=device)
    log_odds = []
    for group in groups:
        row_of_group = row.only(group)
        alone = replace(reading.layout, input_ids=reading.layout.input_ids[index : index + 1], rows=[row_of_group])
        everything = QTSplusOutput(kept_indices=(torch.arange(len(group), device="cpu"),))
        prompt = splice(model, alone, features, [take_rows(sources, group, group)], everything, pad_left=False)
        place = torch.searchsorted(row_of_group.columns, row.columns[looking : looking + 1])
        visual = row_of_group.candidates.to(device, non_blocking=True)
        attention = model.group_attention(prompt, visual, place)
        log_shares[group] = attention.log_weights - attention.log_weights.logsumexp(0)
        log_odds.append(attention.log_odds)
    # One softmax over the text and all groups compares the groups by how much they outweigh the same text.
    text = torch.zeros_like(log_odds[0])
    odds = torch.stack([text] + log_odds).softmax(0)
    for group, share in zip(groups, odds[1:].flatten(1).mean(1), strict=True):
        log_shares[group] += share.log()
    return log_shares


def read_group(
    model: Any,
    prompt: CompactPrompt,
    visual: Tensor,
    place: Tensor,
) -> GroupAttention:
    """The attention of the word at `place` `[1]` of a prompt to its tokens at `visual` `[m]`."""
    config = model.config.qtsplus_config
    device = visual.device
    last = attention_layer(model.config.text_config, config.attention_layer)
    first_layers = model.language_model.layers[:last]
    read = partial(look, place=place, visual=visual, heads=config.attention_heads)
    reader = LayerReader(model.language_model.layers[last], read)
    first_layers.append(reader)
    # A copy that shares the weights runs the first layers only, without a norm.
    beginning = copy.copy(model.language_model)
    beginning._modules = beginning._modules | {"layers": first_layers, "norm": nn.Identity()}

    # Nothing is padded, so there is no mask. Neither the order of the tokens along several axes nor a cache is given
    # to be searched for the seams of packed sequences: the host would wait for what is found in each group.
    positions = prompt.position_ids
    cache = PassingCache() if positions.ndim == 2 else None
    if positions.ndim == 3:
        positions = positions[1:]
    embeds = model.get_input_embeddings()(prompt.input_ids)
    # Autocast's cache would keep weights that were cast here for a pass that needs their gradient.
    dtype = torch.get_autocast_dtype(device.type)
    enabled = torch.is_autocast_enabled(device.type)
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled, cache_enabled=False):
        type(beginning).forward(
            beginning,
            **model.language_inputs(embeds, prompt.input_ids, prompt.features),
            **{CACHE: cache},
            position_ids=positions,
            use_cache=False,
            output_hidden_states=False,
            output_attentions=False,
        )
    return reader.self_attn.attention
