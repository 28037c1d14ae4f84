"""`qtsplus ask` and `qtsplus demo`: questions to a model."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .console import console, fail, note, notes, one_line_errors, require_fraction, wrote
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
    from ..library import Library
    from ..session import Answer
    from ..videos import EncodedVideo


def ask(
    video: Annotated[
        str,
        typer.Argument(
            help="A video file, an http(s) address of one, a folder of frames, or a library that `qtsplus index` made.",
            show_default=False,
        ),
    ],
    question: Annotated[str, typer.Argument(help="What to ask about it.", show_default=False)],
    model: Model = None,
    revision: Revision = None,
    retention: Retention = None,
    max_visual_tokens: MaxVisualTokens = None,
    selection: Selection = None,
    fps: Fps = None,
    two_passes: Annotated[
        bool,
        typer.Option(
            "--two-passes",
            help="Read the video small first, and then at full size only the regions that the question chooses: "
            "sooner, and less sure.",
        ),
    ] = False,
    max_new_tokens: MaxNewTokens = 128,
    evidence: Annotated[
        Path | None,
        typer.Option(help="A folder for pictures of what the answer rests on, and the video with the kept tokens lit."),
    ] = None,
    pieces: Annotated[
        int | None, typer.Option(min=1, help="Of a library: how many videos, or pieces of long ones, are read; 1.")
    ] = None,
    device: Device = None,
    dtype: WeightType = Dtype.auto,
    as_json: AsJson = False,
) -> None:
    """Answer a question about a video or a library, and say which seconds the answer rests on."""
    check_model_options(model, revision)
    library = is_library(video)
    if library:
        refuse_for_a_library(**{"--fps": fps is not None, "--two-passes": two_passes})
    elif pieces is not None:
        fail("--pieces is about a library; leave it out")
    else:
        check_video(video, fps)
    _check_question(question)
    require_fraction(retention)
    choice: dict[str, Any] = {"retention": retention, "max_visual_tokens": max_visual_tokens}
    choice |= {"selection": selection, "max_new_tokens": max_new_tokens}
    loading = model, revision, device, dtype.value
    with one_line_errors():
        from ..hub.folder import check_own

        check_selection(selection)
        if evidence is not None:
            check_own(evidence)
        if library:
            shelf = open_library(Path(video), *loading)
            with notes.status("Asking"):
                answer = shelf.ask(question, pieces or 1, **choice)
        else:
            answer, encoded = _ask_video(video, question, loading, fps, two_passes, choice)
    if as_json:
        print(json.dumps(answer.as_dict()))
    else:
        print_answer(answer, named=library)
    if evidence is not None:
        # By the address that was asked for: what it is called may leave out a password.
        draw(answer, films_of(shelf, answer) if library else {encoded.video: replace(encoded, video=video)}, evidence)


def _ask_video(
    video: str, question: str, loading: tuple, fps: float | None, two_passes: bool, choice: dict[str, Any]
) -> "tuple[Answer, EncodedVideo]":
    from .. import session

    started = time.perf_counter()
    loaded, processor = load_model(*loading)
    seconds_to_load = time.perf_counter() - started
    passes = session.TwoPasses() if two_passes else None
    encoded = session.encode(loaded, processor, video, fps=fps, two_passes=passes, progress=True)
    with notes.status("Asking"):
        answer = session.ask(loaded, processor, encoded, question, **choice)
    answer.timings.update(load=seconds_to_load, encode=encoded.seconds)
    return answer, encoded


def draw(answer: "Answer", videos: "dict[str, EncodedVideo]", folder: Path) -> None:
    """Draws what an answer rests on."""
    with one_line_errors(), notes.status("Drawing"):
        from ..picture import draw_evidence

        draw_evidence(answer, videos, folder)
    note(f"Wrote {folder}")


def is_library(path: str) -> bool:
    """Whether `qtsplus index` has made a folder."""
    return os.path.isfile(os.path.join(path, "library.jsonl"))


def refuse_for_a_library(**options: bool) -> None:
    """Ends the command for options that were given and are about videos which are yet to be encoded."""
    for option in (name for name, is_set in options.items() if is_set):
        fail(f"{option} is about a video, and those of a library are encoded already; leave it out")


def films_of(library: "Library", answer: "Answer") -> "dict[str, EncodedVideo]":
    """The videos of a library that an answer is about, to be drawn as far as their files are there."""
    from ..videos import IN_MEMORY

    films = {name: library.film(name) for name in answer.keep_maps}
    for name in (name for name, film in films.items() if film.video == IN_MEMORY):
        note(f"The file of {name} is gone or was changed, so its frames are not drawn.")
    return films


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the clip, the model and the picture.")] = Path("demo"),
) -> None:
    """Ask the bundled tiny model two questions about a clip, and draw the tokens that it kept for each."""
    with one_line_errors():
        from ..demo import run_demo

        answers = run_demo(out, note)
    wrote(out)
    for question, answer in answers:
        console.print(f"\nQuestion: {question.question} (In truth: {question.answer})", highlight=False)
        print_answer(answer)


def check_video(video: str, fps: float | None) -> None:
    """Ends the command for a video that is not there, before anything heavy is imported."""
    # os.path answers no where a Path raises, such as for a name that is too long.
    if "://" not in video and not os.path.exists(video):
        fail(f"there is no video at {video!r}")
    if os.path.isdir(video) and fps is None:
        fail(f"{video} is a folder of frames: give the rate at which they were taken, such as --fps 2")
    if fps is not None and not 0 < fps < float("inf"):
        fail(f"--fps is {fps:g}; expected more than 0 frames per second, and a finite number")


def _check_question(question: str) -> None:
    if not question.strip():
        fail("the question is empty; expected some text")
    try:
        question.encode()
    except UnicodeEncodeError:
        fail("the question is not valid UTF-8 text")


def place(box: tuple[float, float, float, float]) -> str:
    """A region of the frame in words."""
    left, top, right, bottom = box
    if (right - left) * (bottom - top) > 0.5:
        return "all over the frame"
    row = ("top", "middle", "bottom")[min(int((top + bottom) / 2 * 3), 2)]
    column = ("left", "centre", "right")[min(int((left + right) / 2 * 3), 2)]
    return f"{row} {column}" if (row, column) != ("middle", "centre") else "centre"


def print_answer(answer: "Answer", named: bool = False) -> None:
    """The answer, and a table of what it rests on; with the names of the videos where there are several, or `named`."""
    console.print(answer.answer or "(an empty answer)", style="bold", markup=False, highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    share = answer.kept_tokens / answer.visual_tokens
    table.add_row("kept", f"{answer.kept_tokens} of {answer.visual_tokens} visual tokens ({share:.1%})")
    table.add_row("video", f"{answer.seconds_of_video:.1f} s, {answer.frames} frames looked at")
    for number, interval in enumerate(answer.evidence):
        name = f"{interval.name}, " if named or len(answer.keep_maps) > 1 else ""
        span = f"{name}{interval.start:.1f} to {interval.end:.1f} s, {place(interval.box)}"
        span += f"  ({interval.weight:.0%} of the relevance)"
        table.add_row("seen in" if number == 0 else "", span)
    if answer.seen is not None:
        table.add_row("sure", f"{answer.seen:.0%}, that something in the video shows what was asked for")
    stages = [name for name in ("load", "encode", "second_pass", "first_token", "generate") if name in answer.timings]
    timings = ", ".join(f"{stage.replace('_', ' ')} {answer.timings[stage]:.2f} s" for stage in stages)
    table.add_row("time", timings)
    console.print(table)
