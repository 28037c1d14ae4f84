"""On a GPU where there is one, else on the CPU: the numbers are those of the CPU in float32."""

import copy

import pytest
import torch

from qtsplus.model.encoding_qtsplus import attend_within
from tiny import assert_same, batch, prompt, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [
    prompt(videos=[(4, 4, 6), (2, 4, 4)]),
    prompt(videos=[(6, 6, 4)], question=9, seed=1),
]
RETENTION = 0.3
TOLERANCES = [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)]
CALL = {
    "retention": RETENTION,
    "max_new_tokens": 6,
    "do_sample": False,
}


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch):
    """A GPU's convolutions round to TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def models():
    """The model on the CPU, and its copy on the device."""
    model = tiny_model(gate="noiseless")
    return model, copy.deepcopy(model).to(DEVICE)


def inputs_on(device):
    return {name: value.to(device) for name, value in batch(*PROMPTS).items()}


def assert_close(mine, expected, tolerance):
    """By the norm of the difference, since single numbers are rounded in another order."""
    mine = mine.detach().double().cpu()
    expected = expected.detach().double().cpu()
    assert (mine - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_attention_in_windows_and_its_gradients(dtype, tolerance):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 64, 128, 160, 167, 168, 468], dtype=torch.int32)
    states = torch.randn(3, 468, 4, 80)  # query, key and value
    weights = torch.randn(468, 4, 80)

    def output_and_gradients(device, precision):
        leaf = states.to(device, precision, copy=True).requires_grad_()
        attended = attend_within(*leaf, bounds.to(device))
        (gradients,) = torch.autograd.grad(attended, leaf, weights.to(device, precision))
        return attended, gradients

    attended, gradients = output_and_gradients(DEVICE, dtype)
    expected, expected_gradients = output_and_gradients("cpu", torch.float64)
    assert_close(attended, expected, tolerance)
    assert_close(gradients, expected_gradients, tolerance)


def generate(model, device):
    return model.generate(
        **inputs_on(device),
        **CALL,
        return_dict_in_generate=True,
    )


def test_generated_tokens_and_those_kept(models):
    on_cpu, on_device = models
    expected = generate(on_cpu, "cpu")
    mine = generate(on_device, DEVICE)
    assert_same(mine.sequences.cpu(), expected.sequences)
    assert_same(mine.qtsplus.kept_indices, expected.qtsplus.kept_indices)


def loss_and_gradient(model, device):
    inputs = inputs_on(device)
    output = model(
        **inputs,
        labels=inputs["input_ids"],
        retention=RETENTION,
        use_cache=False,
    )
    output.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = [gradient.float().flatten() for gradient in gradients]
    return output.loss, torch.cat(flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_step(models, dtype, checkpointing):
    """Loss and gradients of every part, with recomputation and without."""
    on_cpu, on_device = models
    model = copy.deepcopy(on_device).to(dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, gradient = loss_and_gradient(model, DEVICE)
    expected, expected_gradient = loss_and_gradient(copy.deepcopy(on_cpu).train(), "cpu")
    assert_close(loss, expected, 1e-4 if dtype is torch.float32 else 1e-1)
    assert len(gradient) == len(expected_gradient)
    assert gradient.isfinite().all()
    if dtype is torch.float32:  # in half precision other tokens may be kept
        assert_close(gradient, expected_gradient, 1e-3)
