"""What a stage leaves in the work folder: a state that the next run goes on from, and a log."""

import json
from pathlib import Path
from typing import Any

import torch


def log(file: Path, line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def save(target: Path, **state: Any) -> None:
    torch.save(state, target.with_suffix(".partial"))
    target.with_suffix(".partial").replace(target)
