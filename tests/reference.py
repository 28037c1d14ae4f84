"""The golden tensors of the reference implementation, and its parameter names in ours."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "case1" / "e2e" / "checkpoint"


def load(*parts: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN.joinpath(*parts).with_suffix(".safetensors"))


def meta(*parts: str):
    return json.loads(GOLDEN.joinpath(*parts).with_suffix(".json").read_text())


def copy_checkpoint(folder: Path) -> Path:
    """The golden checkpoint with its vision configuration, in a folder of its own."""
    shutil.copytree(CHECKPOINT, folder)
    vision_config = CHECKPOINT.with_name("vision") / "config.json"
    shutil.copyfile(vision_config, folder / "vision_config.json")
    return folder
