"""The model's own position ids: numbers, so that no version of Transformers can move them."""

import pytest
import torch

from tiny import VIDEO_PAD, assert_same, batch, compress, prompt, tiny_model

CHAT = 12  # tokens of the prompt before the first placeholder


def shortened(*rows):
    """With all visual tokens kept."""
    return compress(tiny_model(selection="all").model, **batch(*rows))


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        (1.0, [0, 4, 8]),
        (0.5, [0, 2, 4]),
        (2.0, [0, 8, 16]),
        (1 / 12, [0, 0, 0]),
        (0.3, [0, 1, 2]),
        (1.1, [0, 4, 8]),
    ],
)
def test_time_advances_by_tokens_per_second(seconds, times):
    compact = shortened(prompt(videos=[(3, 4, 8)], seconds=seconds))
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
    width = compact.input_ids.shape[1]
    for mask, counts in zip(compact.attention_mask, compact.position_ids[0], strict=True):
        real = mask.sum().item()
        padding = [0] * (width - real)
        assert counts.tolist() == padding + list(range(real))


@pytest.mark.parametrize("axes", [3, 4])
def test_the_callers_positions_are_kept(axes):
    inputs = batch(prompt(videos=[(4, 8, 12)]))
    position_ids = torch.randint(0, 500, (axes, 1, inputs["input_ids"].shape[1]))
    compact = compress(
        tiny_model().model,
        **inputs,
        position_ids=position_ids,
        retention=0.25,
    )
    (columns,) = compact.qtsplus.columns
    assert_same(compact.position_ids[1:, 0], position_ids[-3:, 0, columns])
