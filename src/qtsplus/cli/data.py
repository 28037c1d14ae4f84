"""`qtsplus data`: checks sets of questions about videos."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from ..common.files import counted, printable
from .options import MediaRoot, command

data_app = typer.Typer(help="Check training data.", no_args_is_help=True)


@data_app.command()
@command
def check(
    path: Annotated[Path, typer.Argument(help="JSONL, JSON or Parquet.", metavar="SET")],
    media_root: MediaRoot = None,
) -> None:
    """
    Check a set, and list every bad row.

    Looks for rows that are no records, for videos that are missing or broken, and for evidence outside of them. Ends
    with 1 where anything is wrong, and with 2 where nothing could be checked.
    """
    # Nothing is written that could be left half done: Ctrl-C ends the process, whatever its threads do.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from ..data.check import check_set

        checked = check_set(path, media_root)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    for bad in checked.bad:
        name = "" if bad.id is None else f" ({bad.id})"
        print(f"Row {bad.row}{name}: {printable(bad.reason)}")
    bad_rows = len({bad.row for bad in checked.bad})
    rows = counted(checked.rows, "row")
    videos = counted(checked.videos, "video")
    print(f"{rows}, {bad_rows or 'none'} of them bad; {videos} looked at.", flush=True)
    if checked.bad:
        raise typer.Exit(1)
