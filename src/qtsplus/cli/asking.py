"""`qtsplus ask` and `qtsplus demo`: questions to a model."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..asking.choice import Choice
from ..common.files import counted, printable
from ..model.sampling_qtsplus import Sampling
from . import options
from .console import console, fail, note, notes, print_json, wrote
from .library import Like
from .models import Source, open_library

Options = Mapping[str, object]  # by their names in Python
Video = Annotated[str, typer.Argument(help="A video file, its http(s) address, a folder of frames, or a library.")]
SHOWN = 10  # stretches of evidence in a terminal

if TYPE_CHECKING:
    from ..asking.evidence import Box
    from ..asking.session import Answer
    from ..asking.summaries import Summary
    from ..video.encoded import EncodedVideo


@options.command
def ask(
    video: Video,
    question: options.Asked,
    *,
    source: Source,
    choice: Choice,
    sampling: Sampling,
    subtitles: options.Subtitles = None,
    max_new_tokens: options.MaxNewTokens = None,
    evidence: Annotated[
        Path | None,
        typer.Option(help="A folder for answer.json and pictures of what the answer rests on."),
    ] = None,
    pieces: Annotated[
        int | None,
        typer.Option(min=1, help="How many videos of a library, or pieces of long ones, to read; 1 by default."),
    ] = None,
    name: Like = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what reading the video will take.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Answer a question about a video or a library, and say which seconds the answer rests on."""
    from ..common.folders import check_own
    from ..model.addresses_qtsplus import shown_name

    of_videos = vars(replace(sampling, start=None, end=None))  # of a library these say what is searched
    of_videos |= {"subtitles": subtitles, "dry_run": dry_run or None}
    check_videos([video], of_videos, {"pieces": pieces, "name": name})
    if dry_run:
        of_answers = {"max_new_tokens": max_new_tokens, "evidence": evidence, "subtitles": subtitles}
        refuse(of_answers, "has no effect with --dry-run: no answer is written")
        print_forecast(video, source, sampling, choice, as_json)
        return
    if evidence is not None:
        check_own(evidence)
    started = time.perf_counter()
    talk = Talk(video, source, choice.selection)
    asking = dict(vars(choice), subtitles=subtitles, max_new_tokens=max_new_tokens)
    timings = {"load": time.perf_counter() - started}
    if talk.is_library:
        asking["pieces"] = pieces or 1
        asking["names"] = chosen_names(talk.about, name)
        asking["window"] = window(sampling.start, sampling.end)
    else:
        timings["encode"] = talk.add(video, sampling, subtitles, printable(shown_name(video))).seconds
    answer = talk.ask(question, asking)
    answer = replace(answer, timings=timings | answer.timings)
    print_answer(answer, talk.is_library, as_json)
    if evidence is not None:
        talk.draw(answer, video, evidence)


def print_forecast(
    video: str,
    source: Source,
    sampling: Sampling,
    choice: Choice,
    as_json: bool,
) -> None:
    """Says what reading a video will take, by the configuration and the processor of a model."""
    import torch

    from ..hub.checkpoint import on_meta
    from ..hub.loading import load_config, load_processor
    from ..video.encoded import open_chunks
    from ..video.forecast import forecast

    name, revision = source.name()
    config = load_config(name, revision)
    dtype = config.dtype or torch.float32
    if source.dtype != "auto":
        dtype = getattr(torch, source.dtype)
    chunks = open_chunks(load_processor(name, revision), video, sampling)
    expected = forecast(on_meta(config).to(dtype), chunks, **vars(choice))
    if as_json:
        print_json(asdict(expected))
    else:
        console.print(str(expected), soft_wrap=True, highlight=False)


class Talk:
    """Videos that are asked about in a session, or a library."""

    def __init__(self, video: str, source: Source, selection: Any) -> None:
        from ..asking.session import VideoSession

        self.is_library = is_library(video)
        if self.is_library:
            self.about: Any = open_library(Path(video), source, selection)
        else:
            self.about = VideoSession(*source.load(selection))
        self.warnings = set(self.about.warnings)  # that the log has said

    def add(
        self,
        video: str,
        sampling: Sampling,
        subtitles: int | None = None,
        name: str | None = None,
    ) -> "EncodedVideo":
        """Encodes one more video."""
        name = self.about.add(video, name, progress=True, subtitles=subtitles is not None, **vars(sampling))
        encoded = self.about.video(name)
        self.warnings.update(encoded.about.warnings)
        return encoded

    def ask(self, question: str, options: dict[str, Any]) -> "Answer":
        """A question to a library stands alone."""
        ask = self.about.ask if self.is_library else self.about.chat
        with notes.status("Asking"):
            answer = ask(question, **options)
        self.note_new(answer)
        return answer

    def note_new(self, read: "Answer | Summary") -> None:
        """Says the warnings that the log has not said."""
        for warning in read.warnings:
            if warning not in self.warnings:
                note(warning)

    def draw(self, answer: "Answer", place: str, folder: Path) -> None:
        """Draws what an answer rests on, about the library or the one video that was named by its place."""
        from ..asking.picture import draw_evidence
        from ..video.encoded import NO_FILE

        videos = {}
        for name in answer.keep_maps:
            # By the address that was asked for: what a video is called may leave out a password.
            video = self.about.with_file(name) if self.is_library else replace(self.about.video(name), video=place)
            if video.video == NO_FILE:
                note(f"The file of {name} is gone or was changed, so its frames are not drawn.")
            videos[name] = video
        draw_evidence(answer, videos, folder)
        note(f"Wrote {folder}")


def chosen_names(library: Any, name: str | None) -> list[str]:
    """The videos of a library whose path is like `name`; a `ValueError` if there are none."""
    names = library.select(name or "*")
    if not names:
        raise ValueError(f"No video of the library is like --name {name!r}, but for example {library.names[0]!r}.")
    return names


def window(start: float | None, end: float | None) -> tuple[float, float]:
    return start or 0.0, inf if end is None else end


def is_library(path: str) -> bool:
    """Whether `qtsplus index` has made a folder."""
    return os.path.isfile(os.path.join(path, "library.jsonl"))


def refuse(options: Options, why: str) -> None:
    """Ends the command for the first of these options that was given."""
    for name, value in options.items():
        if value is not None:
            fail(f"--{name.replace('_', '-')} {why}")


def check_videos(
    videos: list[str],
    of_videos: Options,
    of_libraries: Options | None = None,
) -> None:
    """Ends the command for videos that are not there, and for options that are about others than these."""
    if not is_library(videos[0]):
        refuse(of_libraries or {}, "is about a library, which `qtsplus index` makes; leave it out")
    for video in videos:
        if is_library(video):
            if len(videos) > 1:
                fail(f"{video} is a library, which is asked alone")
            refuse(of_videos, "is about a video, and those of a library are encoded already; leave it out")
        if video == "-":
            fail("a video is read from a file; `qtsplus watch -` reads one from standard input")
        # os.path answers no where a Path raises, such as for a name that is too long.
        if "://" not in video and not os.path.exists(video):
            fail(f"there is no video at {video!r}")


@options.command
def demo(out: Annotated[Path, typer.Option(help="The folder for clip, model and pictures.")] = Path("demo")) -> None:
    """Ask the bundled tiny model two questions about a clip, and draw what each answer rests on."""
    from .demonstration import run_demo

    answers = run_demo(out)
    wrote(out)
    for question, answer in answers:
        console.print(f"\nQuestion: {question.question} (In truth: {question.answer})", highlight=False)
        print_answer(answer)


def place(box: "Box") -> str:
    """A region of the frame in words."""
    left, top, right, bottom = box
    if (right - left) * (bottom - top) > 0.5:
        return "all over the frame"
    height = (top + bottom) / 2
    row = ("top", "middle", "bottom")[min(int(height * 3), 2)]
    middle = (left + right) / 2
    column = ("left", "centre", "right")[min(int(middle * 3), 2)]
    return f"{row} {column}"


def looked_at(read: "Answer | Summary") -> str:
    """What the model saw of a video, and what of it may be wrong."""
    from ..video.forecast import say_exceeded

    text = f"{read.seconds_of_video:.1f} s, {counted(read.frames, 'frame')} looked at"
    gap = getattr(read, "largest_gap", 0.0)
    if gap > 0:
        text += f", at most {round(gap, 2):,g} s apart"
    text += say_exceeded(getattr(read, "trained_seconds", None))
    if read.unheard:
        text += ", without sound"
    return text


def print_answer(answer: "Answer", named: bool = False, as_json: bool = False) -> None:
    """The answer, and a table of what it rests on; with the names of the videos where there are several, or `named`."""
    if as_json:
        print_json(answer.as_dict())
        return
    console.print(answer.answer or "(an empty answer)", style="bold", highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    kept = answer.kept_tokens
    tokens = answer.visual_tokens
    table.add_row("kept", f"{kept:,} of {tokens:,} visual tokens ({kept / tokens:.1%})")
    table.add_row("video", looked_at(answer))
    heading = "seen in"
    weighed = "relevance" if answer.scored else "kept tokens"
    for interval in answer.evidence[:SHOWN]:
        span = f"{interval.start:.1f} to {interval.end:.1f} s, {place(interval.box)}"
        if named or len(answer.keep_maps) > 1:
            span = f"{printable(interval.name)}, {span}"
        table.add_row(heading, f"{span}  ({interval.weight:.0%} of the {weighed})")
        heading = ""
    if len(answer.evidence) > SHOWN:
        table.add_row("", "and in others, which --json lists")
    if answer.shown is not None:
        verdict = "probably" if answer.shown else "probably not"
        calibration = f"seen is {answer.seen:.0%}; the model's calibration asks for {answer.seen_threshold:.0%}"
        table.add_row("shown", f"{verdict} ({calibration})")
    timings = [f"{stage.replace('_', ' ')} {seconds:.2f} s" for stage, seconds in answer.timings.items()]
    table.add_row("time", ", ".join(timings))
    console.print(table)
