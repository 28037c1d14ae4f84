"""`qtsplus watch`: one question to video that is still coming."""

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.files import printable
from .asking import place
from .console import console, fail, note, print_json
from .models import Source
from .options import AsJson, Asked, MaxNewTokens, Selection, command

if TYPE_CHECKING:
    from ..asking.evidence import Interval
    from ..asking.session import Answer

_NOT_SEEN = (
    "--when-seen needs a model with a null token and a calibration, from which on a video shows what is asked for "
    "(seen_threshold in its config.json), and a --selection by its scores. Use --on-change."
)


@command
def watch(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="What to watch: a file, - for standard input, an address (http, rtsp, ...) or a device such as "
            "/dev/video0, avfoundation:0 or dshow:video=NAME. NAME=SOURCE gives it a name."
        ),
    ],
    question: Asked,
    *,
    source: Source,
    every: Annotated[float, typer.Option(help="Seconds of video from answer to answer.")] = 10.0,
    memory_tokens: Annotated[int, typer.Option(min=1, help="How many visual tokens are remembered.")] = 4096,
    fps: Annotated[float, typer.Option(help="How many frames to look at per second.")] = 2.0,
    timeout: Annotated[
        float, typer.Option(help="Give up on a camera or address after this many seconds without a frame.")
    ] = 10.0,
    selection: Selection = None,
    max_new_tokens: MaxNewTokens = None,
    on_change: Annotated[
        bool, typer.Option("--on-change", help="Print an answer only if it differs from the one before.")
    ] = False,
    when_seen: Annotated[
        bool,
        typer.Option(
            "--when-seen", help="Print an answer only when the video begins to show what the question is about."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a question again and again while video comes. Ctrl-C ends it."""
    from ..live import watching

    named = named_sources(sources)
    loaded, processor = source.load(selection)
    if when_seen and not loaded.config.qtsplus_config.says_seen:
        fail(_NOT_SEEN)
    answers = watching.watch(
        loaded,
        processor,
        named,
        question,
        memory_tokens=memory_tokens,
        fps=fps,
        timeout=timeout,
        every=every,
        max_new_tokens=max_new_tokens,
        selection=selection,
    )
    said = set()
    try:
        for answer, evidence in _told(answers, on_change, when_seen):
            if as_json:
                print_json(answer.as_dict())
            else:
                line = f"[{answer.seconds_of_video:.1f} s] {answer.answer or '(an empty answer)'}"
                for best in evidence[:1]:
                    line += f"; {best.name} {best.start:.1f} to {best.end:.1f} s, {place(best.box)}"
                console.print(line, soft_wrap=True, highlight=False)
            for warning in answer.warnings:
                if warning not in said:
                    note(warning)
            said.update(answer.warnings)
    except KeyboardInterrupt:
        fail("stopped", 130)


def _told(
    answers: Iterable["Answer"],
    on_change: bool,
    when_seen: bool,
) -> Iterator[tuple["Answer", "list[Interval]"]]:
    """
    All answers with their evidence; or those that differ from the one told last, and those where the video begins to
    show the thing, with the evidence that is new.
    """
    last = None
    is_seen = False
    seconds = 0.0  # of video before the answer
    for answer in answers:
        if when_seen and answer.shown is None:
            fail(_NOT_SEEN)
        was_seen = is_seen
        evidence = answer.evidence
        if when_seen:  # the memory may also show it where it was seen long ago
            evidence = [interval for interval in evidence if interval.end > seconds]
        is_seen = bool(answer.shown and evidence)
        seconds = answer.seconds_of_video
        is_told = not on_change or answer.answer != last
        if when_seen:
            is_told = is_seen and (not was_seen or (on_change and is_told))
        if is_told:
            last = answer.answer
            yield answer, evidence


def named_sources(sources: list[str]) -> dict[str, str]:
    """By name: what stands in front of `=`, or else the end of the path or address."""
    named = {}
    for source in sources:
        match = re.fullmatch(r"([^=/:]+)=(.+)", source)
        if match:
            name, address = match.groups()
        else:
            name = PurePath(re.split(r"[?#]", source)[0]).name
            address = source
        name = printable(name)
        if name in named:
            fail(f"two sources are called {name!r}; name one with NAME=SOURCE")
        named[name] = address
    return named
