"""The model's own position ids: numbers, so that no version of Transformers can move them."""

import pytest
import torch

from tiny import VIDEO_PAD, batch, compress, prompt, stock_twin, tiny_model, token_types

CHAT = 12  # tokens of the prompt before the first placeholder


def positions(inputs, **selector):
    model = tiny_model(selection="all", **selector)
    with torch.no_grad():
        return compress(model.model, **inputs)


@pytest.mark.parametrize(
    ("seconds", "times"),
    [(1.0, [0, 4, 8]), (0.5, [0, 2, 4]), (2.0, [0, 8, 16]), (1 / 12, [0, 0, 0]), (0.3, [0, 1, 2]), (1.1, [0, 4, 8])],
)
def test_time_advances_by_tokens_per_second(seconds, times):
    compact = positions(batch(prompt(videos=[(3, 4, 8)], seconds=seconds)))
    video = compact.position_ids[1:, 0, compact.input_ids[0] == VIDEO_PAD]
    expected = [(CHAT + t, CHAT + h, CHAT + w) for t in times for h in range(2) for w in range(4)]
    assert video.T.tolist() == [list(one) for one in expected]


def test_text_behind_a_video_goes_on_after_its_larger_side():
    compact = positions(batch(prompt(videos=[(3, 4, 8)])))
    behind = compact.position_ids[1:, 0, CHAT + 24 :]
    assert behind[0].tolist() == behind[1].tolist() == behind[2].tolist()
    assert behind[0].tolist() == list(range(CHAT + 4, CHAT + 4 + behind.shape[1]))
    assert compact.next_position.tolist() == [CHAT + 4 + behind.shape[1]]


def test_the_first_row_counts_real_tokens():
    compact = positions(batch(prompt(videos=[(3, 4, 8)]), prompt(seed=1)))
    assert compact.position_ids[0, 0].tolist() == list(range(compact.input_ids.shape[1]))
    padding = int((compact.attention_mask[1] == 0).sum())
    assert compact.position_ids[0, 1].tolist() == [0] * padding + list(range(compact.input_ids.shape[1] - padding))


def test_whole_seconds_agree_with_stock():
    """Below 5.18 stock drops the fraction of seconds_per_grid, so only whole ones can be compared everywhere."""
    model = tiny_model(selection="all")
    inputs = batch(prompt(images=[(1, 8, 4)], videos=[(4, 8, 12), (2, 4, 4)]), prompt(videos=[(1, 4, 20)], seed=1))
    theirs, deltas = stock_twin(model).model.get_rope_index(
        **inputs, mm_token_type_ids=token_types(inputs["input_ids"])
    )
    with torch.no_grad():
        compact = compress(model.model, **inputs)
    assert torch.equal(compact.position_ids[1:], theirs)
    assert deltas.shape == (2, 1)


@pytest.mark.parametrize("rows", [3, 4])
def test_the_callers_positions_are_kept(rows):
    model = tiny_model()
    inputs = batch(prompt(videos=[(4, 8, 12)]))
    given = torch.randint(0, 500, (rows, 1, inputs["input_ids"].shape[1]))
    with torch.no_grad():
        compact = compress(model.model, **inputs, position_ids=given, retention=0.25)
    assert torch.equal(compact.position_ids[1:, 0], given[-3:, 0, compact.qtsplus.columns[0]])


def test_decoding_by_hand_goes_on_behind_the_prompt():
    """forward with a cache and no position_ids."""
    model = tiny_model()
    inputs = batch(prompt(videos=[(4, 8, 12)]))
    with torch.no_grad():
        first = model(**inputs, retention=0.2, use_cache=True)
        token = first.logits[:, -1:].argmax(-1)
        second = model(input_ids=token, past_key_values=first.past_key_values)
    answer = model.generate(**inputs, retention=0.2, max_new_tokens=2, do_sample=False)[0, -2:]
    assert answer.tolist() == [int(token), int(second.logits[0, -1].argmax())]
