"""`qtsplus index`: a folder of videos that is encoded once, and searched by every question."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.files import NAMED, counted, printable
from .console import fail, note, one_line_errors, read_pairs, resumable, wrote
from .evaluating import fail_run
from .models import load_named, split_revision
from .options import Device, End, Fps, MaxFrames, MaxPixels, Model, Start

Label = Annotated[
    list[str] | None,
    typer.Option(help="Of the videos: a key of yours and its value, such as camera=front. May be repeated."),
]

Like = Annotated[
    str | None, typer.Option(help="Only videos of a library whose path in it is like this, such as 'door/*'.")
]


def index(
    folder: Annotated[Path, typer.Argument(help="The folder of the videos, with those in it.")],
    out: Annotated[Path, typer.Option(help="The library. What is in it already is not encoded again.")],
    model: Model = None,
    fps: Fps = None,
    start: Start = None,
    end: End = None,
    max_frames: MaxFrames = None,
    max_pixels: MaxPixels = None,
    prune: Annotated[bool, typer.Option("--prune", help="Let go of videos that are gone, also of most.")] = False,
    label: Label = None,
    name: Annotated[
        str | None, typer.Option(help="--label is about the videos whose path is like this, and not the new ones.")
    ] = None,
    device: Device = None,
) -> None:
    """
    Encode the videos of a folder, but for hidden ones, into a library, for `ask` and `chat`.

    It can be stopped and goes on with what is missing. Run it again when the folder has changed: a file that was moved
    is known again by its content, one that was removed leaves the library.
    """
    model, revision = split_revision(model)
    if name is not None and not label:
        fail("--name is about --label: give one, such as camera=front")
    with one_line_errors(), resumable():
        from ..library import indexing

        loaded, processor = load_named(model, revision, device)
        options: dict[str, Any] = {"name": model, "revision": revision, "fps": fps, "start": start, "end": end}
        options |= {"max_frames": max_frames, "max_pixels": max_pixels, "prune": prune, "say": note}
        options |= {"labels": read_pairs("--label", label), "pattern": name}
        made_index = indexing.index(folder, out, loaded, processor, **options)
    bad = {name: entry["error"] for name, entry in made_index.entries.items() if entry["error"] is not None}
    for name in [*bad][:NAMED]:
        note(f"Left out {printable(name)}: {bad[name]}")
    if len(bad) > NAMED:
        note(f"Left out {len(bad) - NAMED:,} more.")
    if not made_index.files:
        fail_run(f"no video of {folder} could be encoded")
    wrote(f"{out}, a library of {counted(len(made_index.files), 'video')}")
