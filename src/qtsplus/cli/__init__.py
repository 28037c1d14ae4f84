"""The `qtsplus` command: parses, calls, prints. One file per group of commands."""

import typer

from .asking import ask, demo, evaluate
from .bench import bench_app
from .data import data_app
from .hub import convert, publish, split
from .making import merge, vqa, vscq1, vscq2
from .training import calibrate, train

app = typer.Typer(
    help="Query-aware visual-token selection for long videos.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(ask)
app.command(name="eval")(evaluate)
app.command()(convert)
app.command()(split)
app.command()(publish)
app.command()(train)
app.command()(calibrate)
for command in (vscq1, vscq2, vqa, merge):
    data_app.command()(command)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")

__all__ = ["app"]
