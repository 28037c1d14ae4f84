"""What the tests of the plugin for vLLM share. They are skipped where there is no vLLM: `make test-vllm`
has one."""

import pytest

from engine_runs import POSITIONS, Engine, requests_of, start
from tiny_backbones import QWEN2_5_VL, QWEN2_VL, QWEN3_5, QWEN3_VL

BACKBONES = [
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_VL,
    QWEN3_5,
]


@pytest.fixture(scope="session", params=POSITIONS)
def positions(request) -> str:
    return request.param


@pytest.fixture(scope="session", params=BACKBONES, ids=lambda backbone: backbone.name)
def engine(request, positions, tmp_path_factory) -> Engine:
    """A backbone's answers to all requests, from a process of its own."""
    backbone = request.param
    folder = tmp_path_factory.mktemp(f"{backbone.name}-{positions}")
    requests = requests_of(positions, backbone is not QWEN3_5)
    return start(backbone, positions, requests, folder)
