"""What several commands have in common."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

RESULTS = Path("benchmarks/results")
Results = Annotated[Path, typer.Option(help="The folder of the results.")]


def typed() -> str:
    """The command as it was typed."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
