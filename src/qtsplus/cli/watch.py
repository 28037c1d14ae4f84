"""`qtsplus watch`: one question to video that is still coming."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..output import printable
from .asking import place
from .console import console, fail, note, one_line_errors
from .models import load_named, split_revision
from .options import AsJson, Asked, Device, End, MaxFrames, MaxNewTokens, MaxPixels, Model, Selection, Start

if TYPE_CHECKING:
    from ..session import Answer


def _check_seen(when_seen: float | None) -> float | None:
    if when_seen is not None and not 0 <= when_seen <= 1:
        fail(f"--when-seen is {when_seen:g}; expected a part from 0 to 1, such as 0.8")
    return when_seen


def watch(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="What to watch: a file, - for standard input, an address (http, rtsp, ...) or a device such as "
            "/dev/video0, avfoundation:0 or dshow:video=NAME. NAME=SOURCE gives it a name."
        ),
    ],
    question: Asked,
    model: Model = None,
    every: Annotated[float, typer.Option(help="Seconds of video from answer to answer.")] = 10.0,
    memory_tokens: Annotated[int, typer.Option(min=1, help="How many visual tokens are remembered.")] = 4096,
    fps: Annotated[float, typer.Option(help="How many frames to look at per second.")] = 2.0,
    start: Start = None,
    end: End = None,
    max_frames: MaxFrames = None,
    max_pixels: MaxPixels = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a frame after which a source has failed that is no file.")
    ] = 10.0,
    selection: Selection = None,
    max_new_tokens: MaxNewTokens = 128,
    on_change: Annotated[bool, typer.Option("--on-change", help="Tell an answer only if it is a new one.")] = False,
    when_seen: Annotated[
        float | None,
        typer.Option(
            callback=_check_seen,
            help="Tell an answer only if the model has become as sure as this that it sees what is asked.",
        ),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Answer a question again and again while video comes. Ctrl-C ends it."""
    model, revision = split_revision(model)
    named = named_sources(sources)
    with one_line_errors():
        from .. import watching
        from ..answers import check_text
        from ..methods_qtsplus import add_method

        add_method(selection)
        check_text("question", question)
        loaded, processor = load_named(model, revision, device)
        if when_seen is not None and not loaded.config.qtsplus_config.null_token:
            fail("--when-seen needs a model with a null token, which says how sure it is; use --on-change")
        options: dict[str, Any] = {"memory_tokens": memory_tokens, "fps": fps, "timeout": timeout, "every": every}
        options |= {"max_new_tokens": max_new_tokens, "selection": selection, "start": start or 0.0, "end": end}
        options |= {"max_frames": max_frames, "max_pixels": max_pixels}
        try:
            answers = watching.watch(loaded, processor, named, question, **options)
            said: list[str] = []
            for answer in _told(answers, on_change, when_seen):
                print(json.dumps(answer.as_dict()), flush=True) if as_json else _print_answer(answer)
                for warning in answer.warnings:
                    if warning not in said:
                        note(warning)
                        said.append(warning)
        except KeyboardInterrupt:
            note("Stopped.")
            raise typer.Exit(130) from None


def _told(answers: Iterable["Answer"], on_change: bool, when_seen: float | None) -> Iterator["Answer"]:
    """The answers that differ from the one told last, and those with which the model has become sure."""
    last, is_sure = None, False
    for answer in answers:
        was_sure, is_sure = is_sure, when_seen is None or (answer.seen or 0.0) >= when_seen
        is_news = (on_change and answer.answer != last) or (when_seen is not None and not was_sure)
        if is_sure and (is_news or (when_seen is None and not on_change)):
            last = answer.answer
            yield answer


def named_sources(sources: list[str]) -> dict[str, str]:
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
