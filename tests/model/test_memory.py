"""What selection holds in memory: measured in a process of its own, or as the size of every tensor that it makes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model_checks import TRANSFORMERS
from qtsplus.model.fields_qtsplus import REDUCTIONS
from qtsplus.model.methods_qtsplus import METHODS
from qtsplus.model.relevance_qtsplus import QTSplusLayer, rotary_tables
from scenes import Scene
from tiny import batch, compress, prompt, seeded, tiny_model

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def measure(*steps: str) -> dict[str, float]:
    script = Path(__file__).parents[1] / "measure_memory.py"
    environment = {
        **os.environ,
        # Else glibc would keep what was freed for later: so every tensor is its own mapping, there as long as it lives.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, script, *steps],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    *_, last_line = done.stdout.splitlines()
    return json.loads(last_line)


@pytest.fixture(scope="module")
def measured():
    return measure("relevance", "path", "forecasts")


@linux_only
def test_relevance_of_180_000_tokens_takes_under_100_mb_and_nothing_holds_the_features_twice(measured):
    assert measured["chunked"] < 100
    for reduction in REDUCTIONS:
        assert measured[f"training_{reduction}"] < 100, reduction
    assert measured["naive"] > 125
    assert measured["path"] < 0.5 * measured["features"], "from there to the first token"


def test_the_features_of_several_videos_are_never_joined():
    model = tiny_model()
    grid = (20, 20, 20)
    inputs = batch(prompt(videos=[grid, grid], question=2))
    width = model.config.text_config.hidden_size
    features = [torch.randn(2000, width, generator=seeded(seed)) for seed in range(2)]
    inputs.pop("pixel_values_videos")
    with torch.no_grad(), Sizes() as sizes:
        compress(model.model, **inputs, video_features=features, retention=0.1)
    assert sizes.largest < 4000 * width * 4


@linux_only
@pytest.mark.skipif(Version("5.20") > TRANSFORMERS, reason="this Transformers' vision tower takes more memory")
@pytest.mark.parametrize("frames", ["24", "64"])
def test_what_a_video_takes_is_what_was_forecast(measured, frames):
    share_of_forecast = measured[frames]
    assert share_of_forecast > 0.8
    assert share_of_forecast < 1.05


@linux_only
def test_a_step_of_training_takes_what_is_counted():
    for kind, share in measure("training").items():
        assert 0.6 < share < 1.4, kind


class Sizes(TorchDispatchMode):
    """The name and the bytes of every operator's largest result."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [0]
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                sizes.append(leaf.untyped_storage().nbytes())
        self.seen.append((str(function), max(sizes)))
        return result

    @property
    def largest(self) -> int:
        return max(size for _, size in self.seen)


@pytest.mark.parametrize("method", ["diversity", "coverage"])
def test_on_a_gpu_a_method_multiplies_16_bits_and_makes_nothing_larger_than_the_features_in_float32(
    method, monkeypatch
):
    monkeypatch.setattr("qtsplus.model.methods_qtsplus.FAST_16_BITS", {"cuda"})
    num_tokens = 180_000
    width = 2048
    with FakeTensorMode(), Sizes() as sizes:
        visual = torch.empty(num_tokens, width, device="cuda", dtype=torch.bfloat16)
        candidates = Scene([visual], [(360, 20, 25)]).candidates()
        METHODS[method](candidates, num_tokens // 10)
    assert "aten.mm.dtype" in dict(sizes.seen)
    assert sizes.largest == num_tokens * width * 4


@pytest.mark.parametrize("training", [False, True])
def test_the_re_encoder_of_the_3b_model_makes_no_tensor_over_1_gb(training):
    n = 25_600
    width = 2048
    with FakeTensorMode():
        layer = QTSplusLayer(width, 16, 2, 1e-6, 0.0)
        tokens = torch.empty(n, width, requires_grad=training)
        rotary = rotary_tables(torch.zeros(3, n), 128, 1e6, [16, 24, 24])
        with Sizes() as sizes, torch.set_grad_enabled(training):
            result = layer(tokens, tokens, rotary)
            if training:
                result.sum().backward()
    assert sizes.largest == n * width * 4
    attention = [name for name, _ in sizes.seen if "scaled_dot_product" in name]
    assert len(attention) == 1 + training
    for name in attention:
        assert "flash_attention_for_cpu" in name


def test_a_layer_in_blocks_of_tokens_is_as_at_once(monkeypatch):
    torch.manual_seed(0)
    layer = QTSplusLayer(32, 4, 2, 1e-6, 0.0)
    tokens = torch.randn(50, 32, requires_grad=True)
    rotary = rotary_tables(torch.arange(50).expand(3, -1), 8, 1e6, [2, 1, 1])
    inputs = [tokens, *layer.parameters()]

    def outputs():
        with torch.no_grad():
            inferred = layer(tokens, tokens, rotary)
        trained = layer(tokens, tokens, rotary)
        gradients = torch.autograd.grad(trained.sin().sum(), inputs)
        return inferred, trained, *gradients

    whole = outputs()
    monkeypatch.setattr("qtsplus.model.relevance_qtsplus.in_blocks.__defaults__", (16,))
    for mine, expected in zip(outputs(), whole, strict=True):
        assert_close(mine, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_prefill_computes_the_logits_of_the_last_position_only(rows):
    model = tiny_model()
    prompts = [prompt(videos=[(2, 4, 6)], seed=seed) for seed in range(rows)]
    shapes = []

    def note(module, args):
        (states,) = args
        shapes.append(states.shape[:2])

    with torch.no_grad():
        handle = model.lm_head.register_forward_pre_hook(note)
        model.generate(
            **batch(*prompts),
            retention=0.5,
            max_new_tokens=3,
            min_new_tokens=3,
        )
        handle.remove()
    assert shapes == [(rows, 1)] * 3
