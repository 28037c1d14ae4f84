"""`qtsplus serve`: turns into vLLM's server, which opens only what its options ask for."""

import json
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from .console import fail
from .models import split_revision
from .options import HOST, AllowHost, ApiKey, Host, MaxVisualTokens, Port, Retention, check_key, command

# Options of vLLM's server that cannot be given behind `--`, since `serve` sets them or they would bypass its guard or
# the selector, and what to give in place of them.
SET_BY_SERVE = {
    "--allowed-local-media-path": "--allow-media-root",
    "--allowed-media-domains": "--allow-media-domain",
    "--allowed-origins": "a proxy in front, which lets in pages of other origins",
    "--api-key": "--api-key in front of --",
    "--config": "its options, one by one",
    "--enable-prompt-tokens-details": "nothing",
    "--enable-tower-connector-lora": "an adapter of the language model, or one merged into the model",
    "--host": "--host in front of --",
    "--model": "the model as the argument",
    "--model-impl": "nothing",
    "--port": "--port in front of --",
    "--revision": "MODEL@COMMIT",
    "--trust-request-mm-kwargs": "nothing",
    "--video-pruning-rate": "--retention in front of --",
    "--worker-extension-cls": "nothing",
}

# What vLLM's `--media-io-kwargs` may state.
MEDIA_KEYS = ("image.image_mode", "image.rgba_background_color", "video.fps", "video.num_frames")


@command
def serve(
    model: Annotated[str, typer.Argument(help="A folder, or a Hub id, with @COMMIT or without.")],
    more: Annotated[list[str] | None, typer.Argument(help="More options for vLLM's server, after --.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    allow_media_root: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Requests may name videos in this folder, as file:///...; by default no file.",
        ),
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
    domains = [domain.lower() for domain in allow_media_domain or []]
    for domain in domains:
        if not re.fullmatch(rf"{HOST}(:\d{{1,5}})?", domain):
            fail(f"--allow-media-domain is {domain!r}; expected a host, such as videos.example.org or a.org:8443")
    if api_key is None:
        check_key("VLLM_API_KEY", os.environ.get("VLLM_API_KEY"))
    if find_spec("vllm") is None:
        fail("vLLM is not installed: pip install vllm; qtsplus app, ask and batch work without it")
    from ..hub.loading import load_config

    config = load_config(model, revision)
    if "longrope" in str(config):  # such as the bundled model
        fail(f"{model} has rotary positions (longrope) that vLLM does not support; qtsplus app, ask and batch do")
    server = [
        sys.executable,
        "-m",
        "vllm.entrypoints.launchers.api_server.entry",
        "--trust-request-mm-kwargs",
        model,  # takes vLLM's one place for a bare word, so that it refuses "false" in "--enforce-eager false"
        "--enable-prompt-tokens-details",  # with which `usage` in a response says how many tokens were kept
        "--worker-extension-cls",
        "qtsplus.vllm.worker.Worker",
        "--model",
        model,
        "--host",
        host,
        "--port",
        str(port),
        "--allowed-origins",
        "[]",  # web pages of other origins may neither send requests nor read responses
        "--served-model-name",
        os.path.basename(os.path.abspath(model)),
        "--dtype",
        str(config.dtype or "auto").removeprefix("torch."),  # vLLM's own "auto" would shorten float32
    ]
    if revision:
        server += ["--revision", revision]
    if domains:
        server += ["--allowed-media-domains"] + domains
    if allow_media_root:
        server += ["--allowed-local-media-path", str(allow_media_root.resolve())]
    refused = dict(SET_BY_SERVE)
    both = {"retention": retention, "max_visual_tokens": max_visual_tokens}
    budget = {name: value for name, value in both.items() if value is not None}
    if budget:
        refused["--mm-processor-kwargs"] = "the budget in it, and not in front of --"
        server += ["--mm-processor-kwargs", json.dumps(budget)]
    # vLLM takes an underscore for a dash, up to the first dot.
    words = [re.sub("^--[^=.]*", lambda name: name[0].replace("_", "-"), word) for word in more or []]
    check_more(words, refused)
    check_options(model, revision, config, words)
    # vLLM takes the last of two values of an option. The last middleware is called first.
    server += [*words, "--middleware", "qtsplus.vllm.server.Connection"]
    environment = dict(
        os.environ,
        VLLM_MEDIA_CONNECTOR="qtsplus",
        QTSPLUS_HOSTS=json.dumps([host, *(allow_host or [])]),
    )
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key  # arguments would show it to every user of the machine
    os.execve(sys.executable, server, environment)


def check_more(words: list[str], refused: Mapping[str, str]) -> None:
    """Ends the command for an option of vLLM's behind `--` that `qtsplus serve` sets, or that loses a value."""
    names = [word.replace("--no-", "--", 1).partition("=")[0] for word in words if word.startswith("--")]
    for name in names:
        option = name.partition(".")[0]
        for set_here, expected in refused.items():
            if set_here.startswith(option):  # vLLM takes shortened names
                fail(f"{name} cannot be given behind --, since qtsplus serve decides it; expected {expected}")
        if name != "--middleware" and names.count(name) > 1:
            fail(f"{name} is given twice behind --, and vLLM takes the last; expected it once")


class _Stated(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def json_object(text: str) -> dict:
    """The members of an object in JSON."""
    return dict(json.loads(text))


def adapter(text: str) -> str:
    """The place of an adapter that is stated as NAME=PLACE, or in JSON."""
    place = json_object(text).get("path") if "{" in text else text.partition("=")[2]
    if not place:
        raise ValueError
    return str(place)


def members(option: str, content: dict, words: list[str], known: Collection[str], prefix: str = "") -> dict:
    """
    What a JSON option of vLLM's states, also as `--option.key value`, by dotted keys such as `video.fps`. A key that
    nothing reads ends the command.
    """
    from transformers.utils import flatten_dict

    from ..common.validation import parse_yaml

    for key, text in re.findall(rf"^{option}\.([\w.]+)[=\n](.*)", "\n".join(words), re.MULTILINE):
        content[key] = parse_yaml(text, option)
    values = flatten_dict(content)
    for key in values:
        if key.startswith(prefix) and key not in known and key.rpartition(".")[0] not in known:
            nearest = get_close_matches(key, known, cutoff=0)
            fail(f"{option} has {key}; the nearest that it takes are {', '.join(nearest)}")
    return values


def check_options(model: str, revision: str | None, config, words: list[str]) -> None:
    """Ends the command where a model, its method or an adapter cannot work with vLLM's options behind `--`."""
    from transformers.utils import flatten_dict

    from ..hub.loading import check_served_adapter, processor_of
    from ..model.methods_qtsplus import add_method
    from ..model.sampling_qtsplus import read_keys
    from ..vllm import BACKBONES, OPTIONS, SETTINGS
    from ..vllm.attention import check_attention

    name = type(config).__name__.removesuffix("Config")
    if name not in BACKBONES:
        fail(f"vLLM does not take {name}; expected {', '.join(BACKBONES)}. qtsplus app, ask and batch take it")
    parser = _Stated(add_help=False)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--lora-modules", nargs="+", type=adapter, default=[])
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    for option in ("--additional-config", "--mm-processor-kwargs", "--media-io-kwargs"):
        parser.add_argument(option, type=json_object, default={})
    stated = parser.parse_known_args(words)[0]
    members("--additional-config", stated.additional_config, words, OPTIONS, prefix="qtsplus")
    reading = members("--media-io-kwargs", stated.media_io_kwargs, words, MEDIA_KEYS)
    read_keys({"fps": reading.get("video.fps"), "num_frames": reading.get("video.num_frames")})
    processor = processor_of(model, config, revision)
    images = processor.image_processor.valid_kwargs.__annotations__
    videos = processor.video_processor.valid_kwargs.__annotations__
    sections = {"images_kwargs": images, "videos_kwargs": videos}
    known = dict.fromkeys(SETTINGS) | images | videos | flatten_dict(sections)
    selection = members("--mm-processor-kwargs", stated.mm_processor_kwargs, words, known).get("selection")
    for place in stated.lora_modules:
        check_served_adapter(place)
    sys.path.append("")  # where vLLM's server finds a function of the operator's own
    add_method(selection)
    if (selection or config.qtsplus_config.selection) == "lm_attention":
        check_attention(config, stated.enable_lora, stated.tensor_parallel_size)
