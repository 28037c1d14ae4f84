"""`qtsplus serve`: becomes vLLM's server, with nothing open that was not asked for."""

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .console import fail, one_line_errors
from .models import split_revision
from .options import HOST, AllowHost, ApiKey, MaxVisualTokens, Retention, check_key


def serve(
    model: Annotated[str, typer.Argument(help="A folder, or a Hub id, with @COMMIT or without.")],
    more: Annotated[list[str] | None, typer.Argument(help="Behind --, more options for vLLM's server.")] = None,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    allow_media_root: Annotated[
        Path | None, typer.Option(help="A folder whose videos requests may name as file:///...; none without it.")
    ] = None,
    allow_media_domain: Annotated[
        list[str] | None, typer.Option(help="A host, or HOST:PORT, whose videos requests may name. May be repeated.")
    ] = None,
    allow_host: AllowHost = None,
    api_key: ApiKey = None,
    retention: Retention = None,
    max_visual_tokens: MaxVisualTokens = None,
) -> None:
    """
    Serve a model under an OpenAI-compatible API, in vLLM.

    A request may bring its videos as data:, and its own budget as mm_processor_kwargs. Each choice of an answer has
    what it rests on as qtsplus.
    """
    model, revision = split_revision(model)
    if allow_media_root is not None and not os.path.isdir(allow_media_root):  # where a Path may raise
        fail(f"there is no folder {allow_media_root}; expected the one that the videos lie in")
    domains = [domain.lower() for domain in allow_media_domain or []]
    if wrong := [domain for domain in domains if not re.fullmatch(rf"{HOST}(:\d{{1,5}})?", domain)]:
        fail(f"--allow-media-domain is {wrong[0]!r}; expected a host, such as videos.example.org or a.org:8443")
    budget = {"retention": retention, "max_visual_tokens": max_visual_tokens}
    budget = {name: value for name, value in budget.items() if value is not None}
    if not host.strip():  # which would let every machine in
        fail("--host is empty; expected an address, such as 127.0.0.1")
    if api_key is None:
        check_key("VLLM_API_KEY", os.environ.get("VLLM_API_KEY"))
    if find_spec("vllm") is None:
        fail("vLLM is not installed: pip install vllm; qtsplus app, ask and batch do without it")
    with one_line_errors():
        from ..hub.loading import check_model, stored_config, stored_dtype

        check_model(model, revision)
        if "longrope" in str(stored_config(model, revision)):  # such as the bundled model
            fail(f"{model} has rotary positions (longrope) that vLLM does not know; qtsplus app, ask and batch do")
        weights = stored_dtype(model, revision)
    name = os.path.basename(os.path.abspath(model))
    options = ["--model", model, "--served-model-name", name, "--host", host, "--port", str(port), "--dtype", weights]
    options += ["--revision", revision] if revision else []
    options += [] if allow_media_root is None else ["--allowed-local-media-path", str(allow_media_root.resolve())]
    options += ["--allowed-media-domains", *domains] if domains else []
    options += ["--mm-processor-kwargs", json.dumps(budget)] if budget else []
    # Frames that other pages show may send nothing, and read nothing; usage says how many tokens were kept.
    ours = ["--trust-request-mm-kwargs", "--enable-prompt-tokens-details", "--allowed-origins", "[]"]
    ours += ["--worker-extension-cls", "qtsplus.vllm.worker.Worker", "--middleware", "qtsplus.vllm.server.Connection"]
    hosts = [host, *(allow_host or [])]
    environment = {**os.environ, "VLLM_MEDIA_CONNECTOR": "qtsplus", "QTSPLUS_HOSTS": json.dumps(hosts)}
    environment |= {} if api_key is None else {"VLLM_API_KEY": api_key}  # no other process can read it there
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    os.execve(sys.executable, [*server, *ours, *options, *(more or [])], environment)
