"""`qtsplus app`: a page to try a model on."""

from importlib.util import find_spec

from .console import fail, note
from .models import Source
from .options import AllowHost, Host, Port, command


@command
def app(
    *,
    source: Source,
    host: Host = "127.0.0.1",
    port: Port = 7860,
    allow_host: AllowHost = None,
) -> None:
    """Open a page to ask about videos, which shows in the video what each answer rests on."""
    if find_spec("gradio") is None:
        fail("the package gradio is not installed: pip install -e '.[app]' in a clone")
    from ..serve.page import launch

    launch(*source.load(), host=host, port=port, allow_hosts=allow_host or (), say=note)
