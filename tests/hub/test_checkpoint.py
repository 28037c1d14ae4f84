"""What is written is what safetensors reads, the other way round, and no memory is needed for it."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from measure_memory import status
from qtsplus.hub.checkpoint import read_checkpoint, weight_files

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
SHAPES = st.lists(st.integers(0, 5), max_size=3)
TENSORS = st.dictionaries(st.text("abcé.", min_size=1, max_size=6), st.tuples(DTYPES, SHAPES), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(TENSORS, st.sampled_from([30, 1000]))
def test_any_tensors_survive_any_shards(described, max_shard_size):
    tensors = {}
    for name, (dtype, shape) in described.items():
        transposed = torch.rand(shape[::-1]) * 9
        order = list(range(len(shape)))[::-1]
        tensors[name] = transposed.to(dtype).permute(order)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)
        theirs = {}
        for file in folder.glob("*.safetensors"):
            theirs |= load_file(file)
        for found in (theirs, read_checkpoint(folder)):
            assert found.keys() == tensors.keys()
            for key, tensor in tensors.items():
                assert found[key].dtype == tensor.dtype
                assert torch.equal(found[key], tensor)
        index = folder / "model.safetensors.index.json"
        if index.exists():
            assert json.loads(index.read_text())["weight_map"].keys() == tensors.keys()
        assert len(weight_files(folder)) == len(list(folder.iterdir()))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what a process holds")
def test_a_copy_holds_nothing_in_memory(tmp_path):
    save_file({name: torch.randn(16, 2**20) for name in "abcd"}, tmp_path / "model.safetensors")
    (tmp_path / "copy").mkdir()
    before = status("RssAnon")
    tensors = read_checkpoint(tmp_path)
    save_torch_state_dict(tensors, tmp_path / "copy")
    for name, tensor in read_checkpoint(tmp_path / "copy").items():
        assert torch.equal(tensor, tensors[name])
    assert status("RssAnon") - before < 30, "MB; the tensors are 268"
