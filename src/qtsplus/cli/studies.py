"""`qtsplus eval needle` and `analysis`: what a selection finds, and what it does."""

from pathlib import Path
from typing import Annotated

import typer

from .console import fail, one_line_errors, require_fraction, wrote
from .models import check_model_options, load_model
from .options import Device, Model, Retention, Revision

_Results = Annotated[Path, typer.Option(help="The folder of the results.")]
_RESULTS = Path("evaluation")


def needle(
    needles: Annotated[
        Path,
        typer.Option(
            help="A JSONL file of records, each with a clip or an image as its video, a question and its answer.",
            show_default=False,
        ),
    ],
    background: Annotated[
        str,
        typer.Option(
            help="The long video that they are put into: a file, an http(s) address or a folder of frames.",
            show_default=False,
        ),
    ],
    model: Model = None,
    revision: Revision = None,
    length: Annotated[
        list[float] | None,
        typer.Option(help="A length in seconds. May be repeated. Without it, 60, 300, 600, 1800 and 3600."),
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(help="Where a needle is put, from 0 to 1. May be repeated. Without it, 0, 0.25, 0.5, 0.75 and 1."),
    ] = None,
    selection: Annotated[
        list[str] | None, typer.Option(help="How tokens are chosen. May be repeated. Without it, every way but all.")
    ] = None,
    retention: Retention = None,
    max_visual_tokens: Annotated[int | None, typer.Option(help="Keep this many visual tokens instead.", min=1)] = None,
    fps: Annotated[
        float | None, typer.Option(help="How many frames to look at per second; of a folder, how many it has.")
    ] = None,
    out: _Results = _RESULTS,
    device: Device = None,
) -> None:
    """Hide clips at chosen depths in long videos, ask for them, and draw what is found by length and depth."""
    check_model_options(model, revision)
    require_fraction(retention)
    if retention is not None and max_visual_tokens is not None:
        fail("--retention and --max-visual-tokens exclude each other")
    if selection == ["all"] and (retention is not None or max_visual_tokens is not None):
        fail("--retention and --max-visual-tokens have no effect with --selection all, which keeps every token")
    with one_line_errors():
        from ..evaluation.labelled import read_questions
        from ..evaluation.needle import SELECTIONS, check_places, run_needle

        lengths, depths = length or (60, 300, 600, 1800, 3600), depth or (0.0, 0.25, 0.5, 0.75, 1.0)
        selections = selection or SELECTIONS
        check_places(lengths, depths, selections)
        hidden = read_questions(needles)
        target = run_needle(
            *load_model(model, revision, device),
            hidden,
            background,
            out,
            lengths=lengths,
            depths=depths,
            selections=selections,
            retention=retention,
            max_visual_tokens=max_visual_tokens,
            fps=fps,
        )
    wrote(target)


def analysis(
    records: Annotated[
        Path, typer.Argument(help="A set of questions about videos, such as JSONL or Parquet.", show_default=False)
    ],
    model: Model = None,
    revision: Revision = None,
    out: _Results = _RESULTS,
    work: Annotated[Path, typer.Option(help="Where the features of videos are kept.")] = Path("runs/analysis"),
    device: Device = None,
) -> None:
    """Hold the model's own budget against what it is made from."""
    check_model_options(model, revision)
    with one_line_errors():
        from ..data.formats import read_records
        from ..evaluation.analysis import run_analysis

        questions = read_records(records)
        target = run_analysis(*load_model(model, revision, device), questions, out, work=work)
    wrote(target)
