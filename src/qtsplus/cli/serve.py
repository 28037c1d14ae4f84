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
    for domain in domains:
        if not re.fullmatch(rf"{HOST}(:\d{{1,5}})?", domain):
            fail(f"--allow-media-domain is {domain!r}; expected a host, such as videos.example.org or a.org:8443")
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
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    # Frames that other pages show may send nothing, and read nothing; usage says how many tokens were kept.
    server += ["--trust-request-mm-kwargs", "--enable-prompt-tokens-details", "--allowed-origins", "[]"]
    server += ["--worker-extension-cls", "qtsplus.vllm.worker.Worker"]
    server += ["--middleware", "qtsplus.vllm.server.Connection"]
    server += ["--model", model, "--served-model-name", os.path.basename(os.path.abspath(model))]
    server += ["--host", host, "--port", str(port), "--dtype", weights]
    if revision:
        server += ["--revision", revision]
    if allow_media_root is not None:
        server += ["--allowed-local-media-path", str(allow_media_root.resolve())]
    if domains:
        server.append("--allowed-media-domains")
        server += domains
    budget: dict[str, float] = {}
    if retention is not None:
        budget["retention"] = retention
    if max_visual_tokens is not None:
        budget["max_visual_tokens"] = max_visual_tokens
    if budget:
        server += ["--mm-processor-kwargs", json.dumps(budget)]
    server += more or []
    environment = dict(os.environ)
    environment["VLLM_MEDIA_CONNECTOR"] = "qtsplus"
    environment["QTSPLUS_HOSTS"] = json.dumps([host] + (allow_host or []))
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key  # no other process can read it there
    os.execve(sys.executable, server, environment)
