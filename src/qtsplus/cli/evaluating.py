"""`qtsplus eval`: how well a model answers."""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from .console import console, fail, note, one_line_errors, require_fraction, wrote
from .models import check_model_options, check_selection, load_model, name_model
from .options import AsJson, Device, Dtype, MediaRoot, Model, Retention, Revision, Selection, WeightType

eval_app = typer.Typer(no_args_is_help=True)


@eval_app.callback(invoke_without_command=True)
def evaluate_tasks(
    context: typer.Context,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Benchmarks of lmms-eval, with commas between them. paper stands for the paper's, and a .jsonl file "
            "for records as `records` takes them."
        ),
    ] = None,
    model: Model = None,
    revision: Revision = None,
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
    device: Device = None,
    dtype: WeightType = Dtype.auto,
) -> None:
    """
    Measure how well a model answers: on benchmarks through lmms-eval, or with one of the commands below.

    A video that cannot be read does not end the run. Its questions count as wrong, and the exit code is 1.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    if tasks is None:
        fail("no benchmark is named; give --tasks, such as --tasks videomme, or one of the commands of `qtsplus eval`")
    check_model_options(model, revision)
    with one_line_errors():
        from ..evaluation.harness import run as harness
        from ..evaluation.harness.loading import Options

        options = Options(selection, retention, max_visual_tokens, reencode, fps, num_frames, max_frames, max_pixels)
        settings = harness.Settings(name_model(model), tasks, vars(options), revision, dtype.value, limit)
        try:
            result = harness.run(settings, out, processes=processes, batch_size=batch_size, device=device, say=note)
        except harness.HarnessError as error:
            fail_run(str(error))
    _print_tasks(result["tasks"])
    wrote(out / "run.json")
    if failed := harness.failures(result["tasks"]):
        fail_run(*failed)


def _refuse_options(context: typer.Context) -> None:
    """Options before a command would be ignored."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        option, command = given[0].replace("_", "-"), context.invoked_subcommand
        fail(
            f"--{option} stands before the command {command}; put it behind, as in `qtsplus eval {command} --{option}`"
        )


def fail_run(*lines: str) -> NoReturn:
    """Ends the command for a run that failed, whatever was typed."""
    for line in lines:
        typer.echo(f"qtsplus: {' '.join(line.split())}", err=True)
    raise typer.Exit(1)


def _print_tasks(tasks: dict[str, Any]) -> None:
    from ..evaluation.harness.run import scored

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


@eval_app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders that `qtsplus eval --tasks` has finished.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The Markdown file.")] = Path("report.md"),
) -> None:
    """Put runs side by side: accuracies, gains at equal tokens, kept tokens, settings."""
    with one_line_errors():
        from ..evaluation.harness.report import read_runs, write_report

        wrote(write_report(read_runs(runs), out))


@eval_app.command(name="records")
def evaluate_records(
    records: Annotated[
        Path, typer.Argument(help="A set of questions about videos, such as JSONL or Parquet.", show_default=False)
    ],
    model: Model = None,
    revision: Revision = None,
    retention: Retention = None,
    selection: Selection = None,
    media_root: MediaRoot = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """
    Ask a model the questions of a file, and count the answers that match to the letter.

    A video that cannot be read does not end the run. Its questions count as wrong, and it is listed.
    """
    check_model_options(model, revision)
    require_fraction(retention)
    if selection == "all" and retention is not None:
        fail("--retention has no effect with --selection all, which keeps every token")
    with one_line_errors():
        from ..data.formats import read_records
        from ..evaluation.exact_match import exact_match, summarise
        from ..training.dataset import require_rates

        check_selection(selection)
        questions = [record for record in read_records(records, media_root) if record.video is not None]
        if not questions:
            fail(f"{records} holds no question about a video")
        require_rates(questions)
        loaded = load_model(model, revision, device)
        summary = summarise(
            exact_match(*loaded, questions, retention=retention, selection=selection, progress=not as_json)
        )
    unreadable = [
        f"{entry['questions']} question{'s' if entry['questions'] > 1 else ''} counted as wrong, since the video "
        f"{entry['video']} cannot be read: {entry['reason']}"
        for entry in summary["unreadable"]
    ]
    if summary["kept"] is None:
        fail_run(*unreadable, f"no video of {records} can be read, so nothing was asked")
    if as_json:
        print(json.dumps(summary))
    else:
        _print_summary(summary)
    for line in unreadable:
        note(line)


def _print_summary(summary: dict[str, Any]) -> None:
    table = Table("kind", "questions", "videos", "accuracy", "95% interval", "kept")
    for kind, row in [*summary["kinds"].items(), ("all", summary)]:
        interval = "" if row["low"] is None else f"{row['low']:.1%} to {row['high']:.1%}"
        kept = "" if row["kept"] is None else f"{row['kept']:.1%}"
        table.add_row(kind, str(row["questions"]), str(row["videos"]), f"{row['accuracy']:.1%}", interval, kept)
    console.print(table)
