"""`qtsplus index`: a folder of videos that is encoded once, and searched by every question."""

from pathlib import Path
from typing import Annotated

import typer

from ..common.files import counted, printable
from ..hub.files import TINY
from ..model.sampling_qtsplus import Sampling
from .console import fail, note, resumable, wrote
from .models import Source
from .options import command

Like = Annotated[
    str | None, typer.Option(help="Only videos whose path in the library matches this pattern, such as 'door/*'.")
]


@command
def index(
    folder: Annotated[Path, typer.Argument(help="The folder of the videos, with those in it.")],
    out: Annotated[Path, typer.Option(help="The library. What is in it already is not encoded again.")],
    *,
    source: Source,
    sampling: Sampling,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove videos whose files are gone or broken, which is an error otherwise.")
    ] = False,
) -> None:
    """
    Encode the videos of a folder, but for hidden ones, into a library, for `ask` and `chat`.

    It can be stopped and goes on with what is missing. Run it again when the folder has changed: a file that was moved
    is known again by its content, and one that was removed leaves the library with --prune. A video keeps its features
    until its new file is encoded.
    """
    from ..library import indexing

    with resumable():
        indexing.find_videos(folder, out)  # raises for a folder without videos before the model is loaded
        loaded, processor = source.load()
        made_index = indexing.index(
            folder,
            out,
            loaded,
            processor,
            name=source.model or TINY,
            prune=prune,
            say=note,
            **vars(sampling),
        )
    for video, entry in made_index.entries.items():
        if entry["error"] is not None:
            note(f"Left out {printable(video)}: {entry['error']}")
    if made_index.entries and not made_index.files:
        fail(f"no video of {folder} could be encoded", 1)
    wrote(f"{out}, a library of {counted(len(made_index.files), 'video')}")
