"""What the tests of the plugin for vLLM share. They are skipped where there is no vLLM: `make test-vllm`
has one."""

import pytest

from engine_runs import POSITIONS, Engine, requests_of, start
from tiny_backbones import QWEN2_5_VL, QWEN2_VL, QWEN3_5, QWEN3_VL


@pytest.fixture(scope="session", params=POSITIONS)
def positions(request) -> str:
    return request.param


@pytest.fixture(scope="session", params=(QWEN2_5_VL, QWEN2_VL, QWEN3_VL, QWEN3_5), ids=lambda backbone: backbone.name)
def engine(request, positions, tmp_path_factory) -> Engine:
    """A backbone's answers to all requests, from a process of its own."""
    folder = tmp_path_factory.mktemp(f"{request.param.name}-{positions}")
    requests = requests_of(positions, attention=request.param is not QWEN3_5)
    return start(request.param, positions, requests, folder)
