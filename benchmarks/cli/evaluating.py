"""`analysis`: what a budget follows. `evaluate` and `report`: benchmarks of lmms-eval."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from qtsplus.cli.console import console, fail, note, one_line_errors, wrote
from qtsplus.cli.models import Source
from qtsplus.cli.options import Retention, Selection, command

_Results = Annotated[Path, typer.Option(help="The folder of the results.")]
_RESULTS = Path("evaluation")


@command
def analysis(
    records: Annotated[
        Path, typer.Argument(help="A set of questions about videos, such as JSONL or Parquet.", show_default=False)
    ],
    *,
    source: Source,
    out: _Results = _RESULTS,
    work: Annotated[Path, typer.Option(help="Where the features of videos are kept.")] = Path("runs/analysis"),
) -> None:
    """Hold the model's own budget against what it is made from."""
    from qtsplus.data.formats import read_records

    from ..studies.analysis import run_analysis

    questions = read_records(records)
    wrote(run_analysis(*source.load(), questions, out, work=work))


@command
def evaluate(
    tasks: Annotated[
        str,
        typer.Option(
            help="Benchmarks of lmms-eval, with commas between them. paper stands for the paper's, and a .jsonl file "
            "for records as `qtsplus eval` takes them.",
            show_default=False,
        ),
    ],
    *,
    source: Source,
    retention: Retention = None,
    max_visual_tokens: Annotated[int | None, typer.Option(help="Keep at most this many visual tokens.")] = None,
    selection: Selection = None,
    reencode: Annotated[bool, typer.Option(help="Re-encode the kept tokens, or hand them on as they are.")] = True,
    fps: Annotated[float | None, typer.Option(help="How many frames to look at per second.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="How many frames to look at in a video, instead.")] = None,
    max_frames: Annotated[int | None, typer.Option(help="Look at this many frames of a video at most.")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="The most pixels of a frame.")] = None,
    limit: Annotated[int | None, typer.Option(help="Ask only the first questions of each benchmark.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="How many questions are asked at a time.", min=1)] = 1,
    processes: Annotated[
        int, typer.Option(help="How many processes share the questions. On GPUs each takes one.", min=1)
    ] = 1,
    out: Annotated[
        Path, typer.Option(help="The folder for answers, logs and results. A run that was stopped goes on there.")
    ] = Path("evaluation"),
) -> None:
    """
    Measure how well a model answers on benchmarks of lmms-eval.

    A video that cannot be read does not end the run. Its questions count as wrong, and the exit code is 1.
    """
    from benchmarks.harness.loading import Options

    from ..harness import run as harness

    options = Options(selection, retention, max_visual_tokens, reencode, fps, num_frames, max_frames, max_pixels)
    model, revision = source.name()
    settings = harness.Settings(model, tasks, vars(options), revision, source.dtype, limit)
    try:
        result = harness.run(settings, out, processes=processes, batch_size=batch_size, device=source.device, say=note)
    except harness.HarnessError as error:
        fail(error, 1)
    _print_tasks(result["tasks"])
    wrote(out / "run.json")
    if failed := harness.failures(result["tasks"]):
        fail("; ".join(failed), 1)


def _print_tasks(tasks: dict[str, Any]) -> None:
    from ..harness.run import scored

    table = Table("task", "metric", "questions", "videos", "value", "kept")
    for name, task in tasks.items():
        samples = task["samples"]
        total = sum(sample["visual_tokens"] for sample in samples)
        kept = f"{sum(sample['kept_visual_tokens'] for sample in samples) / total:.1%}" if total else ""
        for metric, value in task["metrics"].items():
            answered = scored(task, metric)
            videos = {sample["video"] for sample in answered}
            counts = (str(len(answered)), str(len(videos))) if answered else ("", "")
            table.add_row(name, metric, *counts, f"{value:.2f}", kept)
    console.print(table)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders that the command evaluate has finished.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The Markdown file.")] = Path("report.md"),
) -> None:
    """Put runs side by side: accuracies, gains at equal tokens, kept tokens, settings."""
    with one_line_errors():
        from ..harness.report import read_runs, write_report

        wrote(write_report(read_runs(runs), out))
