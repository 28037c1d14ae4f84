"""`qtsplus app`: a page to try a model on."""

from importlib.util import find_spec
from typing import Annotated

import typer

from .console import fail, note
from .models import Source
from .options import AllowHost, command


@command
def app(
    *,
    source: Source,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 7860,
    allow_host: AllowHost = None,
) -> None:
    """Open a page to ask about videos, which shows in the video what each answer rests on."""
    if find_spec("gradio") is None:
        fail("the package gradio is not installed: pip install -e '.[app]' in a clone")
    from ..serve.page import launch

    launch(*source.load(), host=host, port=port, allow_hosts=allow_host or (), say=note)
