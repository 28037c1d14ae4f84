"""A conversion needs memory for a part of a shard, not for the model."""

import json
import subprocess
import sys

import pytest
import torch

from qtsplus import Qwen2_5_VLQTSplusConfig
from qtsplus.hub.checkpoint import StoredTensor, read_checkpoint, write_checkpoint
from qtsplus.hub.files import hub_configs
from qtsplus.hub.weights import on_meta, our_name
from tiny import published_name

# Reports the peak of the resident memory beyond what imports alone need, in bytes.
MEASURE = """
import resource, sys
from qtsplus.hub import convert

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
convert.convert(sys.argv[1], sys.argv[2], variant="qtsplus-3b", initialise="language_model")
print(peak() - before)
"""


@pytest.mark.slow
def test_converting_a_3b_needs_less_than_its_shards(tmp_path):
    """Writes 15 GB."""
    config = Qwen2_5_VLQTSplusConfig.from_pretrained(hub_configs() / "qtsplus-3b")
    state = {name: tuple(tensor.shape) for name, tensor in on_meta(config).state_dict().items()}
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    tensors = {}
    for name, shape in state.items():
        if ".qtsplus." not in name and name != "lm_head.weight":
            tensors[published_name(name)] = StoredTensor(
                torch.bfloat16, shape, lambda shape=shape: torch.randn(shape, dtype=torch.bfloat16)
            )
    write_checkpoint(tensors, source)
    plain = config.to_dict()
    for name in ("qtsplus_config", "auto_map", "architectures"):
        plain.pop(name)
    (source / "config.json").write_text(json.dumps({**plain, "model_type": "qwen2_5_vl"}))

    shards = [path.stat().st_size for path in source.glob("*.safetensors")]
    assert len(shards) == 2 and sum(shards) > 7e9
    command = [sys.executable, "-c", MEASURE, str(source), str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    peak = int(result.stdout)
    print(f"peak {peak / 1e9:.2f} GB beyond the imports, largest shard {max(shards) / 1e9:.2f} GB")
    assert peak <= 1.5 * max(shards)

    written, stored = read_checkpoint(target), read_checkpoint(source)
    for key in ("visual.patch_embed.proj.weight", "model.layers.35.mlp.down_proj.weight", "model.norm.weight"):
        assert written[our_name(key)].same_as(stored[key]), key
    assert {name for name in written if ".qtsplus." not in name} == {our_name(key) for key in stored}
