"""`qtsplus chat`: a conversation about videos, line by line, in a terminal or through a pipe."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .asking import check_video, films_of, is_library, print_answer, refuse_for_a_library
from .console import console, describe, fail, note, notes, one_line_errors, require_fraction
from .models import check_model_options, check_selection, load_model, open_library
from .options import (
    AsJson,
    Device,
    Dtype,
    Fps,
    MaxNewTokens,
    MaxVisualTokens,
    Model,
    Retention,
    Revision,
    Selection,
    WeightType,
)

if TYPE_CHECKING:
    from ..session import Answer
    from ..videos import EncodedVideo

_HELP = "Commands: /evidence [FOLDER], /budget FRACTION, COUNT or auto, /add VIDEO, /quit. Anything else is a question."


def chat(
    videos: Annotated[
        list[str],
        typer.Argument(
            help="Video files, http(s) addresses of some, folders of frames; or a library of `qtsplus index`.",
            show_default=False,
        ),
    ],
    model: Model = None,
    revision: Revision = None,
    retention: Retention = None,
    max_visual_tokens: MaxVisualTokens = None,
    selection: Selection = None,
    fps: Fps = None,
    max_new_tokens: MaxNewTokens = 128,
    device: Device = None,
    dtype: WeightType = Dtype.auto,
    as_json: AsJson = False,
) -> None:
    """
    Ask about videos again and again. They are encoded once, and a question knows those before.

    Every question to a library searches all of it, and may be answered from another video than the one before. So it
    stands alone, as for `qtsplus ask`: name in each what it is about.

    A question stands on a line of its own. /evidence says what the last answer rests on, or draws it into a folder;
    /budget 0.1, /budget 256 and /budget auto change how many visual tokens are kept; /add VIDEO adds a video; /quit
    ends. From a pipe, a line that fails makes the exit code 1.
    """
    check_model_options(model, revision)
    library = next(filter(is_library, videos), None)
    if library and videos[1:]:
        fail(f"{library} is a library, which is asked alone")
    if library:
        refuse_for_a_library(**{"--fps": fps is not None})
    else:
        for video in videos:
            check_video(video, fps)
    require_fraction(retention)
    choice: dict[str, Any] = {"retention": retention, "max_visual_tokens": max_visual_tokens, "selection": selection}
    choice["max_new_tokens"] = max_new_tokens
    loading = model, revision, device, dtype.value
    try:
        with one_line_errors():
            from .. import session

            check_selection(selection)
            if library:
                talk: _Talk = _Search(open_library(Path(library), *loading), choice, fps, as_json)
            else:
                talk = _Talk(session.VideoSession(*load_model(*loading)), choice, fps, as_json)
                for video in videos:
                    talk.add(video)
        note(_HELP)
        failed = talk.listen()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


class _Talk:
    """A conversation, its settings, and its last answer."""

    names_videos = False  # in an answer about one

    def __init__(self, session: Any, choice: dict[str, Any], fps: float | None, as_json: bool) -> None:
        self.session, self.choice, self.fps, self.as_json = session, choice, fps, as_json
        self.places: dict[str, str] = {}  # of the videos, as they were named here
        self.last: Answer | None = None

    def listen(self) -> int:
        """Answers line by line until they end; the number of lines that failed."""
        failed = 0
        for line in _lines():
            try:
                text = line.decode().strip()
                if text == "/quit":
                    break
                if text:
                    self.answer(text)
            except (ValueError, OSError) as error:
                failed += 1
                typer.echo(f"qtsplus: {' '.join(describe(error).split())}", err=True)
        return failed

    def answer(self, text: str) -> None:
        """Does what one line says."""
        command, _, argument = text.partition(" ")
        if command == "/add":
            self.add(argument.strip())
        elif command == "/budget":
            self.set_budget(argument.strip())
        elif command == "/evidence":
            self.show_evidence(argument.strip())
        elif command.startswith("/"):
            raise ValueError(f"there is no command {command}. {_HELP}")
        else:
            with notes.status("Asking"):
                self.last = self.ask(text)
            if self.as_json:
                print(json.dumps(self.last.as_dict()), flush=True)
            else:
                print_answer(self.last, self.names_videos)

    def ask(self, question: str) -> "Answer":
        return self.session.chat(question, **self.choice)

    def films(self, answer: "Answer") -> "dict[str, EncodedVideo]":
        """Those to draw, by the addresses that were asked for: what they are called may leave out a password."""
        return {name: replace(video, video=self.places[name]) for name, video in self.session.videos.items()}

    def add(self, video: str) -> None:
        """Encodes one more video."""
        if not video:
            raise ValueError("/add needs a video: a file, an address or a folder")
        name = self.session.add(video, fps=self.fps, progress=True)
        self.places[name] = video
        note(f"{name}: {len(self.session.videos[name].features)} visual tokens")
        for warning in self.session.videos[name].warnings:
            note(warning)

    def set_budget(self, text: str) -> None:
        """A fraction of the visual tokens, a number of them, or what the model decides."""
        retention, count = None, None
        if text.isdecimal() and int(text) > 0:
            count = int(text)
        elif text != "auto":
            try:
                retention = float(text)
            except ValueError:
                retention = 0.0
            if not 0 < retention <= 1:
                raise ValueError(f"/budget {text}: expected a fraction such as 0.1, a number of tokens, or auto")
        self.choice.update(retention=retention, max_visual_tokens=count)

    def show_evidence(self, folder: str) -> None:
        """What the last answer rests on, as lines or drawn."""
        if self.last is None:
            raise ValueError("/evidence is about an answer; ask something first")
        if folder:
            from ..picture import draw_evidence

            draw_evidence(self.last, self.films(self.last), Path(folder))
            note(f"Wrote {folder}")
            return
        for one in self.last.as_dict()["evidence"]:
            if self.as_json:
                print(json.dumps(one), flush=True)
                continue
            seconds, box = f"{one['start']:.1f} to {one['end']:.1f} s", one["pixels"] or one["box"]
            line = f"{one['video']}: {seconds}, box {box}, {one['weight']:.0%}"
            console.print(line, soft_wrap=True, markup=False, highlight=False)


class _Search(_Talk):
    """The same about a library."""

    names_videos = True

    def ask(self, question: str) -> "Answer":
        return self.session.ask(question, **self.choice)

    def films(self, answer: "Answer") -> "dict[str, EncodedVideo]":
        return films_of(self.session, answer)

    def add(self, video: str) -> None:
        raise ValueError("/add is about a conversation on videos; `qtsplus index` adds to a library")


def _lines() -> Iterator[bytes]:
    """What is typed, with a prompt in a terminal."""
    if not sys.stdin.isatty():
        yield from iter(sys.stdin.buffer.readline, b"")
        return
    while True:
        try:
            yield input("> ").encode(errors="surrogateescape")
        except EOFError:
            return
