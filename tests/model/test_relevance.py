"""The relevance of the Hub files, which is computed in blocks, against its readable twin."""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from naive import assert_equal_to_twin, naive_log_relevance, states
from qtsplus.model.fields_qtsplus import REDUCTIONS
from qtsplus.model.relevance_qtsplus import log_relevance

HEADS = [(1, 1), (2, 1), (3, 3), (6, 2), (12, 3), (16, 2), (28, 4)]
each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
examples = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
)


@examples
@given(
    heads=st.sampled_from(HEADS),
    num_tokens=st.integers(1, 200) | st.sampled_from([1, 63, 1111]),
    num_queries=st.sampled_from([1, 60]) | st.integers(1, 9),
    head_dim=st.sampled_from([8, 20, 32]),
    block_size=st.none() | st.integers(1, 2000),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    seed=st.integers(0, 10_000),
    reduction=st.sampled_from(REDUCTIONS),
)
@example((1, 1), 1, 1, 8, None, 1.0, 0, "max")
@example((28, 4), 1111, 60, 32, 64, 1.0, 0, "max")
@example((28, 4), 1111, 60, 32, 64, 1.0, 0, "mean")
@example((28, 4), 1111, 60, 32, 64, 4.0, 0, "sum")
def test_values_and_gradients_equal_the_twins(
    heads, num_tokens, num_queries, head_dim, block_size, scale, seed, reduction
):
    queries, keys = states(*heads, num_queries, num_tokens, head_dim, seed=seed, scale=scale)
    kernel = partial(log_relevance, block_size=block_size, reduction=reduction)
    assert_equal_to_twin(kernel, queries, keys, reduction=reduction)


@each_reduction
@pytest.mark.parametrize(("heads", "num_queries"), [((2, 1), 1), ((4, 2), 5)])
def test_70_001_tokens(heads, num_queries, reduction):
    kernel = partial(log_relevance, reduction=reduction)
    problem = states(*heads, num_queries, 70_001)
    assert_equal_to_twin(kernel, *problem, relative=2e-5, reduction=reduction)  # float32 over so many tokens


@each_reduction
@pytest.mark.parametrize("autocast", [False, True])
def test_statistics_of_bfloat16_states_are_in_float32(autocast, reduction):
    states_of_model = states(4, 2, num_queries=6, num_tokens=3000, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        log_r = log_relevance(*states_of_model, reduction=reduction)
        percents = 100 * log_r.exp()
        total = percents.sum()
    assert log_r.dtype == torch.float32
    numbers = log_r.unique()
    assert len(numbers) > 2900  # bfloat16 has about a hundred numbers there
    gradients = torch.autograd.grad(total, states_of_model)  # outside of autocast, as trainers do

    exact_states = [x.detach().float().requires_grad_() for x in states_of_model]
    expected = naive_log_relevance(*exact_states, reduction=reduction)
    assert_close(log_r, expected, atol=1e-5, rtol=1e-5)
    expected_percents = 100 * expected.exp()
    expected_gradients = torch.autograd.grad(expected_percents.sum(), exact_states)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient.float(), expected_gradient, atol=1e-4, rtol=2**-8)
