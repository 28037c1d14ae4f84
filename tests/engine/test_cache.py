"""Features of videos are remembered up to a number of bytes."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from qtsplus.vllm.models import FeatureCache  # noqa: E402


def test_the_least_recently_used_go_first():
    cache = FeatureCache(2 * 16)
    for key in "abc":
        cache.put(key, torch.full((2, 2), ord(key), dtype=torch.float32))
        assert cache.get("a" if key != "c" else "c") is not None
    assert (cache.get("a") is None, cache.get("b") is None, cache.size) == (False, True, 32)


def test_what_is_larger_than_all_of_it_is_not_kept():
    cache = FeatureCache(16)
    cache.put("small", torch.zeros(2, 2))
    cache.put("large", torch.zeros(3, 2))
    assert cache.get("large") is None and cache.get("small") is not None
