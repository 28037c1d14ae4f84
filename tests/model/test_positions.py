"""The model's own position ids: numbers, so that no version of Transformers can move them."""

import pytest
import torch

from tiny import VIDEO_PAD, assert_same, batch, compress, prompt, tiny_model

CHAT = 12  # tokens of the prompt before the first placeholder


def shortened(*rows):
    """With all visual tokens kept."""
    return compress(tiny_model(selection="all").model, **batch(*rows))


@pytest.fixture(autouse=True, params=[torch.float32, torch.bfloat16])
def default_dtype(request):
    """What a process has set as the default for new tensors."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        (1.0, [0, 4, 8]),
        (1 / 12, [0, 0, 0]),
        (31.625, [0, 126, 253, 379]),
    ],
)
def test_time_advances_by_tokens_per_second(seconds, times):
    compact = shortened(prompt(videos=[(len(times), 4, 8)], seconds=seconds))
    is_video = compact.input_ids[0] == VIDEO_PAD
    positions = compact.position_ids[1:, 0, is_video] - CHAT
    expected = torch.cartesian_prod(
        torch.tensor(times),
        torch.arange(2),
        torch.arange(4),
    )
    assert_same(positions.T, expected)


def test_the_first_row_counts_real_tokens():
    compact = shortened(prompt(videos=[(3, 4, 8)]), prompt(seed=1))
    counts = compact.attention_mask.cumsum(1) - 1
    assert_same(compact.position_ids[0], counts.clamp(min=0))


@pytest.mark.parametrize("axes", [3, 4])
def test_the_callers_positions_are_kept(axes):
    inputs = batch(prompt(videos=[(4, 8, 12)]))
    position_ids = torch.randint(0, 500, (axes, 1, inputs["input_ids"].shape[1]))
    compact = compress(
        tiny_model().model,
        **inputs,
        position_ids=position_ids,
        retention=0.25,
        selection="lm_attention",
    )
    (columns,) = compact.qtsplus.columns
    assert_same(compact.position_ids[1:, 0], position_ids[-3:, 0, columns])
