"""`qtsplus watch`: one question to video that is still coming."""

import json
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..output import printable
from .asking import place
from .console import check_text, console, fail, note, one_line_errors
from .models import check_model_options, load_model
from .options import AsJson, Device, MaxNewTokens, Model, Question, Revision

if TYPE_CHECKING:
    from ..session import Answer


def watch(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="What to watch: a file that may still grow, - for standard input, an address (http, rtsp, ...) or a "
            "device such as /dev/video0, avfoundation:0 or dshow:video=NAME. NAME=SOURCE gives it a name."
        ),
    ],
    question: Question,
    model: Model = None,
    revision: Revision = None,
    every: Annotated[float, typer.Option(help="Seconds of video from answer to answer.")] = 10.0,
    memory_tokens: Annotated[int, typer.Option(min=1, help="How many visual tokens are remembered.")] = 4096,
    policy: Annotated[str, typer.Option(help="Which: question, diversity or oldest_first.")] = "question",
    fps: Annotated[float, typer.Option(help="How many frames to look at per second.")] = 2.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a frame after which a file has ended, and anything else has failed.")
    ] = 10.0,
    max_new_tokens: MaxNewTokens = 128,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question again and again while video comes. Ctrl-C ends it."""
    check_model_options(model, revision)
    named = _named(sources)
    check_text(question)
    with one_line_errors():
        from .. import watching

        loaded, processor = load_model(model, revision, device)
        options: dict[str, Any] = {"memory_tokens": memory_tokens, "policy": policy, "fps": fps, "timeout": timeout}
        options |= {"every": every, "max_new_tokens": max_new_tokens}
        try:
            for answer in watching.watch(loaded, processor, named, question, **options):
                print(json.dumps(answer.as_dict()), flush=True) if as_json else _print_answer(answer)
        except KeyboardInterrupt:
            note("Stopped.")
            raise typer.Exit(130) from None


def _named(sources: list[str]) -> dict[str, str]:
    """By name: what stands in front of `=`, or else the end of the path or address."""
    named: dict[str, str] = {}
    for source in sources:
        match = re.fullmatch(r"([^=/:]+)=(.+)", source)
        address = match[2] if match else source
        name = printable(match[1] if match else PurePath(re.split(r"[?#]", address)[0]).name)
        if name in named:
            fail(f"two sources are called {name!r}; name one with NAME=SOURCE")
        named[name] = address
    return named


def _print_answer(answer: "Answer") -> None:
    seen = "".join(f"; {one.name} {one.start:.1f} to {one.end:.1f} s, {place(one.box)}" for one in answer.evidence[:1])
    line = f"[{answer.seconds_of_video:.1f} s] {answer.answer or '(an empty answer)'}{seen}"
    console.print(line, soft_wrap=True, highlight=False)
    for warning in answer.warnings:
        note(warning)
