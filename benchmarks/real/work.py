"""What a stage leaves in the work folder: a state that the next run goes on from, and a log."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn


def log(file: Path, line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def save(target: Path, **state: Any) -> None:
    torch.save(state, target.with_suffix(".partial"))
    target.with_suffix(".partial").replace(target)


HALVES = torch.cpu._is_amx_tile_supported()


def half_precision() -> torch.autocast:
    """Products in bfloat16 where the processor has tiles for them (AMX), four times as fast; else as they are."""
    return torch.autocast("cpu", torch.bfloat16, enabled=HALVES)


def keep_halves(model: nn.Module) -> None:
    """Matrices that stay as they are, in what [`half_precision`] would make of them at every step."""
    for module in model.modules() if HALVES else ():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.bfloat16()
