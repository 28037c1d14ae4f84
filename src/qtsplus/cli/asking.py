"""`qtsplus ask` and `qtsplus demo`: questions to a model."""

import json
import os
import time
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..common.files import counted, printable
from . import options
from .console import console, fail, note, notes, one_line_errors, read_pairs, wrote
from .library import Label, Like
from .models import load_named, name_model, open_library, split_revision

SHOWN = 10  # stretches of evidence in a terminal

if TYPE_CHECKING:
    from ..asking.session import Answer
    from ..asking.summaries import Summary
    from ..video.encoded import EncodedVideo
    from ..video.forecast import Forecast


def ask(
    video: Annotated[str, typer.Argument(help="A video file, its http(s) address, a folder of frames, or a library.")],
    question: options.Asked,
    model: options.Model = None,
    retention: options.Retention = None,
    max_visual_tokens: options.MaxVisualTokens = None,
    selection: options.Selection = None,
    fps: options.Fps = None,
    start: options.Start = None,
    end: options.End = None,
    max_frames: options.MaxFrames = None,
    max_pixels: options.MaxPixels = None,
    subtitles: options.Subtitles = None,
    max_new_tokens: options.MaxNewTokens = None,
    evidence: Annotated[
        Path | None,
        typer.Option(help="A folder for pictures of what the answer rests on, and these stretches as a film."),
    ] = None,
    pieces: Annotated[
        int | None, typer.Option(min=1, help="Of a library: how many videos, or pieces of long ones, are read; 1.")
    ] = None,
    name: Like = None,
    label: Label = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what reading the video will take.")] = False,
    device: options.Device = None,
    dtype: options.WeightType = options.Dtype.auto,
    as_json: options.AsJson = False,
) -> None:
    """Answer a question about a video or a library, and say which seconds the answer rests on."""
    model, revision = split_revision(model)
    reading = {"fps": fps, "start": start, "end": end, "max_frames": max_frames, "max_pixels": max_pixels}
    if not is_library(video):
        of_library = {"pieces": pieces, "name": name, "label": label}
        refuse(of_library, "is about a library, which `qtsplus index` makes; leave it out")
    whole = {"fps": fps, "max_frames": max_frames, "max_pixels": max_pixels} if is_library(video) else reading
    check_videos([video], {**whole, "subtitles": subtitles, "dry_run": dry_run or None})
    budget = {"retention": retention, "max_visual_tokens": max_visual_tokens, "selection": selection}
    writing = {"max_new_tokens": max_new_tokens, "evidence": evidence, "pieces": pieces}
    if dry_run:
        refuse({**writing, "subtitles": subtitles}, "has no effect with --dry-run: no answer is written")
    choice = {**budget, "subtitles": subtitles, "max_new_tokens": max_new_tokens or 128}
    with one_line_errors():
        from ..asking.answers import check_text
        from ..common.folders import check_own
        from ..model.decoding_qtsplus import shown_name
        from ..model.methods_qtsplus import add_method

        check_text("question", question)
        add_method(selection)
        if evidence is not None:
            check_own(evidence)
        started, loading = time.perf_counter(), (model, revision, device, dtype.value)
        if dry_run:
            expected = foresee(video, loading, reading, budget)
            line = json.dumps(asdict(expected)) if as_json else str(expected)
            print(line) if as_json else console.print(line, soft_wrap=True, highlight=False)
            return
        talk = Talk(video, loading, reading, subtitles)
        about: dict[str, Any] = {}
        if talk.is_library:
            about = {"names": chosen_names(talk.about, name, label), "window": window(start, end)}
        timings = {"load": time.perf_counter() - started}
        if not talk.is_library:
            timings["encode"] = talk.add(video, printable(shown_name(video))).seconds
        answer = talk.ask(question, **choice, **({"pieces": pieces or 1, **about} if talk.is_library else {}))
        answer = talk.last = replace(answer, timings={**timings, **answer.timings})
        print_answer(answer, talk.is_library, as_json)
        if evidence is not None:
            talk.draw(evidence)


def foresee(video: str, loading: tuple, reading: dict[str, Any], budget: dict[str, Any]) -> "Forecast":
    """What reading a video will take, by the configuration and the processor of a model."""
    import torch

    from ..hub.checkpoint import on_meta
    from ..hub.loading import load_config, load_processor
    from ..video.encoded import open_chunks
    from ..video.forecast import forecast

    name, revision, _, dtype = loading
    name = name_model(name)
    config = load_config(name, revision)
    kind = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    chunks = open_chunks(load_processor(name, revision), video, **reading)
    return forecast(on_meta(config).to(kind), chunks, **budget)


class Talk:
    """Videos that are asked about in a session, or a library; and the answer that came last."""

    def __init__(self, video: str, loading: tuple, reading: dict[str, Any], subtitles: int | None = None) -> None:
        from ..asking.session import VideoSession

        self.is_library = is_library(video)
        if self.is_library:
            self.about: Any = open_library(Path(video), *loading)
        else:
            self.about = VideoSession(*load_named(*loading))
        self.reading = {**reading, "subtitles": subtitles is not None}
        self.places: dict[str, str] = {}  # of the videos, as they were named here
        self.warnings = set[str](self.about.warnings if self.is_library else ())  # that the log has said
        self.last: Answer | None = None

    def add(self, video: str, name: str | None = None) -> "EncodedVideo":
        """Encodes one more video."""
        name = self.about.add(video, name, progress=True, **self.reading)
        self.places[name] = video
        encoded = self.about.videos[name]
        self.warnings.update(encoded.warnings)
        return encoded

    def ask(self, question: str, **choice: Any) -> "Answer":
        """A question to a library stands alone."""
        ask = self.about.ask if self.is_library else self.about.chat
        with notes.status("Asking"):
            self.last = ask(question, **choice)
        for warning in (one for one in self.last.warnings if one not in self.warnings):
            note(warning)
        return self.last

    def draw(self, folder: Path) -> None:
        """Draws what the last answer rests on."""
        from ..asking.picture import draw_evidence

        assert self.last is not None
        draw_evidence(self.last, {name: self._film(name) for name in self.last.keep_maps}, folder)
        note(f"Wrote {folder}")

    def _film(self, name: str) -> "EncodedVideo":
        from ..video.encoded import IN_MEMORY

        if not self.is_library:  # by the address that was asked for: what it is called may leave out a password
            return replace(self.about.videos[name], video=self.places[name])
        film = self.about.film(name)
        if film.video == IN_MEMORY:
            note(f"The file of {name} is gone or was changed, so its frames are not drawn.")
        return film


def chosen_names(library: Any, name: str | None, labels: list[str] | None) -> list[str]:
    """The videos of a library whose path is like `name` and that have the labels; `ValueError` if there are none."""
    names = library.select(name or "*", read_pairs("--label", labels))
    if not names:
        given = [f"--label {label}" for label in labels or ()]
        if name is not None:
            given = [f"--name {name!r}", *given]
        raise ValueError(f"No video of the library is like {' '.join(given)}, but for example {library.names[0]!r}.")
    return names


def window(start: float | None, end: float | None) -> tuple[float, float]:
    return start or 0.0, inf if end is None else end


def is_library(path: str) -> bool:
    """Whether `qtsplus index` has made a folder."""
    return os.path.isfile(os.path.join(path, "library.jsonl"))


def refuse(options: dict[str, Any], why: str) -> None:
    """Ends the command for the first of these options that was given."""
    for name in (name for name, value in options.items() if value is not None):
        fail(f"--{name.replace('_', '-')} {why}")


def check_videos(videos: list[str], reading: dict[str, Any]) -> None:
    """Ends the command for videos that are not there, or options about them, before anything heavy is imported."""
    if library := next(filter(is_library, videos), None):
        if videos[1:]:
            fail(f"{library} is a library, which is asked alone")
        refuse(reading, "is about a video, and those of a library are encoded already; leave it out")
    for video in videos:
        # os.path answers no where a Path raises, such as for a name that is too long.
        if "://" not in video and not os.path.exists(video):
            fail(f"there is no video at {video!r}")
        if os.path.isdir(video) and reading["fps"] is None and not library:
            rate = "give the rate at which they were taken, such as --fps 2"
            fail(f"{video} is a folder, of frames or videos: of frames {rate}; of videos run `qtsplus index` first")


def demo(out: Annotated[Path, typer.Option(help="The folder for clip, model and pictures.")] = Path("demo")) -> None:
    """Ask the bundled tiny model two questions about a clip, and draw what each answer rests on."""
    with one_line_errors():
        from .demonstration import run_demo

        answers = run_demo(out, note)
    wrote(out)
    for question, answer in answers:
        console.print(f"\nQuestion: {question.question} (In truth: {question.answer})", highlight=False)
        print_answer(answer)


def place(box: tuple[float, float, float, float]) -> str:
    """A region of the frame in words."""
    left, top, right, bottom = box
    if (right - left) * (bottom - top) > 0.5:
        return "all over the frame"
    row = ("top", "middle", "bottom")[min(int((top + bottom) / 2 * 3), 2)]
    column = ("left", "centre", "right")[min(int((left + right) / 2 * 3), 2)]
    return f"{row} {column}" if (row, column) != ("middle", "centre") else "centre"


def looked_at(read: "Answer | Summary") -> str:
    return f"{read.seconds_of_video:.1f} s, {counted(read.frames, 'frame')} looked at{', without sound' * read.unheard}"


def print_answer(answer: "Answer", named: bool = False, as_json: bool = False) -> None:
    """The answer, and a table of what it rests on; with the names of the videos where there are several, or `named`."""
    if as_json:
        print(json.dumps(answer.as_dict()), flush=True)
        return
    console.print(answer.answer or "(an empty answer)", style="bold", highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    kept, tokens = answer.kept_tokens, answer.visual_tokens
    table.add_row("kept", f"{kept:,} of {tokens:,} visual tokens ({kept / tokens:.1%})")
    table.add_row("video", looked_at(answer))
    for number, interval in enumerate(answer.evidence[:SHOWN]):
        name = f"{printable(interval.name)}, " if named or len(answer.keep_maps) > 1 else ""
        span = f"{name}{interval.start:.1f} to {interval.end:.1f} s, {place(interval.box)}"
        span += f"  ({interval.weight:.0%} of the relevance)"
        table.add_row("seen in" if number == 0 else "", span)
    if (more := len(answer.evidence) - SHOWN) > 0:
        table.add_row("", f"and in {more} other stretches, which --json lists")
    if answer.seen is not None:
        threshold = answer.seen_threshold or 0.0
        verdict = "probably" if answer.seen >= threshold else "probably not"
        calibration = f"seen {answer.seen:.0%}; from {threshold:.0%} on, in the model's calibration"
        table.add_row("shown", f"{verdict} ({calibration})")
    timings = ", ".join(f"{stage.replace('_', ' ')} {seconds:.2f} s" for stage, seconds in answer.timings.items())
    table.add_row("time", timings)
    console.print(table)
