"""On every backbone a question may be read by a layer of the selector, on the one with recurrent layers too."""

import pytest
import torch
from transformers import DynamicCache

NAMES = ("video", "image and video", "text", "two videos", "image", "earlier turns")
CALL = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture(scope="session")
def in_context(backbone, processor):
    return backbone.build(processor, query_states="layer")


def seen(model, call):
    """What the selector is given for the questions of a call, per row `[L, d]`, and the call's result."""
    given = []
    hook = model.model.qtsplus.register_forward_pre_hook(lambda _, args: given.append(args[1]))
    with torch.no_grad():
        result = call()
    hook.remove()
    return given, result


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_batch_is_single(in_context, prepare, padding_side):
    together = in_context(**prepare(*NAMES, processor_kwargs={"padding_side": padding_side}))
    for row, name in enumerate(NAMES):
        alone = in_context(**prepare(name))
        real = together.qtsplus.columns[row] >= 0
        close = 5e-4 if in_context.model.recurrent else 1e-4  # rounding; see test_batch_is_single
        torch.testing.assert_close(together.logits[row][real], alone.logits[0], atol=close, rtol=close)
        if alone.qtsplus is not None:
            assert torch.equal(together.qtsplus.kept_indices[row], alone.qtsplus.kept_indices[0])


def test_the_next_turn_asks_as_a_full_run_does(in_context, prepare):
    first, rest = prepare("video"), prepare("two videos")
    done = in_context.generate(**first, **CALL, past_key_values=DynamicCache(config=in_context.config))
    ids = torch.cat([done.sequences, rest["input_ids"]], dim=1)
    whole = {**rest, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    del whole["query_mask"]
    both = dict(whole)
    for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"):
        both[name] = torch.cat([first[name], rest[name]])
    given, _ = seen(in_context, lambda: in_context.generate(**whole, **CALL, past_key_values=done.past_key_values))
    again, _ = seen(in_context, lambda: in_context.generate(**both, **CALL))
    torch.testing.assert_close(given[0][0], again[0][0], atol=1e-5, rtol=1e-5)


def test_a_training_step_reaches_the_selector_alone(backbone, processor, prepare):
    model = backbone.build(processor, query_states="layer").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".qtsplus." in name)
    model.model.qtsplus.freeze_unused()
    inputs = prepare(*NAMES)
    model(**inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or (torch.isfinite(parameter.grad).all() and parameter.grad.any()), name
