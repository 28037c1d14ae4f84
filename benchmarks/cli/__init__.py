"""`python -m benchmarks`: parses, calls, prints. One file per group of commands."""

import typer

from qtsplus.cli.console import FilledArguments

from .comparing import ablation, attention, evidence, learned, library
from .making import haystack, tiny, tinyworld, train
from .measuring import efficiency, memory, rehearsal, scaling, speed, stream, training_step

app = typer.Typer(
    cls=FilledArguments,
    help="Make worlds, teach tiny models, and measure speed, memory and accuracy. Results are JSON files with every "
    "repeat.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(tinyworld)
app.command()(haystack)
app.command()(train)
app.command()(tiny)
app.command()(learned)
app.command()(attention)
app.command()(ablation)
app.command()(library)
app.command()(evidence)
app.command()(speed)
app.command()(memory)
app.command()(scaling)
app.command()(training_step)
app.command()(efficiency)
app.command()(rehearsal)
app.command()(stream)

__all__ = ["app"]
