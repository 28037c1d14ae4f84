"""The language model's own attention inside vLLM, for the method `lm_attention`.

The first layers run as vLLM's own decoder layers, so that quantised weights go through vLLM's kernels and no weight is
in memory twice. For the time of a call their attention is replaced by a causal one that uses no cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..model.lm_attention_qtsplus import GroupAttention, attention_layer, full_attention_layers, look
from ..model.lm_attention_qtsplus import check_attention as check_layer_and_heads
from ..model.prompt_qtsplus import CompactPrompt


class Unfinished(Exception):
    """A group was read; the others are read in further calls, so that the engine makes other clients' tokens first."""


class Pieces:
    """The attention to the groups of one request's videos, of which each call of the engine reads one more."""

    def __init__(self, features: list[Tensor]):
        self.features = features  # per video [k, token_width]: the request's pixels come with its first call only
        self._known: list[GroupAttention] = []

    def begin(self) -> None:
        """Another call of the engine begins, which goes through all groups again."""
        self._known_again = iter(list(self._known))
        self._has_read = False

    def next(self, read: Callable[[], GroupAttention]) -> GroupAttention:
        """The next group's attention, from an earlier call or by `read`; [`Unfinished`] where one was read already."""
        for attention in self._known_again:
            return attention
        if self._has_read:
            raise Unfinished
        self._has_read = True
        self._known.append(read())
        return self._known[-1]


def by_heads(states: Tensor, head_size: int) -> Tensor:
    """`[heads, S, head_size]` of `[S, heads * head_size]`."""
    return states.unflatten(-1, (-1, head_size)).transpose(0, 1)


def causal_attention(attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In place of a layer's `attention`: over the tokens of this call alone, `[S, heads * head_size]`."""
    # Without a dimension of rows in front, torch would compute all scores at once.
    queries, keys, values = [by_heads(states, attention.head_size)[None] for states in (query, key, value)]
    attended = nn.functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        is_causal=True,
        scale=attention.impl.scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1).flatten(1)


@contextmanager
def _replaced(mixer, attention: Callable) -> Iterator[None]:
    original = mixer._modules["attn"]
    mixer._modules["attn"] = partial(attention, original)
    try:
        yield
    finally:
        mixer._modules["attn"] = original


def read_group(hooks, layers, prompt: CompactPrompt, visual: Tensor, place: Tensor) -> GroupAttention:
    """
    As the function of the same name in Transformers, for one prompt.

    Args:
        hooks: our Transformers model of the same backbone, without a language model.
        layers: vLLM's decoder layers.
    """
    selector = hooks.config.qtsplus_config
    last = attention_layer(hooks.config.text_config, selector.attention_layer)
    attentions: list[GroupAttention] = []

    def read(attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """In place of the attention that is read."""
        queries = by_heads(query, attention.head_size)
        keys = by_heads(key, attention.head_size)
        attentions.append(look(queries, keys, place, visual, attention.impl.scale, selector.attention_heads))
        return torch.zeros_like(query)

    embeds = hooks.get_input_embeddings()(prompt.input_ids)
    inputs = hooks.language_inputs(embeds, prompt.input_ids, prompt.features)
    hidden = inputs["inputs_embeds"][0].clone()  # vLLM's norms work in place
    residual = None
    positions = hooks.language_axes(prompt.position_ids)[:, 0].contiguous()
    levels = inputs.get("deepstack_visual_embeds", [])
    for number in range(last):
        layer = layers[number]
        with _replaced(layer.self_attn, causal_attention):
            hidden, residual = layer(positions, hidden, residual)
        if number < len(levels):
            level = levels[number].to(hidden.dtype)
            is_visual = inputs["visual_pos_masks"][0]
            hidden = hidden.clone()
            hidden[is_visual] += level
    layer = layers[last]
    if residual is None:
        normed = layer.input_layernorm(hidden)
    else:
        normed, _ = layer.input_layernorm(hidden, residual)
    with _replaced(layer.self_attn, read):
        layer.self_attn(positions, normed)
    return attentions[0]


def check_attention(config, adapters: bool, processes: int) -> None:
    """
    Raises `ValueError` if `lm_attention` cannot be read in vLLM, or would give wrong answers there.

    Args:
        config: of the model.
        adapters: whether the engine takes LoRA adapters.
        processes: that share the heads of a layer.
    """
    check_layer_and_heads(config.text_config, config.qtsplus_config)
    problem = ""
    if len(full_attention_layers(config.text_config)) < config.text_config.num_hidden_layers:
        problem = "a language model with recurrent layers"
    if adapters:
        problem = "LoRA adapters, which would not take part in choosing (merge the adapter into the model)"
    if processes > 1:
        problem = "tensor_parallel_size above 1, where each process has a part of the heads"
    if problem:
        raise ValueError(
            f"selection='lm_attention' does not work in vLLM with {problem}. Expected another selection, such as "
            '--mm-processor-kwargs \'{"selection": "diversity"}\'.'
        )
