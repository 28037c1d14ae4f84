"""The language model's own attention inside vLLM, for the method `lm_attention`.

The first layers run as vLLM's own decoder layers, so that quantised weights go through vLLM's kernels and no weight is
in memory twice. For the time of a call their attention is replaced by a causal one that uses no cache.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from ..model.lm_attention_qtsplus import GroupAttention, attention_layer, full_attention_layers, look
from ..model.lm_attention_qtsplus import check_attention as check_layer_and_heads
from ..model.prompt_qtsplus import CompactPrompt


class Unfinished(Exception):
    """A group was read; the others are read in further calls, so that the engine makes other clients' tokens first."""


class Front(list[Tensor]):
    """
    Of the tokens in front of the last visual token of a group's prompt, the keys and values in each of the first
    layers, `[2, n, kv_heads * head_size]`. They do not depend on a question behind.
    """

    @property
    def nbytes(self) -> int:
        return sum(of_layer.nbytes for of_layer in self)


class Pieces:
    """What is known of one request: each call of the engine encodes a chunk of its frames, or reads a group."""

    def __init__(self, front: str):
        self.encoding: Generator  # of the features, for which it takes frames
        self.features: list[Tensor] = []  # `[k, token_width]` of each video that is encoded
        self.front = front  # a hash of all that the model reads up to the end of the videos
        self.known: list[GroupAttention] = []

    def begin(self, may_read: bool) -> None:
        """Another call of the engine begins, which goes through all groups again, and reads one if it may."""
        self._known_again = iter(list(self.known))
        self._has_read = not may_read

    def next(self, read: Callable[[], GroupAttention]) -> GroupAttention:
        """The next group's attention, from an earlier call or by `read`; [`Unfinished`] where no more may be read."""
        for attention in self._known_again:
            return attention
        if self._has_read:
            raise Unfinished
        self._has_read = True
        self.known.append(read())
        return self.known[-1]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`[k, heads * head_size]` of `[heads, k, head_size]`, the last tokens of those of the keys and values."""
    # Without a dimension of rows in front, torch would compute all scores at once.
    (attended,) = nn.functional.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=causal_lower_right(query.shape[1], key.shape[1]),
        scale=scale,
        enable_gqa=True,
    )
    return attended.transpose(0, 1).flatten(1)


@contextmanager
def _replaced(mixer, attention: Callable) -> Iterator[None]:
    original = mixer._modules["attn"]
    mixer._modules["attn"] = partial(attention, original)
    try:
        yield
    finally:
        mixer._modules["attn"] = original


def read_group(
    hooks,
    layers,
    prompt: CompactPrompt,
    visual: Tensor,
    place: Tensor,
    front: Front | None = None,
) -> GroupAttention:
    """
    As the function of the same name in Transformers, for one prompt.

    Args:
        hooks: our Transformers model of the same backbone, without a language model.
        layers: vLLM's decoder layers.
        front: from a prompt that began alike, so that only the tokens behind pass the layers; an empty one is filled.
    """
    selector = hooks.config.qtsplus_config
    last = attention_layer(hooks.config.text_config, selector.attention_layer)
    stop = int(visual[-1])
    known = list(front or ())
    start = stop if known else 0
    attentions: list[GroupAttention] = []

    def attend(attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """In place of the attention of a layer; that of the last one is read."""
        if known:
            keys, values = known[number].to(key.device)
            key = torch.cat([keys, key])
            value = torch.cat([values, value])
        elif front is not None:
            of_layer = torch.stack([key[:stop], value[:stop]])
            front.append(of_layer.cpu())
        scale = attention.impl.scale
        heads = (-1, attention.head_size)
        # `[heads, S, head_size]` of `[S, heads * head_size]`
        queries, keys, values = [states.unflatten(-1, heads).transpose(0, 1) for states in (query, key, value)]
        if number < last:
            return causal_attention(queries, keys, values, scale)
        attentions.append(look(queries, keys, place, visual, scale, selector.attention_heads))
        return torch.zeros_like(query)

    embeds = hooks.get_input_embeddings()(prompt.input_ids)
    inputs = hooks.language_inputs(embeds, prompt.input_ids, prompt.features)
    hidden = inputs["inputs_embeds"][0, start:].clone()  # vLLM's norms work in place
    residual = torch.zeros_like(hidden)
    positions = hooks.language_axes(prompt.position_ids)[:, 0, start:].contiguous()
    levels = inputs.get("deepstack_visual_embeds", [])
    for number, layer in enumerate(layers[:last]):
        with _replaced(layer.self_attn, attend):
            hidden, residual = layer(positions, hidden, residual)
        if number < len(levels):
            level = levels[number].to(embeds.dtype)
            hidden = hidden + level[0, start:]
    number = last
    layer = layers[last]
    normed, _ = layer.input_layernorm(hidden, residual)
    with _replaced(layer.self_attn, attend):
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
