"""The selector against tensors recorded from the reference implementation."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qtsplus.common.files import rewritten
from qtsplus.hub.checkpoint import REFERENCE
from qtsplus.model.budget_qtsplus import read_together
from qtsplus.model.configuration_qtsplus import QTSplusConfig
from qtsplus.model.selector_qtsplus import QTSplusOutput, QTSplusSelector, find_threshold, gumbel_gate
from reference import load, meta
from tiny import PAPER, assert_same

CASE = ("case1", "selector")
STATED = (
    "rho_min",
    "rho_max",
    "tau_s",
    "scoring_layers",
    "reencode_layers",
    "lambda_t",
    "lambda_m",
    "lambda_s",
)
REFERENCE_ONLY = {"gate": "gumbel", "reencode_rope": False}
LOSSES = {
    "flops": "loss_t",
    "kv": "loss_m",
    "smooth": "loss_s",
}


def close(actual, expected, atol, rtol=1e-5):
    assert_close(actual, expected, atol=atol, rtol=rtol)


def ours(name: str) -> str:
    """What we call a parameter of the reference's selector."""
    theirs = f"model.qts_plus.selector.{name}"
    return rewritten(theirs, REFERENCE).removeprefix("model.qtsplus.")


NOISE = "qtsplus.model.selector_qtsplus.gumbel_noise"


def golden_selector() -> QTSplusSelector:
    stated = meta(*CASE, "meta")["config"]
    config = QTSplusConfig(
        **{name: stated[name] for name in STATED},
        n_max=stated["nmax"],
        **PAPER,
        **REFERENCE_ONLY,
    )
    selector = QTSplusSelector(
        config,
        stated["embedding_dim"],
        stated["n_heads"],
        stated["num_kv_heads"],
    )
    weights = {"rho_history": torch.zeros(2, dtype=torch.int64)}
    for name, weight in load(*CASE, "weights").items():
        theirs = name.removeprefix("selector.")
        weights[ours(theirs)] = weight
    selector.load_state_dict(weights)
    return selector


def select(selector, inputs):
    visual = list(inputs["Xv"])
    query = list(inputs["Qt"])
    positions = [torch.zeros(3, len(row), dtype=torch.long) for row in visual]
    return selector(visual, query, positions)


def check_losses(output, golden, atol):
    for theirs, name in LOSSES.items():
        close(getattr(output, name), golden[f"loss_{theirs}"], atol)


@torch.no_grad()
def test_inference():
    golden = load(*CASE, "infer")
    inputs = load(*CASE, "inputs")
    (features,), output = select(golden_selector().eval(), inputs)
    close(output.relevance[0], golden["r"][0], 2e-6)
    close(output.rho, golden["rho"], 1e-6)
    assert output.n.tolist() == golden["n"].tolist()
    assert_same(output.kept_indices[0], golden["indices_0"])
    close(features, golden["Z_0"], 5e-6)
    check_losses(output, golden, 1e-7)
    assert output.threshold is None


@dataclass
class TrainingCall:
    """A recorded call, and what ours gives."""

    golden: dict[str, Tensor]
    inputs: dict[str, Tensor]
    selector: QTSplusSelector
    features: Tensor
    output: QTSplusOutput


@pytest.fixture
def training_call(monkeypatch):
    """The recorded training call, with its Gumbel noise and the running mean that it started from."""
    golden = load(*CASE, "train")
    inputs = load(*CASE, "inputs")
    for value in inputs.values():
        value.requires_grad_()
    selector = golden_selector().train()
    total, count = golden["rho_running_before"].tolist()
    history = [round(total * 2**32), round(count)]
    selector.rho_history.copy_(torch.tensor(history))
    (noise,) = golden["gumbel"]
    monkeypatch.setattr(NOISE, lambda n, device: noise)
    (features,), output = select(selector, inputs)
    return TrainingCall(golden, inputs, selector, features, output)


def test_training_forward(training_call):
    golden = training_call.golden
    output = training_call.output
    close(output.threshold, golden["t"], 1e-6)
    assert_same(output.kept_indices[0], golden["indices_0"])
    close(training_call.features, golden["Z_0"], 5e-6)
    check_losses(output, golden, 1e-9)


def test_gate_follows_the_recorded_noise(monkeypatch):
    golden = load(*CASE, "train")
    tau_s = meta(*CASE, "meta")["config"]["tau_s"]
    (r,) = golden["r"]
    r.requires_grad_()
    target = golden["rho"][0] * len(r)
    (noise,) = golden["gumbel"]
    monkeypatch.setattr(NOISE, lambda n, device: noise)
    ((kept, gate, threshold),) = read_together([gumbel_gate(r.log(), target, tau_s, n=1, n_max=2560)])
    (logits,) = golden["logit_keep"]
    close(r - threshold, logits, 1e-6)
    (is_kept,) = golden["s_keep"]
    assert_same(kept, is_kept.nonzero()[:, 0])
    (gradient,) = torch.autograd.grad(gate.sum(), r)
    # Through its own score a kept token gets s (1 - s) / tau; what t moves comes on top and is the same for all kept.
    (soft_of_all,) = golden["y_soft_keep"]
    soft = soft_of_all[kept]
    slope = soft * (1 - soft) / tau_s
    through_threshold = gradient[kept] - slope
    probability = torch.sigmoid((r - threshold) / tau_s)
    weight = probability * (1 - probability)
    share = weight / weight.sum()
    expected = -slope.sum() * share
    close(through_threshold, expected[kept], 1e-6, 1e-4)


@pytest.mark.parametrize("scalar", [*LOSSES, "sum_Z", "dot_ZW"])
def test_gradients(training_call, scalar):
    features = training_call.features
    if scalar in LOSSES:
        value = getattr(training_call.output, LOSSES[scalar])
    elif scalar == "sum_Z":
        value = features.sum()
    else:
        value = (features * training_call.golden["W_0"]).sum()
    value.backward()
    leaves = dict(training_call.selector.named_parameters())
    leaves |= training_call.inputs
    recorded = load(*CASE, "grads")
    keys = [key for key in recorded if key.startswith(f"{scalar}/")]
    assert keys
    for key in keys:
        name = key.split("/")[1]
        if name not in leaves:
            name = ours(name)
        gradient = leaves[name].grad
        expected = recorded[key]
        largest = expected.abs().max().item()
        close(gradient, expected, 4e-6 * largest)


@pytest.mark.parametrize("row", range(13))
def test_threshold_meets_bisection(row):
    table = meta("case6_newton", "table")
    assert len(table) == 13
    case = table[row]
    r = load("case6_newton", "r")[f"r_{row}"]
    target = torch.tensor(case["rho"]).double() * case["M"]  # the table was made with rho in float32
    expected = case["t_bisection_fp64"]
    threshold = find_threshold(r.double(), target, case["tau"]).item()
    assert threshold == pytest.approx(expected, abs=1e-9)
    in_float32 = find_threshold(r, target.float(), case["tau"]).item()
    assert in_float32 == pytest.approx(expected, rel=3e-7)
    if case["converged"]:
        assert in_float32 == pytest.approx(case["t_newton10_fp32"], rel=1e-5)
