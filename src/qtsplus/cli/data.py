"""`qtsplus data`: makes sets of questions about videos, checks them, and tells what they hold."""

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .console import console, fail, one_line_errors, require_text, wrote
from .options import AsJson, Overwrite

if TYPE_CHECKING:
    from ..data.check import Checked

data_app = typer.Typer(help="Make, check and describe training data.", no_args_is_help=True)


def filled_path(text: str) -> Path:
    """A path as it was typed; an empty one, such as a script's unset variable, is not the current folder."""
    if not text.strip():
        fail("the path is empty; name a file or folder (. is this folder)")
    return Path(text)


SetFile = Annotated[
    Path,
    typer.Argument(
        help="A set: JSONL, JSON or Parquet, or a folder of videos with their captions beside them.",
        show_default=False,
        parser=filled_path,
        metavar="SET",
    ),
]
MediaRoot = Annotated[
    Path | None,
    typer.Option(
        help="The folder in which videos are looked for. Without it, the folder of the set.",
        parser=filled_path,
        metavar="DIR",
    ),
]


@data_app.command()
def check(
    path: SetFile,
    media_root: MediaRoot = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Another set, such as the test set, that must not share a video with this one.",
            parser=filled_path,
            metavar="SET",
        ),
    ] = None,
    media: Annotated[
        bool, typer.Option("--media/--no-media", help="Look for every video, and decode a frame of it.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """
    Check a set, and list every bad row.

    Looks for rows that are no records, videos that are missing or broken, doubles, questions that give their answer
    away, special tokens, letters that are right too often, and videos of another set. Ends with 1 where anything is
    wrong, and with 2 where nothing could be checked.
    """
    if media_root is not None and not media:
        fail("--media-root has no effect with --no-media; leave one of them out")
    # Nothing is written that could be left half done: Ctrl-C ends the process, whatever its threads do.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with one_line_errors():
            from ..data.check import check_set

            found = check_set(path, media_root, against, media)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        _print_check(found)
    if not found.good:
        raise typer.Exit(1)


def _print_check(found: "Checked") -> None:
    for bad in found.bad:
        name = "" if bad.id is None else f" ({bad.id})"
        print(f"Row {bad.row}{name}, {bad.check}: {' '.join(bad.reason.split())}")
    if found.unbalanced:
        print(f"The set: {found.unbalanced}")
    bad_rows = len({bad.row for bad in found.bad})
    rows = f"{found.rows} row{'' if found.rows == 1 else 's'}, {bad_rows or 'none'} of them bad"
    print(f"{rows}; {found.videos} video{'' if found.videos == 1 else 's'} looked at.")


@data_app.command()
def stats(
    path: Annotated[Path, typer.Argument(help="A set, or a folder with the files of one.", show_default=False)],
    card: Annotated[
        bool, typer.Option("--card", help="Write README.md and statistics.png into the folder, for the Hub.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="For the card: what the set is called.")] = None,
    license: Annotated[str | None, typer.Option(help="For the card: the licence, such as cc-by-4.0.")] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="For the card: a dataset that it was made of. May be repeated.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a card that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count what a set holds: kinds, types, difficulty, right answers and lengths."""
    require_text(name=name, license=license)
    if not card and (name or license or source or overwrite):
        fail("--name, --license, --source and --overwrite are about the card: give --card too")
    if card and not os.path.isdir(path):
        fail(f"{path} is not a folder; a card stands in the folder of a set's files")
    with one_line_errors():
        from ..data.statistics import count_set
        from ..hub import dataset_folder

        if card:
            written, found = dataset_folder.write_card(path, name, license, sources=source or (), overwrite=overwrite)
        else:
            found = count_set(dataset_folder.set_files(path) if os.path.isdir(path) else [path])
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    _print_statistics(found.as_dict())
    if card:
        wrote(written)


def _print_statistics(told: dict[str, Any]) -> None:
    for title, counts in (
        ("file", told["files"]),
        ("records", told["kinds"]),
        ("type", told["types"]),
        ("difficulty", told["difficulties"]),
        ("right answer", told["letters"]),
    ):
        if counts:
            table = Table(title, "number", "share")
            total = sum(counts.values())
            for key, count in counts.items():
                table.add_row(key, f"{count:,}", f"{count / total:.1%}")
            console.print(table)
    table = Table("text", "number", "mean words", "median", "95th percentile", "most")
    for text, row in told["words"].items():
        cells = (row["median"], row["p95"], row["most"])
        table.add_row(text, f"{row['texts']:,}", f"{row['mean']:.1f}", *map(str, cells))
    console.print(table)
    choices = sum(told["letters"].values())
    if choices:
        share = told["longest_is_right"] / choices
        console.print(f"The right option is the longest in {share:.1%} of the items; by chance in 25%.")
    console.print(f"{told['records']:,} records about {told['videos']:,} videos.", highlight=False)


@data_app.command()
def convert(
    path: SetFile,
    out: Annotated[
        Path,
        typer.Argument(
            help="A name that ends in .jsonl, .json or .parquet, or a folder for captions.", show_default=False
        ),
    ],
    layout: Annotated[
        str, typer.Option(help="The rows: qtsplus, reference (that of the paper's code) or llava (LLaVA-Video).")
    ] = "qtsplus",
    overwrite: Overwrite = False,
) -> None:
    """Write a set in another format."""
    if os.path.isfile(out) and not overwrite:
        fail(f"{out} is there already; give --overwrite to replace it")
    with one_line_errors():
        from ..data.formats import iter_records, write_records

        count = write_records(out, iter_records(path), layout)
    wrote(f"{out} ({count} records)")
