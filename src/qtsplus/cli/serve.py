"""`qtsplus serve`: turns into vLLM's server, which opens only what its options ask for."""

import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .console import fail
from .models import split_revision
from .options import HOST, AllowHost, ApiKey, MaxVisualTokens, Retention, check_key, command

# Options of vLLM's server that cannot be given behind `--`, and what to give in place of them.
SET_BY_SERVE = {
    "allowed-local-media-path": "--allow-media-root",
    "allowed-media-domains": "--allow-media-domain",
    "api-key": "--api-key in front of --",
    "config": "its options, one by one",
    "enable-prompt-tokens-details": "nothing",
    "host": "--host in front of --",
    "model": "the model as the argument",
    "port": "--port in front of --",
    "revision": "MODEL@COMMIT",
    "trust-request-mm-kwargs": "nothing",
    "worker-extension-cls": "nothing",
}


@command
def serve(
    model: Annotated[str, typer.Argument(help="A folder, or a Hub id, with @COMMIT or without.")],
    more: Annotated[list[str] | None, typer.Argument(help="More options for vLLM's server, after --.")] = None,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    allow_media_root: Annotated[
        Path | None, typer.Option(help="Requests may name videos in this folder, as file:///...; by default no file.")
    ] = None,
    allow_media_domain: Annotated[
        list[str] | None, typer.Option(help="Requests may name videos at this host, or HOST:PORT. May be repeated.")
    ] = None,
    allow_host: AllowHost = None,
    api_key: ApiKey = None,
    retention: Retention = None,
    max_visual_tokens: MaxVisualTokens = None,
) -> None:
    """
    Serve a model under an OpenAI-compatible API, in vLLM.

    A request may contain its videos as data: URLs, and its own budget in mm_processor_kwargs. Each choice in the
    response says in its field qtsplus what the answer rests on.
    """
    model, revision = split_revision(model)
    if allow_media_root is not None and not os.path.isdir(allow_media_root):  # Path.is_dir may raise
        fail(f"there is no folder {allow_media_root}; expected the folder with the videos")
    domains = [domain.lower() for domain in allow_media_domain or []]
    for domain in domains:
        if not re.fullmatch(rf"{HOST}(:\d{{1,5}})?", domain):
            fail(f"--allow-media-domain is {domain!r}; expected a host, such as videos.example.org or a.org:8443")
    if api_key is None:
        check_key("VLLM_API_KEY", os.environ.get("VLLM_API_KEY"))
    if find_spec("vllm") is None:
        fail("vLLM is not installed: pip install vllm; qtsplus app, ask and batch work without it")
    from ..hub.loading import check_model, check_served_adapter, stored_config, stored_dtype

    check_model(model, revision)
    if "longrope" in str(stored_config(model, revision)):  # such as the bundled model
        fail(f"{model} has rotary positions (longrope) that vLLM does not support; qtsplus app, ask and batch do")
    weights = stored_dtype(model, revision)
    refused = dict(SET_BY_SERVE)
    options = {
        "worker-extension-cls": "qtsplus.vllm.worker.Worker",
        "middleware": "qtsplus.vllm.server.Connection",
        "model": model,
        "host": host,
        "port": str(port),
        "allowed-origins": "[]",  # web pages of other origins may neither send requests nor read responses
        "served-model-name": os.path.basename(os.path.abspath(model)),
        "dtype": weights,
        "revision": revision,
    }
    if allow_media_root is not None:
        options["allowed-local-media-path"] = str(allow_media_root.resolve())
    budget = {}
    if retention is not None:
        budget["retention"] = retention
    if max_visual_tokens is not None:
        budget["max_visual_tokens"] = max_visual_tokens
    if budget:
        refused["mm-processor-kwargs"] = "the budget in it, and not in front of --"
        options["mm-processor-kwargs"] = json.dumps(budget)
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    # With these details, `usage` in a response says how many tokens were kept.
    server += ["--trust-request-mm-kwargs", "--enable-prompt-tokens-details"]
    if domains:
        server += ["--allowed-media-domains"] + domains
    for name, value in options.items():
        if value is not None:
            server += [f"--{name}", value]
    check_more(more or [], refused)
    for word in more or []:
        for part in re.findall('[^="]+', word):  # NAME=FOLDER of --lora-modules, or JSON
            check_served_adapter(part)
    server += more or []  # of an option that is given twice vLLM takes the last
    environment = dict(os.environ)
    environment["VLLM_MEDIA_CONNECTOR"] = "qtsplus"
    environment["QTSPLUS_HOSTS"] = json.dumps([host] + (allow_host or []))
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key  # arguments would show it to every user of the machine
    os.execve(sys.executable, server, environment)


def check_more(words: list[str], refused: Mapping[str, str]) -> None:
    """Ends the command for an option of vLLM's behind `--` that `qtsplus serve` sets."""
    for word in words:
        if word.startswith("--"):
            stated = re.split(r"[=.]", word.removeprefix("--"))[0].replace("_", "-")
            stated = stated.removeprefix("no-")
            for name, expected in refused.items():
                if name.startswith(stated):  # vLLM takes shortened names
                    fail(f"{word} behind -- is set by qtsplus serve; expected {expected}")
