"""The selector against tensors recorded from the reference implementation."""

import pytest
import torch
from torch.testing import assert_close

from qtsplus.hub.checkpoint import REFERENCE, our_name
from qtsplus.model.configuration_qtsplus import QTSplusConfig
from qtsplus.model.selector_qtsplus import QTSplusSelector, find_threshold, gumbel_gate
from reference import load, meta
from tiny import PAPER, assert_same

CASE = ("case1", "selector")
STATED = ("rho_min", "rho_max", "tau_s", "scoring_layers", "reencode_layers", "lambda_t", "lambda_m", "lambda_s")
REFERENCE_ONLY = {"gate": "gumbel", "reencode_rope": False}
LOSSES = {"flops": "loss_t", "kv": "loss_m", "smooth": "loss_s"}


def golden_selector() -> QTSplusSelector:
    given = meta(*CASE, "meta")["config"]
    config = QTSplusConfig(**{name: given[name] for name in STATED}, n_max=given["nmax"], **PAPER, **REFERENCE_ONLY)
    selector = QTSplusSelector(config, given["embedding_dim"], given["n_heads"], given["num_kv_heads"])
    weights = {ours(f"selector.{k.removeprefix('selector.')}"): v for k, v in load(*CASE, "weights").items()}
    selector.load_state_dict({**weights, "rho_history": torch.zeros(2, dtype=torch.int64)})
    return selector


def ours(key: str) -> str:
    return our_name(f"model.qts_plus.{key}", REFERENCE).removeprefix("model.qtsplus.")


def select(selector, inputs, query="Qt"):
    visual = [row for row in inputs["Xv"]]
    positions = [torch.zeros(3, len(row), dtype=torch.long) for row in visual]
    return selector(visual, list(inputs[query]), positions)


def test_inference():
    selector = golden_selector().eval()
    golden = load(*CASE, "infer")
    with torch.no_grad():
        features, output = select(selector, load(*CASE, "inputs"))
    assert_close(output.relevance[0], golden["r"][0], atol=2e-6, rtol=1e-5)
    assert_close(output.rho, golden["rho"], atol=1e-6, rtol=1e-6)
    assert output.n.tolist() == golden["n"].tolist()
    assert_same(output.kept_indices[0], golden["indices_0"])
    assert_close(features[0], golden["Z_0"], atol=5e-6, rtol=1e-5)
    for theirs, name in LOSSES.items():
        assert_close(getattr(output, name), golden[f"loss_{theirs}"], atol=1e-7, rtol=1e-5)
    assert output.threshold is None


@pytest.fixture
def training_call(monkeypatch):
    """The recorded training call, with its Gumbel noise and the running mean that it started from."""
    golden = load(*CASE, "train")
    inputs = load(*CASE, "inputs")
    inputs = {key: value.requires_grad_() for key, value in inputs.items()}
    selector = golden_selector().train()
    total, count = golden["rho_running_before"].tolist()
    selector.rho_history.copy_(torch.tensor([round(total * 2**32), round(count)]))
    monkeypatch.setattr("qtsplus.model.selector_qtsplus.gumbel_noise", lambda n, device: golden["gumbel"][0])
    features, output = select(selector, inputs)
    return golden, inputs, selector, features, output


def test_training_forward(training_call):
    golden, _, _, features, output = training_call
    assert_close(output.threshold, golden["t"], atol=1e-6, rtol=1e-6)
    assert_same(output.kept_indices[0], golden["indices_0"])
    assert_close(features[0], golden["Z_0"], atol=5e-6, rtol=1e-5)
    assert_close(features[0].sum(), golden["sum_Z"], atol=1e-4, rtol=1e-5)
    for theirs, name in LOSSES.items():
        assert_close(getattr(output, name), golden[f"loss_{theirs}"], atol=1e-9, rtol=1e-5)


def test_gate_follows_the_recorded_noise(monkeypatch):
    golden = load(*CASE, "train")
    given = meta(*CASE, "meta")
    r = golden["r"][0].requires_grad_()
    target = golden["rho"][0] * golden["r"].shape[1]
    monkeypatch.setattr("qtsplus.model.selector_qtsplus.gumbel_noise", lambda n, device: golden["gumbel"][0])
    kept, gate, threshold = gumbel_gate(r.log(), target, given["config"]["tau_s"], n=1, n_max=2560)
    assert_close(r - threshold, golden["logit_keep"][0], atol=1e-6, rtol=1e-5)
    assert_same(kept, golden["s_keep"][0].nonzero()[:, 0])
    soft = golden["y_soft_keep"][0][kept]
    (direct,) = torch.autograd.grad(gate.sum(), r)
    # Through its own score a kept token gets s (1 - s) / tau; what t moves comes on top and is the same for all kept.
    slope = soft * (1 - soft) / given["config"]["tau_s"]
    shared = direct[kept] - slope
    weight = torch.sigmoid((r - threshold) / given["config"]["tau_s"])
    weight = weight * (1 - weight)
    assert_close(shared, -(slope.sum() * weight / weight.sum())[kept], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("scalar", ["flops", "kv", "smooth", "sum_Z", "dot_ZW"])
def test_gradients(training_call, scalar):
    golden, inputs, selector, features, output = training_call
    value = {
        "sum_Z": features[0].sum(),
        "dot_ZW": (features[0] * golden["W_0"]).sum(),
        **{theirs: getattr(output, name) for theirs, name in LOSSES.items()},
    }[scalar]
    value.backward()
    expected = {key.split("/")[1]: v for key, v in load(*CASE, "grads").items() if key.startswith(f"{scalar}/")}
    assert expected
    parameters = dict(selector.named_parameters())
    for name, gradient in expected.items():
        mine = inputs[name].grad if name in inputs else parameters[ours(f"selector.{name}")].grad
        assert_close(
            mine, gradient, atol=float(4e-6 * gradient.abs().max()), rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("row", range(13))
def test_threshold_meets_bisection(row):
    table = meta("case6_newton", "table")
    assert len(table) == 13
    case = table[row]
    r = load("case6_newton", "r")[f"r_{row}"]
    target = torch.tensor(case["rho"]).double() * case["M"]  # the table was made with rho in float32
    t = find_threshold(r.double(), target, case["tau"])
    assert float(t) == pytest.approx(case["t_bisection_fp64"], abs=1e-9)
    in_float32 = find_threshold(r, target.float(), case["tau"])
    assert float(in_float32) == pytest.approx(case["t_bisection_fp64"], rel=3e-7)
    if case["converged"]:
        assert float(in_float32) == pytest.approx(case["t_newton10_fp32"], rel=1e-5)
