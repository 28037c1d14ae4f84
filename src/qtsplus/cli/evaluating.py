"""`qtsplus eval`: how well a model answers."""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from ..common.files import counted
from .console import complain, console, fail, note, one_line_errors
from .models import Source, split_revision
from .options import AsJson, Device, MediaRoot, Model, Retention, Selection


def evaluate(
    records: Annotated[
        Path, typer.Argument(help="A set of questions about videos, such as JSONL or Parquet.", show_default=False)
    ],
    model: Model = None,
    retention: Retention = None,
    selection: Selection = None,
    media_root: MediaRoot = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """
    Ask a model the questions of a file, and count the answers that match to the letter.

    Of summaries, whose records are of the kind "events", it says how many events they tell, in which order, and how
    many sentences tell none. The questions of a video that cannot be read count as wrong, and the video is listed.
    """
    model, revision = split_revision(model)
    if selection == "all" and retention is not None:
        fail("--retention has no effect with --selection all, which keeps every token")
    with one_line_errors():
        from ..data.formats import read_records
        from ..evaluation.exact_match import exact_match, tally
        from ..model.methods_qtsplus import add_method
        from ..training.dataset import require_rates

        add_method(selection)
        questions = [record for record in read_records(records, media_root) if record.video is not None]
        if not questions:
            fail(f"{records} holds no question about a video")
        require_rates(questions)
        loaded = Source(model, revision, device).load()
        asked = exact_match(*loaded, questions, retention=retention, selection=selection, progress=not as_json)
    summary = tally(asked)
    unreadable = [
        f"{counted(one['questions'], 'question')} counted as wrong, since the video {one['video']} cannot be read: "
        f"{one['reason']}"
        for one in summary["unreadable"]
    ]
    if summary["kept"] is None:
        fail_run(*unreadable, f"no video of {records} can be read, so nothing was asked")
    answers = [{**one.record.row(), "said": one.said, "correct": one.correct} for one in asked]
    print(json.dumps({**summary, "answers": answers})) if as_json else _print_summary(summary)
    for line in unreadable:
        note(line)


def fail_run(*lines: str) -> NoReturn:
    """Ends the command for a run that failed, whatever was typed."""
    for line in lines:
        complain(line)
    raise typer.Exit(1)


def _print_summary(summary: dict[str, Any]) -> None:
    table = Table("kind", "questions", "videos", "accuracy", "95% interval", "kept")
    for kind, row in [*summary["kinds"].items(), ("all", summary)]:
        interval = f"{row['low']:.1%} to {row['high']:.1%}"
        kept = "" if row["kept"] is None else f"{row['kept']:.1%}"
        table.add_row(kind, str(row["questions"]), str(row["videos"]), f"{row['accuracy']:.1%}", interval, kept)
    console.print(table)
    if scores := summary["kinds"].get("events"):
        said = {key: "none" if scores[key] is None else f"{scores[key]:.1%}" for key in ("recall", "order", "invented")}
        console.print(", ".join(f"{key} {value}" for key, value in said.items()), highlight=False)
