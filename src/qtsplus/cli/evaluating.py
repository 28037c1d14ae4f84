"""`qtsplus eval`: how well a model answers."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from ..common.files import counted
from .console import complain, console, fail, note, print_json
from .models import Source
from .options import AsJson, MediaRoot, Retention, Selection, command


@command
def evaluate(
    records: Annotated[
        Path, typer.Argument(help="A set of questions about videos, such as JSONL or Parquet.", show_default=False)
    ],
    *,
    source: Source,
    retention: Retention = None,
    selection: Selection = None,
    media_root: MediaRoot = None,
    as_json: AsJson = False,
) -> None:
    """
    Ask a model the questions of a file, and count the answers that match to the letter.

    The questions of a video that cannot be read count as wrong, and the video is listed.
    """
    from ..data.formats import read_records
    from ..evaluation.exact_match import exact_match, tally
    from ..training.dataset import require_rates

    if selection == "all" and retention is not None:
        fail("--retention has no effect with --selection all, which keeps every token")
    questions = [record for record in read_records(records, media_root) if record.video is not None]
    if not questions:
        fail(f"{records} holds no question about a video")
    require_rates(questions)
    asked = exact_match(*source.load(selection), questions, retention=retention, selection=selection)
    summary = tally(asked)
    for video in summary["unreadable"]:
        wrong = counted(video["questions"], "question")
        note(f"{wrong} counted as wrong, since the video {video['video']} cannot be read: {video['reason']}")
    if summary["kept"] is None:
        fail_run(f"no video of {records} can be read, so nothing was asked")
    if as_json:
        answers = [dict(answer.record.row(), said=answer.said, correct=answer.correct) for answer in asked]
        print_json(dict(summary, answers=answers))
    else:
        _print_summary(summary)


def fail_run(*lines: str) -> NoReturn:
    """Ends the command for a run that failed, whatever was typed."""
    for line in lines:
        complain(line)
    raise typer.Exit(1)


def _print_summary(summary: dict[str, Any]) -> None:
    table = Table("kind", "questions", "videos", "accuracy", "95% interval", "kept")
    for kind, row in (summary["kinds"] | {"all": summary}).items():
        table.add_row(
            kind,
            str(row["questions"]),
            str(row["videos"]),
            f"{row['accuracy']:.1%}",
            f"{row['low']:.1%} to {row['high']:.1%}",
            "" if row["kept"] is None else f"{row['kept']:.1%}",
        )
    console.print(table)
