"""The language model's own attention inside vLLM, for the method `lm_attention`.

The first layers run as vLLM's own decoder layers, so that quantised weights go through vLLM's kernels and no weight is
in memory twice. During a call their attention is replaced by a causal one that uses no cache.
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
    """A group was read. The next is read in a further call, so that the engine serves other clients in between."""


class PrefixKeys(list[Tensor]):
    """
    The keys and values of a group's prompt up to its last visual token, `[2, n, kv_heads * head_size]` in each of the
    first layers. The question comes later in the prompt, so every question about a video can use them.
    """

    @property
    def nbytes(self) -> int:
        return sum(of_layer.nbytes for of_layer in self)


class Preparation:
    """The unfinished choice of one request. Each call of the engine encodes a chunk of frames or reads a group."""

    def __init__(self, prefix: str):
        self.encoding: Generator  # of the features, see `QTSplusForVLLM._encode`
        self.features: list[Tensor] = []  # `[k, token_width]` of each video that is encoded
        self.prefix = prefix  # a hash of the prompt up to the end of the videos
        self.attentions: list[GroupAttention] = []  # to the groups that were read

    def begin(self, may_read: bool) -> None:
        """Begins a call of the engine. It goes through all groups again, and may read at most one."""
        self._earlier = iter(list(self.attentions))
        self._may_read = may_read

    def next(self, read: Callable[[], GroupAttention]) -> GroupAttention:
        """The next group's attention, from an earlier call or by `read`; [`Unfinished`] if no group may be read."""
        for attention in self._earlier:
            return attention
        if not self._may_read:
            raise Unfinished
        self._may_read = False
        self.attentions.append(read())
        return self.attentions[-1]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`[heads, k, head_size]` -> `[k, heads * head_size]`. The queries are of the last k tokens that have keys."""
    # Without a leading dimension of size 1, torch would compute all scores at once.
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
    prefix_keys: PrefixKeys | None = None,
) -> GroupAttention:
    """
    As `read_group` of `model/lm_attention_qtsplus.py`, for one prompt.

    Args:
        hooks: our Transformers model of the same backbone, without a language model.
        layers: vLLM's decoder layers.
        prefix_keys: of a prompt with the same beginning. Only the tokens after it pass the layers. If empty, they are
            filled.
    """
    selector = hooks.config.qtsplus_config
    last = attention_layer(hooks.config.text_config, selector.attention_layer)
    stop = int(visual[-1])
    known = list(prefix_keys or ())
    start = stop if known else 0
    attentions: list[GroupAttention] = []

    def attend(attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Replaces the attention of a layer. In the last layer it only reads the attention."""
        if known:
            keys, values = known[number].to(key.device)
            key = torch.cat([keys, key])
            value = torch.cat([values, value])
        elif prefix_keys is not None:
            of_layer = torch.stack([key[:stop], value[:stop]])
            prefix_keys.append(of_layer.cpu())
        scale = attention.impl.scale
        heads = (-1, attention.head_size)
        # `[S, heads * head_size]` -> `[heads, S, head_size]`
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
