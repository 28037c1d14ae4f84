"""`qtsplus mcp`: a library for agents."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .console import fail, note
from .models import Source, open_library
from .options import HOST, AllowHost, ApiKey, command


@command
def mcp(
    library: Annotated[Path, typer.Argument(help="What `qtsplus index` has made.")],
    *,
    source: Source,
    http: Annotated[
        str | None, typer.Option(help="HOST:PORT to serve HTTP at, such as 127.0.0.1:8765; else standard input.")
    ] = None,
    allow_host: AllowHost = None,
    api_key: ApiKey = None,
) -> None:
    """Let an agent look into a library, by the Model Context Protocol. It changes nothing, and names no path."""
    place = re.fullmatch(rf"({HOST}):(\d{{1,5}})", http or "")
    if http is not None and (place is None or not 0 < int(place[2]) < 65536):
        fail(f"--http is {http!r}; expected HOST:PORT, such as 127.0.0.1:8765")
    if http is None and (allow_host or api_key):
        fail("--allow-host and --api-key (QTSPLUS_API_KEY) are about --http; give that, or leave them out")
    if find_spec("mcp") is None:
        fail("the package mcp is not installed: pip install -e '.[mcp]' in a clone")
    from ..serve.agents import Shelf, serve_shelf

    shelf = Shelf(open_library(library, source))
    if place is None:
        return serve_shelf(shelf, None)
    note(f"Serving {library} at http://{http}/mcp")
    serve_shelf(shelf, (place[1].strip("[]"), int(place[2])), allow_host or [], api_key)
