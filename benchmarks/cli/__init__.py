"""`python -m benchmarks`: parses, calls, prints. One file per group of commands."""

import typer

from qtsplus.cli.console import FilledArguments

from .comparing import ablation, attention, evidence, learned, library
from .evaluating import analysis, evaluate, needle, report
from .making import haystack, real, tiny, tinyworld, train
from .measuring import decoding, efficiency, memory, rehearsal, scaling, speed, stream, training_step
from .sets import make

app = typer.Typer(
    cls=FilledArguments,
    help="Make worlds and sets, teach tiny models, and measure speed, memory and accuracy. Results are JSON files with "
    "every repeat.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    tinyworld,
    haystack,
    make,
    train,
    tiny,
    real,
    learned,
    attention,
    ablation,
    library,
    evidence,
    needle,
    analysis,
    evaluate,
    report,
    speed,
    memory,
    scaling,
    decoding,
    training_step,
    efficiency,
    rehearsal,
    stream,
):
    app.command()(command)

__all__ = ["app"]
