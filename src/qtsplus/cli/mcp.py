"""`qtsplus mcp`: a library for agents."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .console import fail, note
from .models import Source, open_library
from .options import AllowHost, ApiKey, command


@command
def mcp(
    library: Annotated[Path, typer.Argument(help="What `qtsplus index` has made.")],
    *,
    source: Source,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Serve HTTP here, and not standard input.")] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen, by default at 127.0.0.1.")] = None,
    allow_host: AllowHost = None,
    api_key: ApiKey = None,
) -> None:
    """Let an agent look into a library, by the Model Context Protocol. It changes nothing, and names no path."""
    if port is None and (host or allow_host or api_key):
        fail("--host, --allow-host and --api-key (QTSPLUS_API_KEY) are about HTTP; give --port, or leave them out")
    if find_spec("mcp") is None:
        fail("the package mcp is not installed: pip install -e '.[mcp]' in a clone")
    from ..serve.agents import Shelf, serve_shelf

    shelf = Shelf(open_library(library, source))
    if port is None:
        return serve_shelf(shelf, None)
    host = host or "127.0.0.1"
    note(f"Serving {library} at http://{host}:{port}/mcp")
    serve_shelf(shelf, (host, port), allow_host or [], api_key)
