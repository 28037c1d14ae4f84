"""`qtsplus summarise`: a video, or each video of a library, by chapters."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..common.files import printable
from . import options
from .asking import Talk, check_videos, chosen_names, is_library, looked_at, refuse
from .console import console, note, notes, one_line_errors
from .library import Label, Like
from .models import split_revision

if TYPE_CHECKING:
    from ..asking.summaries import Summary


def summarise(
    video: Annotated[str, typer.Argument(help="A video file, its http(s) address, a folder of frames, or a library.")],
    prompt: Annotated[str | None, typer.Argument(help="What to say of each chapter.", show_default=False)] = None,
    model: options.Model = None,
    retention: options.Retention = None,
    max_visual_tokens: options.MaxVisualTokens = None,
    selection: options.Selection = None,
    fps: options.Fps = None,
    start: options.Start = None,
    end: options.End = None,
    max_frames: options.MaxFrames = None,
    max_pixels: options.MaxPixels = None,
    max_new_tokens: options.MaxNewTokens = None,
    name: Like = None,
    label: Label = None,
    device: options.Device = None,
    dtype: options.WeightType = options.Dtype.auto,
    as_json: options.AsJson = False,
) -> None:
    """Summarise a video, or each video of a library, by chapters."""
    model, revision = split_revision(model)
    reading = {"fps": fps, "start": start, "end": end, "max_frames": max_frames, "max_pixels": max_pixels}
    if not is_library(video):
        refuse({"name": name, "label": label}, "is about a library, which `qtsplus index` makes; leave it out")
    check_videos([video], reading)
    with one_line_errors():
        from ..asking.answers import check_text
        from ..asking.summaries import summarise as summarise_videos
        from ..model.decoding_qtsplus import shown_name
        from ..model.methods_qtsplus import add_method

        if prompt is not None:
            check_text("prompt", prompt)
        add_method(selection)
        talk = Talk(video, (model, revision, device, dtype.value), reading)
        choice: dict[str, Any] = {
            "prompt": prompt,
            "retention": retention,
            "max_visual_tokens": max_visual_tokens,
            "selection": selection,
            "max_new_tokens": max_new_tokens,
        }
        if talk.is_library:
            choice["names"] = chosen_names(talk.about, name, label)
        else:
            talk.add(video, printable(shown_name(video)))
        given = {option: value for option, value in choice.items() if value is not None}
        summary = summarise_videos(talk.about, progress=notes.is_terminal, **given)
        for warning in summary.warnings:
            if warning not in talk.warnings:
                note(warning)
        print_summary(summary, as_json)


def print_summary(summary: "Summary", as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(summary)))
        return
    console.print(summary.text or "(an empty answer)", style="bold", highlight=False)
    several = len({one.video for one in summary.chapters}) > 1
    table = Table(*["video"] * several, "seconds", "kept", "chapter", box=None, padding=(0, 2, 0, 0))
    for one in summary.chapters:
        span, kept = f"{one.start:.1f} to {one.end:.1f}", f"{one.kept_tokens} of {one.visual_tokens}"
        table.add_row(*[printable(one.video)] * several, span, kept, one.text)
    console.print(table)
    console.print(looked_at(summary), highlight=False)
