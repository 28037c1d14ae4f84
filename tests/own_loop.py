"""A caller's own decoding loop, with a cache of the shortened prompt, against `generate`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from qtsplus.model.prompt_qtsplus import CACHE
from tiny import run

STEPS = 5
WITH_LOGITS = {
    "return_dict_in_generate": True,
    "output_logits": True,
}


def new_cache(model):
    return DynamicCache(config=model.config.get_text_config())


def prefill(model, inputs, cache=None):
    """A cache that holds the prompts."""
    if cache is None:
        cache = new_cache(model)
    run(model, inputs, past_key_values=cache)
    return cache


def step(model, cache, ids, mask, **call):
    """The logits of new ids behind a cache, `[B, new, vocabulary]`."""
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "past_key_values": cache,
    }
    return run(model, inputs, **call).logits


def longer(mask, count=1):
    """A mask with columns for new tokens."""
    return torch.nn.functional.pad(mask, (0, count), value=1)


def close(logits, expected):
    assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@dataclass
class Answer:
    """Prompts, and what `generate` makes of them."""

    model: torch.nn.Module
    inputs: dict[str, Tensor]
    logits: Tensor  # [B, STEPS, vocabulary]
    ids: Tensor  # [B, STEPS]

    def mask(self, count=1):
        """The mask of the prompts and some new tokens."""
        return longer(self.inputs["attention_mask"], count)

    def check_second_token(self, cache, mask, **call):
        """Behind a cache of the prompts, the first token gives the logits of the second."""
        logits = step(self.model, cache, self.ids[:, :1], mask, **call)
        close(logits[:, 0], self.logits[:, 1])

    def check_loop(self, next_mask, cache=None, **call):
        """One token after the other gives the logits; `next_mask` makes the mask `[B, width]` of the first output."""
        output = run(self.model, self.inputs, past_key_values=cache, use_cache=True)
        mask = next_mask(self.inputs["attention_mask"], output)
        close(output.logits[:, -1], self.logits[:, 0])
        for number in range(1, STEPS):
            if mask is not None:
                mask = longer(mask)
            ids = self.ids[:, number - 1 : number]
            logits = step(self.model, output[CACHE], ids, mask, **call)
            close(logits[:, -1], self.logits[:, number])


def answered(model, inputs):
    result = model.generate(
        **inputs,
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        **WITH_LOGITS,
    )
    return Answer(
        model=model,
        inputs=inputs,
        logits=torch.stack(result.logits, dim=1),
        ids=result.sequences[:, -STEPS:],
    )


def full_width(mask, output):
    return mask


def cached_columns(mask, output):
    is_column = output.qtsplus.columns >= 0
    return is_column.long()


def in_two_calls(model, inputs, count, **call):
    """The last logits of a prompt whose last `count` columns come in a second call."""
    beginning = {**inputs, **call}
    for name in ("input_ids", "attention_mask", "query_mask"):
        if name in inputs:
            beginning[name] = inputs[name][:, :-count]
    rest = inputs["input_ids"][:, -count:]
    return step(model, prefill(model, beginning), rest, inputs["attention_mask"])[:, -1]


def check_two_calls(model, inputs, count, **call):
    """Two calls give what one gives."""
    output = run(model, inputs, **call)
    close(in_two_calls(model, inputs, count, **call), output.logits[:, -1])
