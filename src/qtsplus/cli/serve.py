"""`qtsplus serve`: starts a server that others wrote, with nothing open that was not asked for."""

import json
import os
import re
import sys
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from .console import fail, note, one_line_errors
from .models import load_named, split_revision
from .options import HOST, AllowHost, MaxVisualTokens, Retention

ROOM = "qtsplus.vllm.budget"
FRAMES = {"fps": 2, "num_frames": 768}  # of a video at most, as `qtsplus ask` takes them; vLLM would take 32


class Engine(str, Enum):
    vllm = "vllm"
    transformers = "transformers"


def serve(
    model: Annotated[str, typer.Argument(help="A folder, or a Hub id, with @COMMIT or without.")],
    more: Annotated[list[str] | None, typer.Argument(help="Behind --, more options for vLLM's server.")] = None,
    engine: Annotated[
        Engine, typer.Option(help="vllm, to serve it; transformers, to try it: one request after another.")
    ] = Engine.vllm,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    allow_media_root: Annotated[
        Path | None, typer.Option(help="A folder whose videos requests may name as file:///...; none without it.")
    ] = None,
    allow_media_domain: Annotated[
        list[str] | None, typer.Option(help="A host, or HOST:PORT, whose videos requests may name. May be repeated.")
    ] = None,
    allow_host: AllowHost = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="QTSPLUS_API_KEY", help="What requests have to bring as their API key.")
    ] = None,
    retention: Retention = None,
    max_visual_tokens: MaxVisualTokens = None,
) -> None:
    """
    Serve a model under an OpenAI-compatible API.

    A request may bring its videos as data:, and its own budget as mm_processor_kwargs.
    """
    model, revision = split_revision(model)
    if allow_media_root is not None and not os.path.isdir(allow_media_root):  # where a Path may raise
        fail(f"there is no folder {allow_media_root}; expected the one that the videos lie in")
    domains = [domain.lower() for domain in allow_media_domain or []]
    if wrong := [domain for domain in domains if not re.fullmatch(rf"{HOST}(:\d{{1,5}})?", domain)]:
        fail(f"--allow-media-domain is {wrong[0]!r}; expected a host, such as videos.example.org or a.org:8443")
    budget = {"retention": retention, "max_visual_tokens": max_visual_tokens}
    budget = {name: value for name, value in budget.items() if value is not None}
    name = os.path.basename(os.path.abspath(model))
    if engine is Engine.vllm:
        if find_spec("vllm") is None:
            fail("vLLM is not installed: pip install vllm, or try the model with --engine transformers")
        with one_line_errors():
            from ..loading import check_model, stored_dtype

            check_model(model, revision)
            weights = stored_dtype(model, revision)
        if allow_host:
            fail("--allow-host has no effect on vLLM, which answers to any name; let a proxy check that")
        if ports := [domain for domain in domains if domain.rpartition(":")[2].isdigit()]:
            fail(f"--allow-media-domain {ports[0]}: vLLM opens every port of a host; leave the port out")
        options = ["--model", model, "--served-model-name", name, "--host", host, "--port", str(port)]
        options += ["--dtype", weights, *(["--revision", revision] if revision else [])]
        options += [] if allow_media_root is None else ["--allowed-local-media-path", str(allow_media_root.resolve())]
        # vLLM fetches from anywhere unless some host is named; this one cannot exist.
        options += ["--allowed-media-domains", *(domains or ["none.invalid"]), *(more or [])]
        _become_vllm(options + (["--mm-processor-kwargs", json.dumps(budget)] if budget else []), api_key)
    if more:
        fail(f"{more[0]} is for vLLM's server; leave it out with --engine transformers")
    if missing := [name for name in ("fastapi", "openai", "uvicorn") if find_spec(name) is None]:
        fail(f"the package {missing[0]} is not installed: pip install -e '.[serve]' in a clone")
    with one_line_errors():
        from ..door import Door
        from ..serving import build_app, run

        loaded, processor = load_named(model, revision, None)
        hosts = ["localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host, *(allow_host or [])]
        app = build_app(name, loaded, processor, Door(allow_media_root, domains), budget, api_key, hosts)
        note(f"Serving {name} at http://{host}:{port}/v1")
        run(app, host, port)


def _become_vllm(options: list[str], api_key: str | None) -> NoReturn:
    # The model's own budget needs the first two, and the third says how many tokens were kept.
    ours = [f"--worker-extension-cls={ROOM}.BudgetWorker", f"--middleware={ROOM}.Connection"]
    ours += ["--enable-prompt-tokens-details", f"--media-io-kwargs={json.dumps({'video': FRAMES})}"]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--trust-request-mm-kwargs"]
    # An allowed host could lead to one that is not.
    environment = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0", **os.environ}
    environment |= {} if api_key is None else {"VLLM_API_KEY": api_key}  # no other process can read it there
    os.execve(sys.executable, [*server, *ours, *options], environment)
