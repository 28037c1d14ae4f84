"""`qtsplus summarise`: a video, or each video of a library, by chapters."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..asking.choice import Choice
from ..common.files import printable
from ..video.sampling import Sampling
from . import options
from .asking import Talk, check_videos, chosen_names, is_library, looked_at, refuse
from .console import console, note, notes, one_line_errors
from .library import Like
from .models import Source, split_revision

if TYPE_CHECKING:
    from ..asking.summaries import Summary


@options.grouped
def summarise(
    video: Annotated[str, typer.Argument(help="A video file, its http(s) address, a folder of frames, or a library.")],
    prompt: Annotated[str | None, typer.Argument(help="What to say of each chapter.", show_default=False)] = None,
    *,
    model: options.Model = None,
    choice: Choice,
    sampling: Sampling,
    max_new_tokens: options.MaxNewTokens = None,
    name: Like = None,
    device: options.Device = None,
    dtype: options.WeightType = options.Dtype.auto,
    as_json: options.AsJson = False,
) -> None:
    """Summarise a video, or each video of a library, by chapters."""
    model, revision = split_revision(model)
    if not is_library(video):
        refuse({"name": name}, "is about a library, which `qtsplus index` makes; leave it out")
    check_videos([video], sampling)
    with one_line_errors():
        from ..asking.question import check_text
        from ..asking.summaries import summarise as summarise_videos
        from ..model.addresses_qtsplus import shown_name
        from ..model.methods_qtsplus import add_method

        if prompt is not None:
            check_text("prompt", prompt)
        add_method(choice.selection)
        talk = Talk(video, Source(model, revision, device, dtype.value), sampling)
        telling: dict[str, Any] = dict(vars(choice), prompt=prompt, max_new_tokens=max_new_tokens)
        if talk.is_library:
            telling["names"] = chosen_names(talk.about, name)
        else:
            talk.add(video, printable(shown_name(video)))
        stated = {option: value for option, value in telling.items() if value is not None}
        summary = summarise_videos(talk.about, progress=notes.is_terminal, **stated)
        for warning in summary.warnings:
            if warning not in talk.warnings:
                note(warning)
        print_summary(summary, as_json)


def print_summary(summary: "Summary", as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(summary)))
        return
    console.print(summary.text or "(an empty answer)", style="bold", highlight=False)
    has_several = len({chapter.video for chapter in summary.chapters}) > 1
    table = Table(box=None, padding=(0, 2, 0, 0))
    if has_several:
        table.add_column("video")
    for heading in ("seconds", "kept", "chapter"):
        table.add_column(heading)
    for chapter in summary.chapters:
        span = f"{chapter.start:.1f} to {chapter.end:.1f}"
        kept = f"{chapter.kept_tokens} of {chapter.visual_tokens}"
        row = [span, kept, chapter.text]
        if has_several:
            row.insert(0, printable(chapter.video))
        table.add_row(*row)
    console.print(table)
    console.print(looked_at(summary), highlight=False)
