"""The golden tensors of the reference implementation, and its parameter names in ours."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden"


def load(*parts: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN.joinpath(*parts).with_suffix(".safetensors"))


def meta(*parts: str):
    return json.loads(GOLDEN.joinpath(*parts).with_suffix(".json").read_text())
