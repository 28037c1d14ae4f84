"""
The Triton kernels against the readable twin: on a GPU where there is one, else through Triton's interpreter.

The interpreter has to be switched on before Triton is imported: where it is not, one test starts this file again in a
process of its own.
"""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from relevance_problems import assert_equal_to_twin, states

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="runs in the process with the interpreter")


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="runs the others where they cannot run themselves")
def test_through_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout + run.stderr


def on(device, *tensors):
    return [x.detach().to(device).requires_grad_() for x in tensors]


def triton_kernel(queries, keys, reduction="max"):
    """As if it ran where its inputs are."""
    from qtsplus.kernels.triton_relevance import triton_log_relevance

    return triton_log_relevance(queries.to(DEVICE), keys.to(DEVICE), reduction).cpu()


REDUCTIONS = pytest.mark.parametrize("reduction", ["max", "mean"])


# heads, kv_heads, L, M, head_dim: one of all; a block of tokens less one, and with one more; several blocks of rows;
# heads that are no power of two; grouped heads; several splits of the tokens.
SHAPES = [
    (1, 1, 1, 1, 8),
    (2, 1, 3, 31, 16),
    (2, 2, 1, 65, 32),
    (6, 2, 11, 70, 20),
    (28, 4, 2, 63, 16),
    (3, 3, 33, 9, 80),
    (1, 1, 2, 2100, 16),
]


@on_device
@REDUCTIONS
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_the_twins(shape, reduction):
    heads, kv_heads, num_queries, num_tokens, head_dim = shape
    problem = states(heads, kv_heads, num_queries, num_tokens, head_dim)
    assert_equal_to_twin(partial(triton_kernel, reduction=reduction), *problem, reduction=reduction)


@on_device
def test_the_mean_of_scores_far_apart_stays_finite():
    problem = states(4, 2, num_queries=3, num_tokens=70, scale=60.0)
    assert_equal_to_twin(partial(triton_kernel, reduction="mean"), *problem, reduction="mean")


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@REDUCTIONS
@pytest.mark.parametrize("heads", [(1, 1), (16, 2), (28, 4)])
@pytest.mark.parametrize("num_queries", [1, 60])
@pytest.mark.parametrize("num_tokens", [1, 63, 1111, 70_001])
def test_every_awkward_shape_on_a_gpu(heads, num_queries, num_tokens, reduction):
    problem = states(*heads, num_queries, num_tokens, head_dim=128)
    assert_equal_to_twin(partial(triton_kernel, reduction=reduction), *problem, reduction=reduction)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_16_bit_states_are_in_float32(dtype):
    queries, keys = states(4, 2, num_queries=3, num_tokens=70, dtype=dtype)
    # What leaves is float32; gradients are rounded once, to the states' dtype.
    assert_equal_to_twin(triton_kernel, queries, keys, relative=2 * torch.finfo(dtype).eps)
    log_r, expected = triton_kernel(queries, keys), triton_kernel(queries.float(), keys.float())
    assert log_r.dtype == torch.float32
    torch.testing.assert_close(log_r, expected, atol=1e-5, rtol=1e-5)


@on_device
def test_of_equal_maxima_the_first_takes_the_gradient():
    # 40 rows, so that the second head's copies stand in another block of rows than their originals.
    queries = torch.randint(-3, 4, (2, 20, 4), generator=torch.Generator().manual_seed(0)).float()
    queries[:, 2] = queries[:, 0]
    queries[1] = queries[0]
    keys = torch.randint(-3, 4, (1, 30, 4), generator=torch.Generator().manual_seed(1)).float()
    queries, keys = queries.requires_grad_(), keys.requires_grad_()
    (gradient,) = torch.autograd.grad((triton_kernel(queries, keys) * torch.arange(1.0, 31.0)).sum(), queries)
    assert gradient[0, 12:].any() and not gradient[0, 2].any() and not gradient[1].any()


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("name", "choice"),
    [("_logsumexp_kernel", {}), ("_reduce_kernel", {"BY_MAXIMUM": True}), ("_reduce_kernel", {"BY_MAXIMUM": False})],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_for_gpus_that_are_not_here(name, choice, dtype, capability, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qtsplus.kernels import triton_relevance

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel = getattr(triton_relevance, name)
    constants = {
        **choice,
        "PRECISION": "tf32x3" if dtype == "fp32" else "tf32",
        "HEAD_DIM": 128,
        "BLOCK_D": 128,
        "BLOCK_R": triton_relevance.BLOCK_R,
        "BLOCK_M": 32 if dtype == "fp32" else 64,
    }
    types = {"queries": f"*{dtype}", "keys": f"*{dtype}", "scale": "fp32"}
    types |= dict.fromkeys(["log_sums", "normaliser", "log_r"], "*fp32") | dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 8, "num_stages": 1},
    )
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 99 * 1024  # the least that GPUs since Ampere give a block
