"""Runs tests for benchmarks/gpu.sh: `python -m benchmarks.run_tests RESULT.json PYTEST_ARGUMENT...`

Writes how each test ended, if none failed and one at least was not skipped; else the exit code is 1.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from qtsplus.common.journals import write_json

from .machine import environment


class Outcomes:
    """Notes how each test ended."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid] = report.outcome


def main(result: str, *arguments: str) -> int:
    outcomes = Outcomes()
    code = pytest.main(["-v", "-p", "no:cacheprovider", *arguments], plugins=[outcomes])
    counts = Counter(outcomes.tests.values())
    if code != 0 or not counts["passed"]:
        return 1
    document = {
        "command": f"pytest {' '.join(arguments)}",
        "environment": environment("cuda" if torch.cuda.is_available() else "cpu"),
        "counts": dict(counts),
        "tests": outcomes.tests,
    }
    write_json(Path(result), document)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
