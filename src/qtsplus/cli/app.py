"""`qtsplus app`: a page to try a model on."""

from importlib.util import find_spec
from typing import Annotated

import typer

from .console import fail, note, one_line_errors
from .models import Source, split_revision
from .options import AllowHost, Device, Model


def app(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 7860,
    allow_host: AllowHost = None,
    device: Device = None,
) -> None:
    """Open a page to ask about videos, which shows in the video what each answer rests on."""
    model, revision = split_revision(model)
    if find_spec("gradio") is None:
        fail("the package gradio is not installed: pip install -e '.[app]' in a clone")
    with one_line_errors():
        from ..serve.page import launch

        loaded = Source(model, revision, device).load()
        try:
            launch(*loaded, host=host, port=port, allow_hosts=allow_host or (), say=note)
        except OSError as error:
            if "empty port" not in str(error):
                raise
            fail(f"{host}:{port} cannot be opened: another program has the port, or the host is not this machine")
