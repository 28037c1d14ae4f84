"""What is written tensor by tensor is what safetensors reads, and the other way round."""

import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qtsplus.hub.checkpoint import in_memory, read_checkpoint, weight_files, write_checkpoint

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
SHAPES = st.lists(st.integers(0, 5), max_size=3)
TENSORS = st.dictionaries(st.text("abcé.", min_size=1, max_size=6), st.tuples(DTYPES, SHAPES), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(TENSORS, st.sampled_from([30, 1000]))
def test_any_tensors_survive_any_shards(described, max_shard_size):
    tensors = {name: (torch.rand(shape) * 9).to(dtype) for name, (dtype, shape) in described.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint({name: in_memory(t) for name, t in tensors.items()}, folder, max_shard_size)
        theirs = {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}
        mine = {key: stored.load() for key, stored in read_checkpoint(folder).items()}
        for found in (theirs, mine):
            assert found.keys() == tensors.keys()
            for key, tensor in tensors.items():
                assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
        index = folder / "model.safetensors.index.json"
        if index.exists():
            assert json.loads(index.read_text())["weight_map"].keys() == tensors.keys()
        assert len(weight_files(folder)) == len(list(folder.iterdir()))


def test_what_safetensors_wrote_is_read(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.tensor(2.5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = read_checkpoint(tmp_path)
    assert all(torch.equal(stored[name].load(), tensor) for name, tensor in tensors.items())
    assert stored["a"].same_as(in_memory(tensors["a"])) and not stored["a"].same_as(in_memory(tensors["a"] + 1))


def test_a_view_is_written_as_it_looks(tmp_path):
    tensor = torch.arange(12.0).reshape(3, 4).T[1:]
    write_checkpoint({"a": in_memory(tensor)}, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensor)
