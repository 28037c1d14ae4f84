"""`qtsplus data`: makes sets of questions about videos, checks them, and tells what they hold."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .console import console, fail, one_line_errors, require_text, wrote
from .options import AsJson, MediaRoot, Overwrite

if TYPE_CHECKING:
    from ..data.check import Checked

data_app = typer.Typer(help="Make, check and describe training data.", no_args_is_help=True)

SetFile = Annotated[
    Path,
    typer.Argument(
        help="A set: JSONL, JSON or Parquet, or a folder of videos with their captions beside them.",
        show_default=False,
    ),
]


@data_app.command()
def check(
    path: SetFile,
    media_root: MediaRoot = None,
    against: Annotated[
        Path | None, typer.Option(help="Another set, such as the test set, that must not share a video with this one.")
    ] = None,
    media: Annotated[
        bool, typer.Option("--media/--no-media", help="Look for every video, and decode a frame of it.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """
    Check a set, and list every bad row.

    Looks for rows that are no records, videos that are missing or broken, doubles, questions that give their answer
    away, letters that are right too often, and videos of another set. Ends with 1 where anything is wrong.
    """
    with one_line_errors():
        from ..data.check import check_set

        found = check_set(path, media_root, against, media)
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
        from ..hub import dataset

        if card:
            written, found = dataset.write_card(path, name, license, sources=source or (), overwrite=overwrite)
        else:
            found = count_set(dataset.set_files(path) if os.path.isdir(path) else [path])
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


@data_app.command()
def tinyworld(
    out: Annotated[
        Path, typer.Option(help="The folder for the videos and for SPLIT.jsonl, their records.", show_default=False)
    ],
    size: Annotated[int, typer.Option(help="How many videos to render.", min=1, show_default=False)],
    split: Annotated[str, typer.Option(help="train, validation or test. No two share a video.")] = "train",
    seconds: Annotated[
        list[int] | None,
        typer.Option(
            help="A length to draw from, 2 to 128 seconds, or 1 to 128 with --crowd. May be repeated. "
            "Without it, 8 and 16."
        ),
    ] = None,
    crowd: Annotated[
        bool, typer.Option("--crowd", help="Many marked shapes at a time over a texture, which fill half the tokens.")
    ] = False,
    max_objects: Annotated[
        int | None,
        typer.Option(help="The most objects in one video, or at a time with --crowd. Without it, 12, or 21.", min=1),
    ] = None,
    multiple_choice: Annotated[
        float, typer.Option(help="The share of questions that come with options.", min=0, max=1)
    ] = 0.5,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="Write one record per video, with its questions as turns.")
    ] = False,
    frame_size: Annotated[
        int, typer.Option(help="Pixels a side: 168, 84, 56 or 28. The same videos and questions, smaller.")
    ] = 168,
    ask: Annotated[
        list[str] | None,
        typer.Option(
            help="With --crowd, how many questions of a kind to ask, such as direction=4. May be repeated; those of "
            "other kinds stay as many."
        ),
    ] = None,
    teacher_videos: Annotated[
        Path | None,
        typer.Option(
            help="A folder with the same videos and larger frames, for attention distillation: the records name them "
            "as what their teacher reads.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="How many processes render.", min=1)] = 1,
) -> None:
    """Render TinyWorld: videos of moving shapes, with questions, answers and captions for `qtsplus train`."""
    with one_line_errors():
        from ..data.tinyworld import build_dataset

        given = seconds or (8, 16), max_objects, multiple_choice, conversations, workers
        counts = dict(map(_kind_and_count, ask or ()))
        more: dict[str, Any] = {"frame_size": frame_size, "ask": counts, "teacher_videos": teacher_videos}
        records = build_dataset(out, split, size, *given, crowd=crowd, **more)
    wrote(records)


def _kind_and_count(text: str) -> tuple[str, int]:
    kind, _, count = text.partition("=")
    if not count.isdecimal():
        raise ValueError(f"{text!r}: expected a kind and how many questions of it, such as direction=4.")
    return kind, int(count)
