"""`qtsplus find`: the moments of a library that matter most for a question."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..common.files import printable
from . import options
from .asking import chosen_names, is_library, place, window
from .console import console, fail, print_json
from .library import Like
from .models import Source, open_library


@options.command
def find(
    library: Annotated[str, typer.Argument(help="A library, which `qtsplus index` makes.", show_default=False)],
    question: options.Asked,
    *,
    source: Source,
    moments: Annotated[int, typer.Option(min=1, help="How many moments to name at most.")] = 10,
    name: Like = None,
    start: options.Start = None,
    end: options.End = None,
    as_json: options.AsJson = False,
) -> None:
    """Name the moments of a library that matter most for a question, best first, and write no answer."""
    if not is_library(library):
        fail(f"{library!r} is not a library; make one of a folder of videos with `qtsplus index`")
    opened = open_library(Path(library), source)
    names = chosen_names(opened, name)
    found = opened.find(question, moments, names=names, window=window(start, end))
    if as_json:
        rows = [moment.as_dict() for moment in found]
        print_json({"question": question, "moments": rows})
        return
    table = Table("video", "seconds", "place", "relevance", box=None, padding=(0, 2, 0, 0))
    for moment in found:
        seconds = f"{moment.start:.1f} to {moment.end:.1f}"
        table.add_row(printable(moment.name), seconds, place(moment.box), f"{moment.weight:.2g}")
    console.print(table)
