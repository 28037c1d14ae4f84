"""The `qtsplus` command: parses, calls, prints. One file per group of commands."""

import typer

from .asking import ask, demo
from .data import data_app
from .evaluating import eval_app
from .hub import convert, publish
from .making import merge, vqa, vscq1, vscq2
from .studies import analysis, needle
from .training import calibrate, train

app = typer.Typer(
    help="Query-aware visual-token selection for long videos.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(ask)
app.command()(convert)
app.command()(publish)
app.command()(train)
app.command()(calibrate)
for study in (needle, analysis):
    eval_app.command()(study)
app.add_typer(eval_app, name="eval")
for command in (vscq1, vscq2, vqa, merge):
    data_app.command()(command)
app.add_typer(data_app, name="data")

__all__ = ["app"]
