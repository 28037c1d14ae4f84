"""
How far `diversity` and `coverage`, which add several tokens in a round, are from adding one token at a time.

`python -m benchmarks.open.rounds MODEL WORK` renders 60 videos of 30 s into WORK, asks the model 400 questions about
them in both ways, and writes `rounds.json` to `benchmarks/results`.
"""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from qtsplus.common.journals import write_json
from qtsplus.model import methods_qtsplus
from qtsplus.model.methods_qtsplus import Candidates, Method

from ..files import run_from_command_line
from ..machine import environment
from ..world.open_sets import build_open
from .asking import open_test
from .choice import FIRST, compare_parts

METHODS = ("diversity", "coverage")
SHARES = (0.1, 0.25)
SECONDS = 30


def run_rounds(folder: Path, work: Path, out: Path, videos: int = 60, questions: int = 400) -> Path:
    """Asks all questions in both ways, and returns the folder of the result."""
    path = build_open(work / f"rounds-{videos}", "test", videos, SECONDS, variant="plain", first=FIRST)
    test = open_test(folder, path, questions)
    document: dict[str, Any] = {"environment": environment("cpu"), "model": folder.name, "questions": len(test)}
    for name in METHODS:
        for share in SHARES:
            same: list[float] = []
            twin = one_at_a_time(methods_qtsplus.METHODS[name], same)
            figures: dict[str, Any] = compare_parts(
                folder, test, {name: {"selection": name}, "one at a time": {"selection": twin}}, share
            )
            figures["same tokens"] = 100 * sum(same) / len(same)
            document[f"{name}, {share:.0%}"] = figures
    write_json(out / "rounds.json", document)
    return out


def one_at_a_time(method: Method, same: list[float]) -> Method:
    """The method without rounds; adds to `same` which part of its tokens the method with rounds keeps too."""

    def select(candidates: Candidates, n: int) -> torch.Tensor:
        with patch.object(methods_qtsplus, "KEPT_PER_NEW", sys.maxsize):
            kept = method(candidates, n)
        same.append(float(torch.isin(kept, method(candidates, n)).float().mean()))
        return kept

    return select


if __name__ == "__main__":
    run_from_command_line(run_rounds, __doc__, "folder", "work")
