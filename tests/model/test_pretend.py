"""On an accelerator that is not there: `pretend_runs.py`, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

RUNS = Path(__file__).parents[1] / "pretend_runs.py"


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch has no backends in Python",
)
@pytest.mark.parametrize("part", ["backbone", "not backbone"])
def test_the_device_gives_the_results_of_the_cpu(part):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", part, str(RUNS)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=RUNS.parents[1])
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
