"""`qtsplus app`: a page to try a model on."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .console import fail, note, one_line_errors
from .models import load_named, open_library, split_revision
from .options import AllowHost, Device, Model


def app(
    library: Annotated[
        Path | None, typer.Argument(help="What `qtsplus index` has made. Its questions need no film to be dropped.")
    ] = None,
    model: Model = None,
    media_root: Annotated[
        Path | None, typer.Option(help="The folder of the library's videos. They are played on the page.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 7860,
    allow_host: AllowHost = None,
    device: Device = None,
) -> None:
    """Open a page to ask about films, which shows in the film what each answer rests on."""
    model, revision = split_revision(model)
    if media_root is not None and (library is None or not os.path.isdir(media_root)):
        fail(f"--media-root is {media_root}; expected the folder that the library was made of")
    if find_spec("gradio") is None:
        fail("the package gradio is not installed: pip install -e '.[app]' in a clone")
    with one_line_errors():
        from ..app import launch

        loading = model, revision, device
        shelf = None if library is None else open_library(library, *loading)
        loaded = load_named(*loading) if shelf is None else (shelf.model, shelf.processor)
        try:
            launch(*loaded, shelf, media_root, host=host, port=port, allow_hosts=allow_host or (), say=note)
        except OSError as error:
            if "empty port" not in str(error):
                raise
            fail(f"{host}:{port} cannot be opened: another program has the port, or the host is not this machine")
