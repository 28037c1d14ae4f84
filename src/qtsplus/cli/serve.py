"""`qtsplus serve`: turns into vLLM's server, which opens only what its options ask for."""

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import fail, one_line_errors
from .models import split_revision
from .options import HOST, AllowHost, ApiKey, MaxVisualTokens, Retention, check_key

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
KNOWN = [*sorted(SET_BY_SERVE), "allowed-origins", "dtype", "mm-processor-kwargs", "served-model-name"]


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
    if not host.strip():  # vLLM would let every machine in
        fail("--host is empty; expected an address, such as 127.0.0.1")
    if api_key is None:
        check_key("VLLM_API_KEY", os.environ.get("VLLM_API_KEY"))
    if find_spec("vllm") is None:
        fail("vLLM is not installed: pip install vllm; qtsplus app, ask and batch work without it")
    with one_line_errors():
        from ..hub.loading import check_model, stored_config, stored_dtype

        check_model(model, revision)
        if "longrope" in str(stored_config(model, revision)):  # such as the bundled model
            fail(f"{model} has rotary positions (longrope) that vLLM does not support; qtsplus app, ask and batch do")
        weights = stored_dtype(model, revision)
    options = server_options(more or [])
    budget = {"retention": retention, "max_visual_tokens": max_visual_tokens}
    kwargs = processor_kwargs(options, {name: value for name, value in budget.items() if value is not None})
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    # With these details, `usage` in a response says how many tokens were kept.
    server += ["--trust-request-mm-kwargs", "--enable-prompt-tokens-details"]
    server += ["--worker-extension-cls", "qtsplus.vllm.worker.Worker"]
    server += ["--middleware", "qtsplus.vllm.server.Connection"]
    server += ["--model", model, "--host", host, "--port", str(port)]
    # Web pages of other origins may neither send requests nor read responses.
    defaults = {
        "allowed-origins": "[]",
        "served-model-name": os.path.basename(os.path.abspath(model)),
        "dtype": weights,
    }
    for name, value in defaults.items():
        if name not in options:
            server += [f"--{name}", value]
    if revision:
        server += ["--revision", revision]
    if allow_media_root is not None:
        server += ["--allowed-local-media-path", str(allow_media_root.resolve())]
    if domains:
        server.append("--allowed-media-domains")
        server += domains
    if kwargs:
        server += ["--mm-processor-kwargs", json.dumps(kwargs)]
    for name, words in options.items():
        if name != "mm-processor-kwargs":
            server += words
    environment = dict(os.environ)
    environment["VLLM_MEDIA_CONNECTOR"] = "qtsplus"
    environment["QTSPLUS_HOSTS"] = json.dumps([host] + (allow_host or []))
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key  # arguments would show it to every user of the machine
    os.execve(sys.executable, server, environment)


def server_options(words: list[str]) -> dict[str, list[str]]:
    """
    The options after `--` by their names, each with its words as they were given. Words before the first option are
    under the empty name. An option that `qtsplus serve` sets by itself is refused.
    """
    options: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            stated = re.split(r"[=.]", word.removeprefix("--"))[0].replace("_", "-")
            name = next((known for known in KNOWN if known.startswith(stated)), stated)  # vLLM takes shortened names
            if name in SET_BY_SERVE:
                fail(f"{word} behind -- is set by qtsplus serve; expected {SET_BY_SERVE[name]}")
        options.setdefault(name, []).append(word)
    return options


def processor_kwargs(options: dict[str, list[str]], budget: dict[str, float]) -> dict[str, Any]:
    """The defaults of requests: --mm-processor-kwargs, given after `--`, and the budget, given before it."""
    words = options.get("mm-processor-kwargs", [])
    if not words:
        return dict(budget)
    text = words[0].partition("=")[2] or " ".join(words[1:])
    try:
        stated = json.loads(text)
    except ValueError:
        stated = None
    if not isinstance(stated, dict):
        fail(f'--mm-processor-kwargs is {text!r}; expected one JSON object, such as \'{{"selection": "diversity"}}\'')
    twice = sorted(stated.keys() & budget.keys())
    if twice:
        fail(f"{', '.join(twice)} is given twice, in front of -- and in --mm-processor-kwargs; expected one of them")
    return stated | budget
