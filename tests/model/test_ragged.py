"""Properties over ragged batches and over the selector's functions, on examples drawn by hypothesis."""

import math
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qtsplus import QTSplusConfig, QTSplusSelector
from qtsplus.model.configuration_qtsplus import POSITION_IDS, REDUCTIONS
from qtsplus.model.methods_qtsplus import METHODS, TIE, Candidates
from qtsplus.model.selector_qtsplus import encode_rows, find_threshold, gumbel_gate, gumbel_noise, soft_gate
from tiny import PAD, PAPER, batch, prompt, tiny_model


def examples(count):
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


# (t, h, w) in patches: one token, one frame, odd numbers of tokens each way, long and flat.
VIDEO_GRIDS = [(1, 2, 2), (1, 4, 6), (2, 2, 2), (3, 4, 10), (5, 6, 2), (4, 2, 6), (2, 10, 10), (7, 2, 2)]
IMAGE_GRIDS = [(1, 2, 2), (1, 4, 4), (1, 6, 2), (1, 2, 10)]
N_MAX = 40


@cache
def model_with(**selector):
    return tiny_model(n_max=N_MAX, **selector)


@st.composite
def a_row(draw):
    return prompt(
        images=draw(st.lists(st.sampled_from(IMAGE_GRIDS), max_size=2)),
        videos=draw(st.lists(st.sampled_from(VIDEO_GRIDS), max_size=3)),
        question=draw(st.integers(1, 60)),
        seed=draw(st.integers(0, 10_000)),
        seconds=draw(st.sampled_from([0.25, 1.0, 3.5])),
        turns=draw(st.integers(0, 1)),
    )


a_batch = st.lists(a_row(), min_size=1, max_size=4)
a_retention = st.none() | st.floats(0.01, 1.0) | st.sampled_from([0.5, 1.0])
a_cap = st.none() | st.integers(1, 60)


def video_tokens(row):
    return sum(t * h * w // 4 for t, h, w in row.videos)


def real_logits(output, inputs, row):
    columns = inputs["attention_mask"] if output.qtsplus is None else output.qtsplus.columns + 1
    return output.logits[row, columns[row] > 0]


def expected_count(rho, num_tokens, *caps):
    if num_tokens == 0:
        return 0
    # The product is rounded to a millionth of a token, so that 0.07 * 100 = 7.000000000000001 asks for 7.
    return max(1, min(math.ceil(round(rho * num_tokens, 6)), *caps))


@examples(25)
@given(
    rows=a_batch,
    pad_left=st.booleans(),
    more_padding=st.sampled_from([0, 40]),
    retention=a_retention,
    cap=a_cap,
    reduction=st.sampled_from(REDUCTIONS),
    position_ids=st.sampled_from(POSITION_IDS),
)
def test_each_row_of_a_ragged_batch_is_as_it_is_alone(
    rows, pad_left, more_padding, retention, cap, reduction, position_ids
):
    model = model_with(reduction=reduction, position_ids=position_ids)
    call = {"retention": retention, "max_visual_tokens": cap}
    inputs = batch(*rows, pad_left=pad_left, width=max(len(row.ids) for row in rows) + more_padding)
    with torch.no_grad():
        together = model(**inputs, **call)
    qtsplus = together.qtsplus
    assert torch.isfinite(together.logits).all()
    for b, row in enumerate(rows):
        single = batch(row)
        with torch.no_grad():
            alone = model(**single, **call)
        logits, expected = real_logits(together, inputs, b), real_logits(alone, single, 0)
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() < 1e-4
        if qtsplus is None:
            assert not row.videos and not row.images
            continue

        kept, num_tokens = qtsplus.kept_indices[b], video_tokens(row)
        rho = float(qtsplus.rho[b]) if retention is None else retention
        count = expected_count(rho, num_tokens, N_MAX, cap or N_MAX)
        assert len(kept) == int(qtsplus.n[b]) == count
        assert (kept.diff() > 0).all() and ((kept >= 0) & (kept < num_tokens)).all()
        assert logits.shape[0] == len(row.ids) - num_tokens + count
        if alone.qtsplus is None:
            assert count == 0 and qtsplus.rho[b] == 0
        else:
            assert torch.equal(kept, alone.qtsplus.kept_indices[0])
            assert (qtsplus.rho[b] - alone.qtsplus.rho[0]).abs() < 1e-4
            if num_tokens:
                torch.testing.assert_close(qtsplus.relevance[b], alone.qtsplus.relevance[0], atol=1e-5, rtol=1e-4)
            else:
                assert alone.qtsplus.relevance is None


@examples(12)
@given(rows=a_batch, pad_left=st.booleans(), retention=a_retention, cap=a_cap)
def test_a_row_generates_in_a_batch_what_it_generates_alone(rows, pad_left, retention, cap):
    model = model_with()
    call = {"retention": retention, "max_visual_tokens": cap, "max_new_tokens": 3}
    inputs = batch(*rows, pad_left=pad_left)
    width = inputs["input_ids"].shape[1]
    together = model.generate(**inputs, **call)
    assert torch.equal(together[:, :width], inputs["input_ids"])
    for b, row in enumerate(rows):
        alone = model.generate(**batch(row), **call)[0, len(row.ids) :]
        answer = together[b, width:]
        assert answer[: len(alone)].tolist() == alone.tolist()
        assert (answer[len(alone) :] == PAD).all()


@examples(10)
@given(rows=a_batch, pad_left=st.booleans(), gate=st.sampled_from(["soft", "detached", "gumbel"]))
def test_a_training_step_on_any_batch_has_finite_gradients_on_every_trainable_parameter(rows, pad_left, gate):
    model = model_with(gate=gate).train()
    torch.manual_seed(0)
    model.zero_grad()
    inputs = batch(*rows, pad_left=pad_left)
    loss = model(**inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)).loss
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    model.eval()


# The selector on its own

HIDDEN = 32


@cache
def selector_with(**config):
    torch.manual_seed(1)
    selector = QTSplusSelector(QTSplusConfig(**{**PAPER, **config}), HIDDEN, 4, 2, mrope_section=(1, 1, 2))
    with torch.no_grad():
        for name, parameter in selector.named_parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 and "norm" in name else 0.0, 0.3)
    return selector.eval()


def tokens(count, seed, scale=1.0):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)) * scale


def ragged_tokens(counts, seed):
    visual = [tokens(count, seed + b) for b, count in enumerate(counts)]
    query = [tokens(3 + b, 500 + seed + b) for b in range(len(counts))]
    positions = [torch.arange(count).expand(3, -1) for count in counts]
    return visual, query, positions


counts_of_tokens = st.lists(st.integers(0, 60), min_size=1, max_size=4)
a_seed = st.integers(0, 100_000)


@examples(60)
@given(
    num_tokens=st.integers(1, 500),
    fraction=st.floats(0.01, 0.99),
    tau_s=st.sampled_from([0.02, 0.05, 0.5, 3.0]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    peak=st.sampled_from([0.0, 100.0, -100.0]),
    seed=a_seed,
)
def test_the_threshold_solves_its_equation_to_a_millionth_of_a_token(num_tokens, fraction, tau_s, scale, peak, seed):
    scores = torch.randn(num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale
    scores[0] += peak
    target = torch.tensor(fraction * num_tokens, dtype=torch.float64)
    threshold = find_threshold(scores, target, tau_s)
    count = torch.sigmoid((scores - threshold) / tau_s).sum()
    assert (count - target).abs() < 1e-6


@examples(20)
@given(num_tokens=st.integers(2, 12), fraction=st.floats(0.15, 0.85), tau_s=st.floats(0.4, 2.0), seed=a_seed)
def test_the_gradient_of_the_threshold_equals_finite_differences(num_tokens, fraction, tau_s, seed):
    scores = torch.randn(num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    target = torch.tensor(fraction * num_tokens, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda scores, target: find_threshold(scores, target, tau_s),
        (scores.requires_grad_(), target.requires_grad_()),
        atol=1e-6,
    )


@examples(30)
@given(counts=counts_of_tokens, retention=a_retention, cap=a_cap, seed=a_seed)
def test_detached_training_keeps_exactly_what_inference_keeps(counts, retention, cap, seed):
    selector = selector_with(gate="detached", n_max=N_MAX)
    call = {"retention": retention, "max_visual_tokens": cap}
    inputs = ragged_tokens(counts, seed)
    kept_tokens, inferred = selector(*inputs, **call, sample_gate=False)
    trained_tokens, trained = selector(*inputs, **call, sample_gate=True)
    assert trained.n.tolist() == inferred.n.tolist()
    for b in range(len(counts)):
        assert torch.equal(trained.kept_indices[b], inferred.kept_indices[b])
        torch.testing.assert_close(trained_tokens[b], kept_tokens[b], atol=1e-5, rtol=1e-5)
    assert torch.equal(trained.rho, inferred.rho)


@examples(25)
@given(
    counts=counts_of_tokens,
    cut=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    retention=a_retention,
    scoring_layers=st.integers(1, 2),
    gate=st.sampled_from(["soft", "detached"]),
    training=st.booleans(),
    seed=a_seed,
)
def test_a_row_may_lie_in_several_tensors(counts, cut, retention, scoring_layers, gate, training, seed):
    """As the features of several videos do."""
    selector = selector_with(scoring_layers=scoring_layers, gate=gate)
    visual, query, positions = ragged_tokens(counts, seed)
    visual = [row.requires_grad_(training) for row in visual]
    pieces = [row.tensor_split(sorted(min(place, len(row)) for place in cut)) for row in visual]
    results = []
    for rows in (visual, pieces):
        torch.manual_seed(seed)
        with torch.set_grad_enabled(training):
            kept, chosen = selector(rows, query, positions, retention=retention, sample_gate=training)
            total = torch.cat(kept).sin().sum()
        gradients = torch.autograd.grad(total, visual, allow_unused=True, materialize_grads=True) if training else ()
        results.append((kept, chosen, gradients))
    (kept, chosen, gradients), (other_kept, other, other_gradients) = results
    for b in range(len(counts)):
        assert torch.equal(chosen.kept_indices[b], other.kept_indices[b])
        torch.testing.assert_close(kept[b], other_kept[b], atol=1e-5, rtol=1e-5)
    for one, expected in zip(other_gradients, gradients, strict=True):
        torch.testing.assert_close(one, expected, atol=1e-5 * (1 + float(expected.norm())), rtol=1e-4)


@examples(20)
@given(counts=counts_of_tokens, seed=a_seed, data=st.data())
def test_each_row_may_have_a_retention_of_its_own(counts, seed, data):
    selector = selector_with(n_max=N_MAX)
    retention = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(counts), max_size=len(counts)))
    inputs = ragged_tokens(counts, seed)
    _, together = selector(*inputs, retention=retention)
    for row, own in enumerate(retention):
        _, alone = selector(*([part[row]] for part in inputs), retention=own)
        assert torch.equal(together.kept_indices[row], alone.kept_indices[0])
        assert together.rho[row] == alone.rho[0]
    with pytest.raises(ValueError, match="expected one for all, or one for each"):
        selector(*inputs, retention=[*retention, 0.5])


@examples(60)
@given(
    gate=st.sampled_from(["soft", "gumbel", "detached"]),
    counts=counts_of_tokens,
    retention=a_retention,
    n_max=st.integers(1, 30),
    cap=a_cap,
    seed=a_seed,
)
def test_n_max_caps_every_gate_in_training_and_inference(gate, counts, retention, n_max, cap, seed):
    selector = selector_with(gate=gate, n_max=n_max)
    inputs = ragged_tokens(counts, seed)
    torch.manual_seed(seed)
    for sample_gate in (True, False):
        _, chosen = selector(*inputs, retention=retention, max_visual_tokens=cap, sample_gate=sample_gate)
        for b, num_tokens in enumerate(counts):
            kept = chosen.kept_indices[b]
            assert len(kept) == int(chosen.n[b]) <= min(n_max, cap or n_max)
            assert (len(kept) >= 1) == (num_tokens >= 1)
            assert (kept.diff() > 0).all() and (kept < num_tokens).all()
        assert torch.isfinite(torch.stack([chosen.loss_t, chosen.loss_m, chosen.loss_s])).all()


@examples(30)
@given(num_tokens=st.integers(1, 200), n=st.integers(1, 200), tau_s=st.sampled_from([0.05, 0.5]), seed=a_seed)
def test_the_papers_gate_has_the_value_one_and_a_finite_gradient(num_tokens, n, tau_s, seed):
    n = min(n, num_tokens)
    generator = torch.Generator().manual_seed(seed)
    log_r = (torch.randn(num_tokens, generator=generator) * 3).log_softmax(0).requires_grad_()
    target = torch.tensor(float(n), requires_grad=True)
    torch.manual_seed(seed)
    kept, gates, _ = gumbel_gate(log_r, target, tau_s, n, n)
    assert torch.equal(gates, torch.ones_like(gates)) and 1 <= len(kept) <= n
    for gradient in torch.autograd.grad(gates.sum(), (log_r, target)):
        assert torch.isfinite(gradient).all()


def in_units_of_its_spread(scores):
    return (scores - scores.mean()) / scores.std(correction=0).clamp(min=1e-6)


@examples(30)
@given(num_tokens=st.integers(1, 200), n=st.integers(1, 200), cap=st.integers(1, 200), seed=a_seed)
def test_the_soft_gate_is_a_sigmoid_of_noisy_scores_on_three_times_the_tokens(num_tokens, n, cap, seed):
    n = min(n, num_tokens, cap)
    log_r = (torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed)) * 3).log_softmax(0).requires_grad_()
    target = torch.tensor(float(n), requires_grad=True)
    torch.manual_seed(seed)
    kept, gates, threshold = soft_gate(log_r, target, 0.5, n, cap)
    torch.manual_seed(seed)
    scores = in_units_of_its_spread(log_r.detach()) + 0.5 * gumbel_noise(num_tokens, log_r.device)[:, 0]
    assert kept.tolist() == sorted(scores.argsort(descending=True)[: min(3 * n, cap)].tolist())
    assert abs(float(((scores - threshold.detach()) / 0.5).sigmoid().sum()) - n) < 1e-3 * num_tokens
    torch.testing.assert_close(gates, ((scores[kept] - threshold) / 0.5).sigmoid())
    for gradient in torch.autograd.grad(gates.sum(), (log_r, target)):
        assert torch.isfinite(gradient).all()


def test_what_a_soft_gate_leaves_out_of_a_token_is_the_mean_of_all_tokens():
    """Of a row that lies in two tensors; and with next to no temperature, what inference keeps stays whole."""
    (row,), query, positions = ragged_tokens([20], 3)
    selector, call = selector_with(gate="soft"), {"retention": 0.2, "reencode": False}
    torch.manual_seed(0)
    (soft,), chosen = selector([[row[:7], row[7:]]], query, positions, **call, sample_gate=True)
    torch.manual_seed(0)
    scores = in_units_of_its_spread(chosen.log_relevance[0]) + 0.5 * gumbel_noise(20, row.device)[:, 0]
    gates = ((scores - chosen.threshold[0]) / 0.5).sigmoid()[chosen.kept_indices[0], None]
    torch.testing.assert_close(soft, gates * row[chosen.kept_indices[0]] + (1 - gates) * row.mean(0))

    (hard,), inferred = selector([row], query, positions, **call, sample_gate=False)
    (sharp,), chosen = selector_with(gate="soft", tau_s=1e-6)([row], query, positions, **call, sample_gate=True)
    assert len(sharp) == 3 * len(hard)
    whole = torch.isin(chosen.kept_indices[0], inferred.kept_indices[0])
    torch.testing.assert_close(sharp[whole], hard)
    torch.testing.assert_close(sharp[~whole], row.mean(0).expand(2 * len(hard), -1))


@examples(40)
@given(num_tokens=st.integers(1, 400), n=st.integers(1, 400), seed=a_seed)
def test_every_method_keeps_distinct_ascending_indices_in_range(num_tokens, n, seed):
    n = min(n, num_tokens)
    torch.manual_seed(seed)
    scores = torch.randn(num_tokens)
    visual, grids = [torch.randn(num_tokens, 6)], [(1, 1, num_tokens)]
    candidates = Candidates(
        visual, visual[0][:2], torch.zeros(3, num_tokens), grids, lambda _: scores, attend=lambda: scores
    )
    chosen = {name: select(candidates, n if name != "all" else num_tokens) for name, select in METHODS.items()}
    assert torch.equal(chosen.pop("all"), torch.arange(num_tokens))
    uniform = chosen["uniform"]
    for kept in chosen.values():
        assert kept.shape == (n,) and kept.dtype == torch.int64
        assert (kept.diff() > 0).all() and kept[0] >= 0 and kept[-1] < num_tokens
    # Evenly spread: gaps differ by at most one, and so do the two ends.
    if n > 1:
        assert uniform.diff().max() - uniform.diff().min() <= 1
    assert abs(int(uniform[0]) - (num_tokens - 1 - int(uniform[-1]))) <= 1
    assert scores[chosen["qtsplus"]].min() >= scores.sort(descending=True).values[n - 1] - TIE


@examples(25)
@given(
    counts=counts_of_tokens,
    selection=st.sampled_from(["qtsplus", "uniform", "random"]),
    training=st.booleans(),
    seed=a_seed,
)
def test_retention_one_keeps_all_and_equals_selection_all(counts, selection, training, seed):
    inputs = ragged_tokens(counts, seed)
    kept_all, everything = selector_with(selection="all")(*inputs)
    kept_one, chosen = selector_with(selection=selection)(*inputs, retention=1.0, sample_gate=training)
    for b, num_tokens in enumerate(counts):
        assert chosen.kept_indices[b].tolist() == everything.kept_indices[b].tolist() == list(range(num_tokens))
        torch.testing.assert_close(kept_one[b], kept_all[b], atol=1e-5, rtol=1e-5)


@examples(25)
@given(
    counts=counts_of_tokens,
    selection=st.sampled_from(["uniform", "random"]),
    retention=a_retention,
    cap=a_cap,
    seed=a_seed,
)
def test_uniform_and_random_keep_as_many_as_the_selector(counts, selection, retention, cap, seed):
    inputs = ragged_tokens(counts, seed)
    call = {"retention": retention, "max_visual_tokens": cap}
    _, ours = selector_with(n_max=N_MAX)(*inputs, **call)
    _, theirs = selector_with(n_max=N_MAX, selection=selection)(*inputs, **call)
    assert theirs.n.tolist() == ours.n.tolist()
    assert torch.equal(theirs.rho, ours.rho)


def test_rows_are_re_encoded_together_as_each_alone():
    """Tokens and gradients, where a row has none, one or many, with and without their places."""
    torch.manual_seed(0)
    selector = QTSplusSelector(QTSplusConfig(), 64, 4, 2, mrope_section=(2, 3, 3)).double()
    rows = [torch.randn(count, 64, dtype=torch.float64, requires_grad=True) for count in (5, 0, 1, 33)]
    positions = [torch.randint(0, 9, (3, len(row))) for row in rows]
    weights = [torch.randn_like(row) for row in rows]

    def run(chosen, places):
        encoded = encode_rows(
            selector,
            selector.reencode_layers,
            [rows[row] for row in chosen],
            [positions[row] for row in chosen] if places else None,
        )
        loss = sum((tokens * weights[row]).sum() for tokens, row in zip(encoded, chosen, strict=True))
        wanted = [*(rows[row] for row in chosen if len(rows[row])), *selector.reencode_layers.parameters()]
        return encoded, torch.autograd.grad(loss, wanted)

    for places in (True, False):
        together, gradients = run([0, 1, 2, 3], places)
        assert together[1].shape == (0, 64)
        single = [run([row], places) for row in (0, 2, 3)]
        for encoded, ((alone,), _) in zip((together[0], *together[2:]), single, strict=True):
            torch.testing.assert_close(encoded, alone)
        torch.testing.assert_close(gradients[:3], tuple(grads[0] for _, grads in single))
        of_weights = zip(*(grads[1:] for _, grads in single), strict=True)
        for gradient, parts in zip(gradients[3:], of_weights, strict=True):
            torch.testing.assert_close(gradient, sum(parts), atol=1e-5, rtol=1e-5)  # norms are in float32


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_about_one_video_and_another_are_each_row_alone(reduction):
    """They share the keys; gradients come back from all of them."""
    torch.manual_seed(0)
    selector = QTSplusSelector(QTSplusConfig(reduction=reduction), 64, 4, 2, mrope_section=(2, 3, 3))
    parts = [torch.randn(count, 64, requires_grad=True) for count in (30, 12, 9)]
    rows = [parts[:2], parts[:2], parts[2:], parts[:2], [parts[1], parts[0]]]
    query = [torch.randn(length, 64) for length in (3, 7, 2, 5, 3)]
    positions = [torch.arange(sum(map(len, row))).expand(3, -1) for row in rows]

    def run(*chosen):
        call = [[values[row] for row in chosen] for values in (rows, query, positions)]
        return selector(*call, retention=0.5, sample_gate=False)[1].log_relevance

    together, alone = run(*range(5)), [run(row)[0] for row in range(5)]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)
    weights = [selector.scoring_layers[-1].k_proj.weight, *parts]
    gradients = [torch.autograd.grad(sum((one**2).sum() for one in many), weights) for many in (together, alone)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
