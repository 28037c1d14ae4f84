"""The `qtsplus` command: parses, calls, prints. One file per group of commands."""

from typing import Annotated

import typer

from .app import app as page
from .asking import ask, demo
from .batch import batch
from .chatting import chat
from .console import FilledArguments
from .data import data_app
from .evaluating import evaluate
from .finding import find
from .hub import convert, publish
from .library import index
from .mcp import mcp
from .serve import serve
from .summarising import summarise
from .training import calibrate, train
from .watch import watch

app = typer.Typer(cls=FilledArguments, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(asked_for: bool) -> None:
    if asked_for:
        from .. import __version__

        print(f"qtsplus {__version__}")
        raise typer.Exit


@app.callback()
def qtsplus(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Query-aware visual-token selection for long videos."""


for command in (demo, ask, chat, find, summarise, watch, index, batch, serve, mcp, convert, publish, train, calibrate):
    app.command()(command)
app.command("app")(page)
app.command("eval")(evaluate)
app.add_typer(data_app, name="data")
