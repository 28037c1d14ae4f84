"""Properties over ragged batches and over the selector's functions, on examples drawn by hypothesis."""

import math
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qtsplus import QTSplusConfig, QTSplusSelector
from qtsplus.model.fields_qtsplus import POSITION_IDS, REDUCTIONS
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
    """Those of a row's tokens, without padding."""
    is_real = inputs["attention_mask"].bool()
    if output.qtsplus is not None:
        is_real = output.qtsplus.columns >= 0
    return output.logits[row, is_real[row]]


def expected_count(rho, num_tokens, *caps):
    if num_tokens == 0:
        return 0
    # The product is rounded to a millionth of a token, so that 0.07 * 100 = 7.000000000000001 asks for 7.
    wanted = math.ceil(round(rho * num_tokens, 6))
    return max(1, min(wanted, *caps))


def check_indices(kept, num_tokens):
    """They are ascending, each once, and among the tokens."""
    assert (kept.diff() > 0).all()
    assert ((kept >= 0) & (kept < num_tokens)).all()


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
    longest = max(len(row.ids) for row in rows)
    inputs = batch(*rows, pad_left=pad_left, width=longest + more_padding)
    with torch.no_grad():
        together = model(**inputs, **call)
    assert torch.isfinite(together.logits).all()
    for index, row in enumerate(rows):
        single = batch(row)
        with torch.no_grad():
            alone = model(**single, **call)
        logits = real_logits(together, inputs, index)
        torch.testing.assert_close(logits, real_logits(alone, single, 0), atol=1e-4, rtol=0)
        chosen = together.qtsplus
        if chosen is None:
            assert not row.videos
            assert not row.images
            continue
        kept = chosen.kept_indices[index]
        num_tokens = video_tokens(row)
        rho = float(chosen.rho[index]) if retention is None else retention
        count = expected_count(rho, num_tokens, N_MAX, cap or N_MAX)
        assert len(kept) == int(chosen.n[index]) == count
        check_indices(kept, num_tokens)
        assert len(logits) == len(row.ids) - num_tokens + count
        if alone.qtsplus is None:
            assert count == chosen.rho[index] == 0
        else:
            check_choice(chosen, index, alone.qtsplus)


def check_choice(together, index, alone):
    """A row's tokens, budget and relevance are those of the row alone."""
    assert torch.equal(together.kept_indices[index], alone.kept_indices[0])
    torch.testing.assert_close(together.rho[index], alone.rho[0], atol=1e-4, rtol=0)
    if together.num_tokens[index] == 0:
        assert alone.relevance is None
    else:
        torch.testing.assert_close(together.relevance[index], alone.relevance[0], atol=1e-5, rtol=1e-4)


@examples(12)
@given(rows=a_batch, pad_left=st.booleans(), retention=a_retention, cap=a_cap)
def test_a_row_generates_in_a_batch_what_it_generates_alone(rows, pad_left, retention, cap):
    model = model_with()
    call = {"retention": retention, "max_visual_tokens": cap, "max_new_tokens": 3}
    inputs = batch(*rows, pad_left=pad_left)
    width = inputs["input_ids"].shape[1]
    together = model.generate(**inputs, **call)
    assert torch.equal(together[:, :width], inputs["input_ids"])
    for row, answer in zip(rows, together[:, width:], strict=True):
        alone = model.generate(**batch(row), **call)[0, len(row.ids) :]
        padding = [PAD] * (len(answer) - len(alone))
        assert answer.tolist() == alone.tolist() + padding


@examples(10)
@given(rows=a_batch, pad_left=st.booleans(), gate=st.sampled_from(["soft", "detached", "gumbel"]))
def test_a_training_step_on_any_batch_has_finite_gradients_on_every_trainable_parameter(rows, pad_left, gate):
    model = model_with(gate=gate).train()
    torch.manual_seed(0)
    model.zero_grad()
    inputs = batch(*rows, pad_left=pad_left)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), name
    model.eval()


# The selector on its own

HIDDEN = 32


@cache
def selector_with(**config):
    torch.manual_seed(1)
    selector = QTSplusSelector(QTSplusConfig(**{**PAPER, **config}), HIDDEN, 4, 2, mrope_section=(1, 1, 2))
    with torch.no_grad():
        for name, parameter in selector.named_parameters():
            is_norm = parameter.ndim == 1 and "norm" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.3)
    return selector.eval()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


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
    scores = scale * torch.randn(num_tokens, dtype=torch.float64, generator=seeded(seed))
    scores[0] += peak
    target = torch.tensor(fraction * num_tokens, dtype=torch.float64)
    threshold = find_threshold(scores, target, tau_s)
    count = torch.sigmoid((scores - threshold) / tau_s).sum()
    assert (count - target).abs() < 1e-6


@examples(20)
@given(num_tokens=st.integers(2, 12), fraction=st.floats(0.15, 0.85), tau_s=st.floats(0.4, 2.0), seed=a_seed)
def test_the_gradient_of_the_threshold_equals_finite_differences(num_tokens, fraction, tau_s, seed):
    scores = torch.randn(num_tokens, dtype=torch.float64, generator=seeded(seed))
    target = torch.tensor(fraction * num_tokens, dtype=torch.float64)
    inputs = (scores.requires_grad_(), target.requires_grad_())
    torch.autograd.gradcheck(lambda scores, target: find_threshold(scores, target, tau_s), inputs, atol=1e-6)


@examples(30)
@given(counts=counts_of_tokens, retention=a_retention, cap=a_cap, seed=a_seed)
def test_detached_training_keeps_exactly_what_inference_keeps(counts, retention, cap, seed):
    selector = selector_with(gate="detached", n_max=N_MAX)
    call = {"retention": retention, "max_visual_tokens": cap}
    inputs = ragged_tokens(counts, seed)
    kept_tokens, inferred = selector(*inputs, **call, sample_gate=False)
    trained_tokens, trained = selector(*inputs, **call, sample_gate=True)
    assert trained.n.tolist() == inferred.n.tolist()
    torch.testing.assert_close(trained.kept_indices, inferred.kept_indices, atol=0, rtol=0)
    torch.testing.assert_close(trained_tokens, kept_tokens, atol=1e-5, rtol=1e-5)
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
def test_a_row_may_be_in_several_tensors(counts, cut, retention, scoring_layers, gate, training, seed):
    """As the features of several videos are."""
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
            total = torch.cat(kept).sin().sum()
        gradients = ()
        if training:
            gradients = torch.autograd.grad(total, visual, allow_unused=True, materialize_grads=True)
        return kept, chosen.kept_indices, gradients

    kept, kept_indices, gradients = select(visual)
    kept_of_pieces, indices_of_pieces, gradients_of_pieces = select(pieces)
    torch.testing.assert_close(indices_of_pieces, kept_indices, atol=0, rtol=0)
    torch.testing.assert_close(kept_of_pieces, kept, atol=1e-5, rtol=1e-5)
    for gradient, expected in zip(gradients_of_pieces, gradients, strict=True):
        size = 1 + float(expected.norm())
        torch.testing.assert_close(gradient, expected, atol=1e-5 * size, rtol=1e-4)


@examples(20)
@given(counts=counts_of_tokens, seed=a_seed, data=st.data())
def test_each_row_may_have_a_retention_of_its_own(counts, seed, data):
    selector = selector_with(n_max=N_MAX)
    retention = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(counts), max_size=len(counts)))
    inputs = ragged_tokens(counts, seed)
    _, together = selector(*inputs, retention=retention)
    for row, own in enumerate(retention):
        row_alone = [[part[row]] for part in inputs]
        _, alone = selector(*row_alone, retention=own)
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
        for row, num_tokens in enumerate(counts):
            kept = chosen.kept_indices[row]
            assert len(kept) == int(chosen.n[row])
            assert len(kept) <= min(n_max, cap or n_max)
            assert bool(len(kept)) == bool(num_tokens)
            check_indices(kept, num_tokens)
        losses = torch.stack([chosen.loss_t, chosen.loss_m, chosen.loss_s])
        assert torch.isfinite(losses).all()


@examples(30)
@given(num_tokens=st.integers(1, 200), n=st.integers(1, 200), tau_s=st.sampled_from([0.05, 0.5]), seed=a_seed)
def test_the_papers_gate_has_the_value_one_and_a_finite_gradient(num_tokens, n, tau_s, seed):
    n = min(n, num_tokens)
    log_r = log_relevance_of(num_tokens, seed)
    target = torch.tensor(float(n), requires_grad=True)
    torch.manual_seed(seed)
    kept, gates, _ = gumbel_gate(log_r, target, tau_s, n, n)
    assert torch.equal(gates, torch.ones_like(gates))
    assert 1 <= len(kept) <= n
    check_gradients(gates, log_r, target)


def log_relevance_of(num_tokens, seed):
    scores = 3 * torch.randn(num_tokens, generator=seeded(seed))
    return scores.log_softmax(0).requires_grad_()


def check_gradients(gates, *inputs):
    for gradient in torch.autograd.grad(gates.sum(), inputs):
        assert torch.isfinite(gradient).all()


def noisy_scores(log_r):
    """In units of their spread, with the noise that the gate draws next."""
    spread = log_r.std(correction=0).clamp(min=1e-6)
    noise = gumbel_noise(len(log_r), log_r.device)[:, 0]
    return (log_r - log_r.mean()) / spread + 0.5 * noise


@examples(30)
@given(num_tokens=st.integers(1, 200), n=st.integers(1, 200), cap=st.integers(1, 200), seed=a_seed)
def test_the_soft_gate_is_a_sigmoid_of_noisy_scores_on_three_times_the_tokens(num_tokens, n, cap, seed):
    n = min(n, num_tokens, cap)
    log_r = log_relevance_of(num_tokens, seed)
    target = torch.tensor(float(n), requires_grad=True)
    torch.manual_seed(seed)
    kept, gates, threshold = soft_gate(log_r, target, 0.5, n, cap)
    torch.manual_seed(seed)
    scores = noisy_scores(log_r.detach())
    best = scores.argsort(descending=True)[: min(3 * n, cap)]
    assert kept.tolist() == sorted(best.tolist())
    all_gates = ((scores - threshold) / 0.5).sigmoid()
    assert abs(float(all_gates.detach().sum()) - n) < 1e-3 * num_tokens
    torch.testing.assert_close(gates, all_gates[kept])
    check_gradients(gates, log_r, target)


def test_what_a_soft_gate_leaves_out_of_a_token_is_the_mean_of_all_tokens():
    """The row is in two tensors; and with next to no temperature, what inference keeps stays whole."""
    (row,), query, positions = ragged_tokens([20], 3)
    mean = row.mean(0)
    selector = selector_with(gate="soft")
    sharp_selector = selector_with(gate="soft", tau_s=1e-6)
    call = {"retention": 0.2, "reencode": False}
    torch.manual_seed(0)
    (soft,), chosen = selector([[row[:7], row[7:]]], query, positions, **call, sample_gate=True)
    (kept,) = chosen.kept_indices
    torch.manual_seed(0)
    scores = noisy_scores(chosen.log_relevance[0])
    gates = ((scores - chosen.threshold[0]) / 0.5).sigmoid()[kept, None]
    torch.testing.assert_close(soft, gates * row[kept] + (1 - gates) * mean)

    (hard,), inferred = selector([row], query, positions, **call, sample_gate=False)
    (sharp,), chosen = sharp_selector([row], query, positions, **call, sample_gate=True)
    assert len(sharp) == 3 * len(hard)
    is_whole = torch.isin(chosen.kept_indices[0], inferred.kept_indices[0])
    torch.testing.assert_close(sharp[is_whole], hard)
    torch.testing.assert_close(sharp[~is_whole], mean.expand(2 * len(hard), -1))


@examples(40)
@given(num_tokens=st.integers(1, 400), n=st.integers(1, 400), seed=a_seed)
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
    assert torch.equal(METHODS["all"](candidates, num_tokens), torch.arange(num_tokens))
    chosen = {name: select(candidates, n) for name, select in METHODS.items() if name != "all"}
    for kept in chosen.values():
        assert kept.shape == (n,)
        assert kept.dtype == torch.int64
        check_indices(kept, num_tokens)
    lowest_of_the_best = scores.sort(descending=True).values[n - 1]
    assert scores[chosen["qtsplus"]].min() >= lowest_of_the_best - TIE
    # Evenly spread: gaps differ by at most one, and so do the two ends.
    uniform = chosen["uniform"]
    before = int(uniform[0])
    behind = num_tokens - 1 - int(uniform[-1])
    assert abs(before - behind) <= 1
    if n > 1:
        gaps = uniform.diff()
        assert gaps.max() - gaps.min() <= 1


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
    assert [kept.tolist() for kept in everything.kept_indices] == [list(range(count)) for count in counts]
    torch.testing.assert_close(chosen.kept_indices, everything.kept_indices, atol=0, rtol=0)
    torch.testing.assert_close(kept_one, kept_all, atol=1e-4, rtol=1e-5)  # of numbers up to 20


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


@pytest.mark.parametrize("with_places", [True, False])
def test_rows_are_re_encoded_together_as_each_alone(with_places):
    """Tokens and gradients, where a row has none, one or many, with and without their places."""
    torch.manual_seed(0)
    selector = QTSplusSelector(QTSplusConfig(), 64, 4, 2, mrope_section=(2, 3, 3)).double()
    layers = selector.reencode_layers
    rows = [torch.randn(count, 64, dtype=torch.float64, requires_grad=True) for count in (5, 1, 33)]
    rows.insert(1, torch.zeros(0, 64, dtype=torch.float64))
    positions = [torch.randint(0, 9, (3, len(row))) for row in rows]
    weights = [torch.randn_like(row) for row in rows]

    def encode(chosen):
        """The encoded rows, and the gradients of their tokens and of the weights."""
        places = [positions[row] for row in chosen] if with_places else None
        encoded = encode_rows(selector, layers, [rows[row] for row in chosen], places)
        loss = sum((tokens * weights[row]).sum() for tokens, row in zip(encoded, chosen, strict=True))
        with_tokens = [rows[row] for row in chosen if len(rows[row])]
        gradients = torch.autograd.grad(loss, [*with_tokens, *layers.parameters()])
        return encoded, gradients[: len(with_tokens)], gradients[len(with_tokens) :]

    together, of_rows, of_weights = encode([0, 1, 2, 3])
    assert together.pop(1).shape == (0, 64)
    sums = [torch.zeros_like(gradient) for gradient in of_weights]
    for place, row in enumerate((0, 2, 3)):
        (alone,), (of_row,), of_weights_alone = encode([row])
        torch.testing.assert_close(together[place], alone)
        torch.testing.assert_close(of_rows[place], of_row)
        sums = [total + gradient for total, gradient in zip(sums, of_weights_alone, strict=True)]
    torch.testing.assert_close(list(of_weights), sums, atol=1e-5, rtol=1e-5)  # norms are in float32


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_about_one_video_and_another_are_each_row_alone(reduction):
    """They share the keys; gradients come back from all of them."""
    torch.manual_seed(0)
    selector = QTSplusSelector(QTSplusConfig(reduction=reduction), 64, 4, 2, mrope_section=(2, 3, 3))
    first, second, third = parts = [torch.randn(count, 64, requires_grad=True) for count in (30, 12, 9)]
    rows = [[first, second], [first, second], [third], [first, second], [second, first]]
    query = [torch.randn(length, 64) for length in (3, 7, 2, 5, 3)]
    positions = [torch.arange(sum(map(len, row))).expand(3, -1) for row in rows]

    def select(*inputs):
        _, chosen = selector(*inputs, retention=0.5, sample_gate=False)
        return list(chosen.log_relevance)

    together = select(rows, query, positions)
    alone = []
    for row in zip(rows, query, positions, strict=True):
        alone += select(*([part] for part in row))
    torch.testing.assert_close(together, alone)
    weights = [selector.scoring_layers[-1].k_proj.weight, *parts]
    gradients = []
    for log_relevance in (together, alone):
        loss = sum((row**2).sum() for row in log_relevance)
        gradients.append(torch.autograd.grad(loss, weights))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
