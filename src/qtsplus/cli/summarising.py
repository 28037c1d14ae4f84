"""`qtsplus summarise`: a video, or each video of a library, by chapters."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from ..asking.choice import Choice
from ..common.files import printable
from ..model.sampling_qtsplus import Sampling
from . import options
from .asking import Talk, Video, check_videos, chosen_names, looked_at
from .console import console, print_json
from .library import Like
from .models import Source


@options.command
def summarise(
    video: Video,
    prompt: Annotated[str, typer.Argument(help="What to say of each chapter.")] = "Summarise the video.",
    *,
    source: Source,
    choice: Choice,
    sampling: Sampling,
    chapter_seconds: Annotated[
        float | None, typer.Option(help="The longest chapter.", show_default="60, or less as in training")
    ] = None,
    max_new_tokens: options.MaxNewTokens = None,
    name: Like = None,
    as_json: options.AsJson = False,
) -> None:
    """Summarise a video, or each video of a library, by chapters."""
    from ..asking.summaries import summarise as summarise_videos

    check_videos([video], vars(sampling), {"name": name})
    talk = Talk(video, source, choice.selection)
    names = None
    if talk.is_library:
        names = chosen_names(talk.about, name)
    else:
        talk.add(video, sampling)
    summary = summarise_videos(
        talk.about,
        prompt,
        names=names,
        chapter_seconds=chapter_seconds,
        max_new_tokens=max_new_tokens,
        **dict(vars(choice), selection=choice.selection or "coverage"),
    )
    talk.note_new(summary)
    if as_json:
        print_json(asdict(summary))
        return
    if summary.overview is not None:
        console.print(summary.overview, style="bold", highlight=False)
    table = Table("video", "seconds", "kept", "chapter", box=None, padding=(0, 2, 0, 0))
    for chapter in summary.chapters:
        span = f"{chapter.start:.1f} to {chapter.end:.1f}"
        kept = f"{chapter.kept_tokens} of {chapter.visual_tokens}"
        table.add_row(printable(chapter.video), span, kept, chapter.text)
    console.print(table)
    console.print(looked_at(summary), highlight=False)
