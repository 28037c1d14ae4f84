"""Options that several commands have, and how the fields of [`Sampling`], [`Choice`] and [`Source`] become options."""

import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..asking.choice import Choice
from ..model.sampling_qtsplus import Sampling
from .console import fail, one_line_errors, require_fraction
from .models import Dtype, Source

Names = list[str] | None  # of an option that may be repeated
HOST = r"(?:[A-Za-z0-9._-]+|\[[\da-fA-F:.]+\])"


def _check_hosts(hosts: Names) -> Names:
    for host in hosts or []:
        if not re.fullmatch(HOST, host):
            fail(f"--allow-host is {host!r}; expected the name of a host without a port, such as ask.example.org")
    return hosts


def check_key(name: str, key: str | None) -> None:
    """Ends the command for a key that is there and empty, which would be a server without a key."""
    if key is not None and not key.strip():
        fail(f"{name} is empty; give it a value, or unset it for a server without a key")


def _check_key(key: str | None) -> str | None:
    # A variable that is empty is none to Typer.
    check_key("The API key (--api-key, QTSPLUS_API_KEY)", os.environ.get("QTSPLUS_API_KEY") if key is None else key)
    return key


Asked = Annotated[str, typer.Argument(help="What to ask or look for.")]
Model = Annotated[
    str | None,
    typer.Option(help="A folder or Hub id; ORG/NAME@COMMIT pins its weights. Without it the bundled model answers."),
]
Retention = Annotated[
    float | None,
    typer.Option(
        callback=require_fraction,
        help="Keep this fraction of the visual tokens, in (0, 1]. Without it, the model decides.",
    ),
]
Selection = Annotated[
    str | None,
    typer.Option(
        help="Choose tokens in another way than the model's own: uniform, random, all, ...; or by a function of yours, "
        "module:function or file.py:function."
    ),
]
MaxVisualTokens = Annotated[
    int | None, typer.Option(min=1, help="Keep at most this many visual tokens, also where --retention is more.")
]
Fps = Annotated[
    float | None,
    typer.Option(
        help="How many frames to look at per second; for a folder of frames, the rate at which they were taken."
    ),
]
Start = Annotated[float | None, typer.Option(min=0, help="Look at the video from this second on.")]
End = Annotated[float | None, typer.Option(min=0, help="Look at the video until this second.")]
MaxFrames = Annotated[int | None, typer.Option(min=1, help="The most frames to look at in one video.")]
MaxPixels = Annotated[int | None, typer.Option(min=1, help="The most pixels of a frame; larger ones are read smaller.")]
Subtitles = Annotated[
    int | None,
    typer.Option(
        min=1, help="Give a question up to this many tokens of the video's subtitles, starting near the kept tokens."
    ),
]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="The most tokens of an answer.", show_default="128")]
WeightType = Annotated[Dtype, typer.Option(help="The type of the weights. auto takes what the checkpoint has.")]
Host = Annotated[str, typer.Option(help="Where to listen. 0.0.0.0 lets other machines in.")]
Port = Annotated[int, typer.Option(min=1, max=65535)]
AllowHost = Annotated[
    Names,
    typer.Option(
        callback=_check_hosts,
        help="A host name under which this server is reached, such as a proxy's. May be repeated.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(callback=_check_key, envvar="QTSPLUS_API_KEY", help="The API key that requests must send."),
]
Device = Annotated[str | None, typer.Option(help="Where to run: cuda or cpu. Without it, a GPU if there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else, one object for each result.")]
MediaRoot = Annotated[
    Path | None, typer.Option(help="The folder of the videos. Without it, the folder of the file.", show_default=False)
]
Overrides = Annotated[
    Names,
    typer.Option("--set", help="Change a field of the recipe, such as training.seed=1. May be repeated."),
]
RecipeFile = Annotated[Path, typer.Argument(help="A YAML recipe.", show_default=False)]

# The options in place of each field of a parameter with this type.
_GROUPS: dict[type, dict[str, object]] = {
    Sampling: {"fps": Fps, "start": Start, "end": End, "max_frames": MaxFrames, "max_pixels": MaxPixels},
    Choice: {"retention": Retention, "max_visual_tokens": MaxVisualTokens, "selection": Selection},
    Source: {"model": Model, "device": Device, "dtype": WeightType},
}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """
    Gives a command the options of [`Sampling`], [`Choice`] and [`Source`] in place of a parameter of such a type, and
    has its errors end in one line.
    """
    signature = inspect.signature(function)
    parameters = []
    groups = {}
    for parameter in signature.parameters.values():
        if parameter.annotation not in _GROUPS:
            parameters.append(parameter)
            continue
        groups[parameter.name] = parameter.annotation
        for name, option in _GROUPS[parameter.annotation].items():
            default = getattr(parameter.annotation, name)
            parameters.append(inspect.Parameter(name, parameter.kind, default=default, annotation=option))

    @functools.wraps(function)
    def run(**values: object) -> None:
        with one_line_errors():
            for group, kind in groups.items():
                fields = {name: values.pop(name) for name in _GROUPS[kind]}
                values[group] = kind(**fields)
            function(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
