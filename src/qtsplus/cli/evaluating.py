"""`qtsplus eval`: how well a model answers."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .console import console, fail, one_line_errors, require_fraction
from .models import check_model_options, check_selection, load_model
from .options import AsJson, Device, Model, Retention, Revision, Selection

eval_app = typer.Typer(help="Measure how well a model answers.", no_args_is_help=True)


@eval_app.command(name="records")
def evaluate_records(
    records: Annotated[Path, typer.Argument(help="A JSONL file of records with videos.", show_default=False)],
    model: Model = None,
    revision: Revision = None,
    retention: Retention = None,
    selection: Selection = None,
    skip_kind: Annotated[
        list[str] | None, typer.Option(help="Leave out the questions of this kind. May be repeated.")
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """
    Ask a model the questions of a file, and count the answers that match to the letter.

    A video that cannot be read does not end the run. Its questions count as wrong, and it is listed.
    """
    check_model_options(model, revision, device)
    require_fraction(retention)
    with one_line_errors():
        from ..evaluation.exact_match import exact_match, summarise
        from ..training.dataset import read_records, require_rates

        check_selection(selection)
        skipped = set(skip_kind or ())
        chosen = [record for record in read_records(records) if record.video is not None and record.kind not in skipped]
        if not chosen:
            fail(f"{records} holds no question about a video that is not left out")
        require_rates(chosen)
        loaded, processor = load_model(model, revision, device)
        outcomes = exact_match(
            loaded, processor, chosen, retention=retention, selection=selection, progress=not as_json
        )
        summary = summarise(outcomes)
    if as_json:
        print(json.dumps(summary))
    else:
        _print_summary(summary)


def _print_summary(summary: dict[str, Any]) -> None:
    table = Table("kind", "questions", "accuracy", "95% interval", "kept")
    for kind, row in [*summary["kinds"].items(), ("all", summary)]:
        interval = f"{row['low']:.1%} to {row['high']:.1%}"
        kept = "" if row["kept"] is None else f"{row['kept']:.1%}"
        table.add_row(kind, str(row["questions"]), f"{row['accuracy']:.1%}", interval, kept)
    console.print(table)
    for entry in summary["unreadable"]:
        questions = f"{entry['questions']} question{'s' if entry['questions'] > 1 else ''} counted as wrong"
        line = f"Unreadable, {questions}: {entry['video']}: {entry['reason']}"
        console.print(line, soft_wrap=True, markup=False, highlight=False)
