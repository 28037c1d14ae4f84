"""`python -m benchmarks`: parses, calls, prints. One file per group of commands."""

import typer

from qtsplus.cli.console import FilledArguments

from .evaluating import analysis, evaluate, report
from .making import real, train
from .measuring import efficiency, memory, methods, rehearsal, scaling, speed, training_step, waits
from .sets import make

app = typer.Typer(
    cls=FilledArguments,
    help="Make sets, teach tiny models, and measure speed, memory and accuracy. Results are JSON files with "
    "every repeat.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    make,
    train,
    real,
    analysis,
    evaluate,
    report,
    speed,
    memory,
    scaling,
    training_step,
    waits,
    methods,
    efficiency,
    rehearsal,
):
    app.command()(command)

__all__ = ["app"]
