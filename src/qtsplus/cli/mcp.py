"""`qtsplus mcp`: a library for agents."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .console import fail, one_line_errors
from .models import open_library, split_revision
from .options import Model


def mcp(
    library: Annotated[Path, typer.Argument(help="What `qtsplus index` has made.")],
    model: Model = None,
) -> None:
    """
    Let the agent that starts this look into a library, by the Model Context Protocol. It changes nothing, and names no
    path.
    """
    model, revision = split_revision(model)
    if find_spec("mcp") is None:
        fail("the package mcp is not installed: pip install -e '.[mcp]' in a clone")
    with one_line_errors():
        from ..agents import Shelf, serve_shelf

        serve_shelf(Shelf(open_library(library, model, revision, None)))
