"""Properties over ragged batches and over the selector's functions, on examples drawn by hypothesis."""

import math
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans, composite, data, floats, integers, lists, none, sampled_from
from torch.testing import assert_close

from model_checks import assert_trained, with_labels
from qtsplus import QTSplusConfig, QTSplusSelector
from qtsplus.model.budget_qtsplus import read_together
from qtsplus.model.fields_qtsplus import POSITION_IDS, REDUCTIONS, SELECTIONS
from qtsplus.model.methods_qtsplus import METHODS, TIE, Candidates
from qtsplus.model.selector_qtsplus import find_threshold, gumbel_gate, gumbel_noise, soft_gate
from tiny import PAD, PAPER, assert_same, batch, prompt, run, seeded, tiny_model


def examples(count):
    return settings(
        max_examples=count,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# (t, h, w) in patches: one token, one frame, odd numbers of tokens each way, long and flat.
VIDEO_GRIDS = [
    (1, 2, 2),
    (1, 4, 6),
    (2, 2, 2),
    (3, 4, 10),
    (5, 6, 2),
    (4, 2, 6),
    (2, 10, 10),
    (7, 2, 2),
]
IMAGE_GRIDS = [
    (1, 2, 2),
    (1, 4, 4),
    (1, 6, 2),
    (1, 2, 10),
]
N_MAX = 40


@cache
def model_with(**selector):
    return tiny_model(n_max=N_MAX, **selector)


@composite
def a_row(draw):
    return prompt(
        images=draw(lists(sampled_from(IMAGE_GRIDS), max_size=2)),
        videos=draw(lists(sampled_from(VIDEO_GRIDS), max_size=3)),
        question=draw(integers(1, 60)),
        seed=draw(integers(0, 10_000)),
        seconds=draw(sampled_from([0.25, 1.0, 3.5])),
        turns=draw(integers(0, 1)),
    )


a_batch = lists(a_row(), min_size=1, max_size=4)
a_retention = none() | floats(0.01, 1.0) | sampled_from([0.5, 1.0])
a_cap = none() | integers(1, 60)


def real_logits(output, inputs, row):
    """The logits of a row's tokens, without padding."""
    is_real = inputs["attention_mask"].bool()
    if output.qtsplus is not None:
        is_real = output.qtsplus.columns >= 0
    return output.logits[row, is_real[row]]


def expected_count(rho, num_tokens, cap):
    if num_tokens == 0:
        return 0
    # The product is rounded to a millionth of a token, so that 0.07 * 100 = 7.000000000000001 asks for 7.
    wanted = math.ceil(round(rho * num_tokens, 6))
    return max(1, min(wanted, N_MAX, cap or N_MAX))


def check_indices(kept, num_tokens):
    """They are ascending, each once, and among the tokens."""
    assert (kept.diff() > 0).all()
    assert (kept >= 0).all()
    assert (kept < num_tokens).all()


@examples(25)
@given(
    rows=a_batch,
    pad_left=booleans(),
    more_padding=sampled_from([0, 40]),
    retention=a_retention,
    cap=a_cap,
    reduction=sampled_from(REDUCTIONS),
    position_ids=sampled_from(POSITION_IDS),
)
def test_each_row_of_a_ragged_batch_is_as_it_is_alone(
    rows, pad_left, more_padding, retention, cap, reduction, position_ids
):
    model = model_with(reduction=reduction, position_ids=position_ids)
    call = {"retention": retention, "max_visual_tokens": cap}
    longest = max(len(row.ids) for row in rows)
    inputs = batch(*rows, pad_left=pad_left, width=longest + more_padding)
    together = run(model, inputs, **call)
    assert torch.isfinite(together.logits).all()
    for index, row in enumerate(rows):
        single = batch(row)
        alone = run(model, single, **call)
        logits = real_logits(together, inputs, index)
        assert_close(logits, real_logits(alone, single, 0), atol=1e-4, rtol=0)
        if together.qtsplus is None:
            continue
        num_tokens = sum(t * h * w // 4 for t, h, w in row.videos)
        count = check_choice(together.qtsplus, index, num_tokens, retention, cap)
        assert len(logits) == len(row.ids) - num_tokens + count
        if alone.qtsplus is not None:
            check_equal_choice(together.qtsplus, index, alone.qtsplus)


def check_choice(chosen, row, num_tokens, retention, cap):
    """How many tokens were kept, which the budget asked for."""
    kept = chosen.kept_indices[row]
    rho = chosen.rho[row].item() if retention is None else retention
    count = expected_count(rho, num_tokens, cap)
    assert len(kept) == count
    assert chosen.n[row] == count
    check_indices(kept, num_tokens)
    return count


def check_equal_choice(together, row, alone):
    """A row's tokens, budget and relevance are those of the row alone."""
    assert_same(together.kept_indices[row], alone.kept_indices[0])
    assert_close(together.rho[row], alone.rho[0], atol=1e-4, rtol=0)
    if together.num_tokens[row] > 0:
        assert_close(together.relevance[row], alone.relevance[0], atol=1e-5, rtol=1e-4)


@examples(12)
@given(
    rows=a_batch,
    pad_left=booleans(),
    retention=a_retention,
    cap=a_cap,
)
def test_a_row_generates_in_a_batch_what_it_generates_alone(rows, pad_left, retention, cap):
    model = model_with()
    call = {
        "retention": retention,
        "max_visual_tokens": cap,
        "max_new_tokens": 3,
    }
    inputs = batch(*rows, pad_left=pad_left)
    width = inputs["input_ids"].shape[1]
    together = model.generate(**inputs, **call)
    assert_same(together[:, :width], inputs["input_ids"])
    for row, answer in zip(rows, together[:, width:], strict=True):
        (sequence,) = model.generate(**batch(row), **call)
        alone = sequence[len(row.ids) :].tolist()
        padding = [PAD] * (len(answer) - len(alone))
        assert answer.tolist() == alone + padding


@examples(16)
@given(
    rows=a_batch,
    pad_left=booleans(),
    gate=sampled_from(["soft", "detached", "gumbel"]),
    selection=sampled_from(["qtsplus", "qtsplus", "uniform", "random", "all"]),
    cap=a_cap,
)
def test_a_training_step_on_any_batch_has_finite_gradients_on_every_trainable_parameter(
    rows, pad_left, gate, selection, cap
):
    model = model_with(gate=gate).train()
    torch.manual_seed(0)
    model.zero_grad()
    inputs = with_labels(batch(*rows, pad_left=pad_left))
    if selection != "all":
        inputs["max_visual_tokens"] = cap
    model(**inputs, selection=selection).loss.backward()
    assert_trained(model)
    model.eval()


# The selector on its own

HIDDEN = 32


@cache
def selector_with(**config):
    torch.manual_seed(1)
    selector = QTSplusSelector(
        QTSplusConfig(**(PAPER | config)),
        HIDDEN,
        4,
        2,
        mrope_section=(1, 1, 2),
    )
    with torch.no_grad():
        for name, parameter in selector.named_parameters():
            is_norm = parameter.ndim == 1 and "norm" in name
            mean = 1.0 if is_norm else 0.0
            parameter.normal_(mean, 0.3)
    return selector.eval()


def tokens(count, seed):
    return torch.randn(count, HIDDEN, generator=seeded(seed))


def ragged_tokens(counts, seed):
    """Visual tokens, questions and positions of a row for each count."""
    visual = []
    query = []
    positions = []
    for row, count in enumerate(counts):
        visual.append(tokens(count, seed + row))
        query.append(tokens(3 + row, 500 + seed + row))
        positions.append(torch.arange(count).expand(3, -1))
    return visual, query, positions


counts_of_tokens = lists(integers(0, 60), min_size=1, max_size=4)
a_seed = integers(0, 100_000)


@examples(60)
@given(
    num_tokens=integers(1, 500),
    fraction=floats(0.01, 0.99),
    tau_s=sampled_from([0.02, 0.05, 0.5, 3.0]),
    scale=sampled_from([0.0, 1e-3, 1.0, 30.0]),
    peak=sampled_from([0.0, 100.0, -100.0]),
    seed=a_seed,
)
def test_the_threshold_solves_its_equation_to_a_millionth_of_a_token(num_tokens, fraction, tau_s, scale, peak, seed):
    scores = scale * torch.randn(num_tokens, dtype=torch.float64, generator=seeded(seed))
    scores[0] += peak
    target = torch.tensor(fraction * num_tokens, dtype=torch.float64)
    threshold = find_threshold(scores, target, tau_s)
    shares = torch.sigmoid((scores - threshold) / tau_s)
    error = shares.sum() - target
    assert error.abs() < 1e-6


@examples(20)
@given(
    num_tokens=integers(2, 12),
    fraction=floats(0.15, 0.85),
    tau_s=floats(0.4, 2.0),
    seed=a_seed,
)
def test_the_gradient_of_the_threshold_equals_finite_differences(num_tokens, fraction, tau_s, seed):
    def threshold(scores, target):
        return find_threshold(scores, target, tau_s)

    scores = torch.randn(num_tokens, dtype=torch.float64, generator=seeded(seed))
    target = torch.tensor(fraction * num_tokens, dtype=torch.float64)
    scores.requires_grad_()
    target.requires_grad_()
    torch.autograd.gradcheck(threshold, (scores, target), atol=1e-6)


@examples(30)
@given(
    counts=counts_of_tokens,
    retention=a_retention,
    cap=a_cap,
    seed=a_seed,
)
def test_detached_training_keeps_exactly_what_inference_keeps(counts, retention, cap, seed):
    selector = selector_with(gate="detached", n_max=N_MAX)
    call = {
        "retention": retention,
        "max_visual_tokens": cap,
    }
    inputs = ragged_tokens(counts, seed)
    kept_tokens, inferred = selector(*inputs, **call, sample_gate=False)
    trained_tokens, trained = selector(*inputs, **call, sample_gate=True)
    assert_same(trained.kept_indices, inferred.kept_indices)
    assert_same(trained.rho, inferred.rho)
    assert_close(trained_tokens, kept_tokens, atol=1e-5, rtol=1e-5)


@examples(25)
@given(
    counts=counts_of_tokens,
    cut=lists(integers(0, 60), min_size=1, max_size=3),
    retention=a_retention,
    scoring_layers=integers(1, 2),
    gate=sampled_from(["soft", "detached"]),
    training=booleans(),
    seed=a_seed,
)
def test_a_row_may_be_in_several_tensors(counts, cut, retention, scoring_layers, gate, training, seed):
    """The features of several videos are."""
    selector = selector_with(scoring_layers=scoring_layers, gate=gate)
    visual, query, positions = ragged_tokens(counts, seed)
    pieces = []
    for row in visual:
        row.requires_grad_(training)
        places = [min(place, len(row)) for place in cut]
        pieces.append(row.tensor_split(sorted(places)))

    def select(rows):
        torch.manual_seed(seed)
        with torch.set_grad_enabled(training):
            kept, chosen = selector(rows, query, positions, retention=retention, sample_gate=training)
        if not training:
            return kept, chosen.kept_indices, ()
        total = torch.cat(kept).sin().sum()
        gradients = torch.autograd.grad(total, visual, allow_unused=True, materialize_grads=True)
        return kept, chosen.kept_indices, gradients

    kept, kept_indices, gradients = select(visual)
    kept_of_pieces, indices_of_pieces, gradients_of_pieces = select(pieces)
    assert_same(indices_of_pieces, kept_indices)
    assert_close(kept_of_pieces, kept, atol=1e-5, rtol=1e-5)
    for gradient, expected in zip(gradients_of_pieces, gradients, strict=True):
        size = 1 + expected.norm().item()
        assert_close(gradient, expected, atol=1e-5 * size, rtol=1e-4)


@examples(20)
@given(counts=counts_of_tokens, seed=a_seed, data=data())
def test_each_row_may_have_a_retention_of_its_own(counts, seed, data):
    selector = selector_with(n_max=N_MAX)
    a_list = lists(floats(0.01, 1.0), min_size=len(counts), max_size=len(counts))
    retention = data.draw(a_list)
    inputs = ragged_tokens(counts, seed)
    _, together = selector(*inputs, retention=retention)
    for row, own in enumerate(retention):
        row_alone = [[part[row]] for part in inputs]
        _, alone = selector(*row_alone, retention=own)
        assert_same(together.kept_indices[row], alone.kept_indices[0])
        assert together.rho[row] == alone.rho[0]


@examples(60)
@given(
    gate=sampled_from(["soft", "gumbel", "detached"]),
    counts=counts_of_tokens,
    retention=a_retention,
    n_max=integers(1, 30),
    cap=a_cap,
    sample_gate=booleans(),
    seed=a_seed,
)
def test_n_max_caps_every_gate_in_training_and_inference(gate, counts, retention, n_max, cap, sample_gate, seed):
    selector = selector_with(gate=gate, n_max=n_max)
    inputs = ragged_tokens(counts, seed)
    torch.manual_seed(seed)
    _, chosen = selector(
        *inputs,
        retention=retention,
        max_visual_tokens=cap,
        sample_gate=sample_gate,
    )
    most = min(n_max, cap or n_max)
    for row, num_tokens in enumerate(counts):
        kept = chosen.kept_indices[row]
        count = len(kept)
        assert count == chosen.n[row]
        assert count >= min(1, num_tokens)
        assert count <= most
        check_indices(kept, num_tokens)
    for loss in (chosen.loss_t, chosen.loss_m, chosen.loss_s):
        assert torch.isfinite(loss)


def log_relevance_of(num_tokens, seed):
    scores = 3 * torch.randn(num_tokens, generator=seeded(seed))
    return scores.log_softmax(0).requires_grad_()


def check_gradients(gates, *inputs):
    for gradient in torch.autograd.grad(gates.sum(), inputs):
        assert torch.isfinite(gradient).all()


@examples(30)
@given(
    num_tokens=integers(1, 200),
    n=integers(1, 200),
    tau_s=sampled_from([0.05, 0.5]),
    seed=a_seed,
)
def test_the_papers_gate_has_the_value_one_and_a_finite_gradient(num_tokens, n, tau_s, seed):
    n = min(n, num_tokens)
    log_r = log_relevance_of(num_tokens, seed)
    target = torch.tensor(float(n), requires_grad=True)
    torch.manual_seed(seed)
    ((kept, gates, _),) = read_together([gumbel_gate(log_r, target, tau_s, n, n)])
    assert (gates == 1).all()
    assert 1 <= len(kept) <= n
    check_gradients(gates, log_r, target)


def noisy_scores(log_r, seed):
    """The scores in units of their spread, with the noise that the gate draws after this seed."""
    spread = log_r.std(correction=0).clamp(min=1e-6)
    torch.manual_seed(seed)
    noise = gumbel_noise(len(log_r), log_r.device)[:, 0]
    return (log_r - log_r.mean()) / spread + 0.5 * noise


@examples(30)
@given(
    num_tokens=integers(1, 200),
    n=integers(1, 200),
    cap=integers(1, 200),
    seed=a_seed,
)
def test_the_soft_gate_is_a_sigmoid_of_noisy_scores_on_three_times_the_tokens(num_tokens, n, cap, seed):
    n = min(n, num_tokens, cap)
    log_r = log_relevance_of(num_tokens, seed)
    target = torch.tensor(float(n), requires_grad=True)
    torch.manual_seed(seed)
    kept, gates, threshold = soft_gate(log_r, target, 0.5, n, cap)
    scores = noisy_scores(log_r.detach(), seed)
    best = scores.argsort(descending=True)[: min(3 * n, cap)]
    assert_same(kept, best.sort().values)
    all_gates = torch.sigmoid((scores - threshold) / 0.5)
    error = all_gates.sum() - n
    assert error.abs() < 1e-3 * num_tokens
    assert_close(gates, all_gates[kept])
    check_gradients(gates, log_r, target)


def test_what_a_soft_gate_leaves_out_of_a_token_is_the_mean_of_all_tokens():
    """With next to no temperature, the tokens that inference keeps stay whole."""
    (row,), query, positions = ragged_tokens([20], 3)
    call = {
        "retention": 0.2,
        "reencode": False,
    }
    (hard,), inferred = selector_with()([row], query, positions, **call, sample_gate=False)
    torch.manual_seed(0)
    selector = selector_with(gate="soft", tau_s=1e-6)
    pieces = [row[:7], row[7:]]
    (sharp,), chosen = selector([pieces], query, positions, **call, sample_gate=True)
    is_whole = torch.isin(chosen.kept_indices[0], inferred.kept_indices[0])
    assert_close(sharp[is_whole], hard)
    expected = row.mean(0).expand(2 * len(hard), -1)
    assert_close(sharp[~is_whole], expected)


@examples(40)
@given(num_tokens=integers(1, 400), n=integers(1, 400), seed=a_seed)
def test_every_method_keeps_distinct_ascending_indices_in_range(num_tokens, n, seed):
    n = min(n, num_tokens)
    torch.manual_seed(seed)
    scores = torch.randn(num_tokens)
    visual = torch.randn(num_tokens, 6)
    candidates = Candidates(
        visual=[visual],
        query=visual[:2],
        positions=torch.zeros(3, num_tokens),
        grids=[(1, 1, num_tokens)],
        score=lambda _: scores,
        attend=lambda: scores,
    )
    assert_same(METHODS["all"](candidates, num_tokens), torch.arange(num_tokens))
    chosen = {name: METHODS[name](candidates, n) for name in SELECTIONS if name != "all"}
    for kept in chosen.values():
        assert kept.shape == (n,)
        assert kept.dtype == torch.int64
        check_indices(kept, num_tokens)
    ranked = scores.sort(descending=True).values
    chosen_scores = scores[chosen["qtsplus"]]
    assert chosen_scores.min() >= ranked[n - 1] - TIE
    check_even_spread(chosen["uniform"], num_tokens)


def check_even_spread(kept, num_tokens):
    """Gaps differ by at most one, and so do the two ends."""
    before = kept[0].item()
    behind = num_tokens - 1 - kept[-1].item()
    assert abs(before - behind) <= 1
    if len(kept) > 1:
        gaps = kept.diff()
        assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_about_the_same_videos_and_another_are_each_row_alone(reduction):
    """They share the keys, and are re-encoded together; gradients come back from all of them."""
    selector = selector_with(reduction=reduction)
    first = tokens(30, 1).requires_grad_()
    second = tokens(12, 2).requires_grad_()
    third = tokens(9, 3).requires_grad_()
    rows = [
        [first, second],
        [first, second],
        [third],
        [first, second],
        [second, first],
    ]
    query = [tokens(length, length) for length in (3, 7, 2, 5, 3)]
    positions = [torch.arange(sum(map(len, row))).expand(3, -1) for row in rows]
    leaves = [
        *selector.scoring_layers[-1].k_proj.parameters(),
        *selector.reencode_layers.parameters(),
        first,
        second,
        third,
    ]

    def select(*inputs):
        kept, chosen = selector(*inputs, retention=0.5, sample_gate=False)
        return [*kept, *chosen.log_relevance]

    def gradients(outputs):
        loss = sum(output.sin().sum() for output in outputs)
        return torch.autograd.grad(loss, leaves)

    together = select(rows, query, positions)
    kept = []
    log_relevance = []
    for row in zip(rows, query, positions, strict=True):
        row_alone = [[part] for part in row]
        tokens_alone, relevance_alone = select(*row_alone)
        kept.append(tokens_alone)
        log_relevance.append(relevance_alone)
    alone = kept + log_relevance
    assert_close(together, alone, atol=1e-5, rtol=1e-4)
    assert_close(gradients(together), gradients(alone), atol=1e-3, rtol=1e-4)
