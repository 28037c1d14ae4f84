"""`qtsplus eval`: how well a model answers."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from ..asking.choice import Choice
from ..common.files import counted
from ..model.sampling_qtsplus import Sampling
from .console import console, fail, note, print_json
from .models import Source
from .options import AsJson, MediaRoot, command


@command
def evaluate(
    records: Annotated[
        Path, typer.Argument(help="A set of questions about videos, such as JSONL or Parquet.", show_default=False)
    ],
    *,
    source: Source,
    choice: Choice,
    sampling: Sampling,
    match: Annotated[
        Literal["answer", "exact", "likelihood", "judge"],
        typer.Option(
            help="What is right: a sentence that gives the answer; the answer to the letter; the most likely letter of "
            "the options, and else a sentence; what a judge takes for right."
        ),
    ] = "answer",
    judge: Annotated[str | None, typer.Option(help="The address of an OpenAI-compatible server.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's name there.")] = None,
    media_root: MediaRoot = None,
    as_json: AsJson = False,
) -> None:
    """
    Ask a model the questions of a file, and count the right answers.

    The questions of a video that cannot be read count as wrong, and the video is listed.
    """
    from ..data.formats import read_records
    from ..evaluation.evaluate import evaluate_records, tally
    from ..evaluation.matching import Matcher, gives_answer, is_exact, judge_at

    if choice.selection == "all" and choice != Choice(selection="all"):
        fail("--retention and --max-visual-tokens have no effect with --selection all, which keeps every token")
    if len({match == "judge", judge is not None, judge_model is not None}) > 1:
        fail("--match judge, --judge and --judge-model belong together")
    matcher: Matcher = is_exact if match == "exact" else gives_answer
    if judge and judge_model:
        matcher = judge_at(judge, judge_model)
    questions = [record for record in read_records(records, media_root) if record.video is not None]
    if not questions:
        fail(f"{records} holds no question about a video")
    asked = evaluate_records(
        *source.load(choice.selection),
        questions,
        choice=choice,
        sampling=sampling,
        matcher=matcher,
        by_likelihood=match == "likelihood",
    )
    summary = tally(asked)
    for video in summary["unreadable"]:
        note(f"{counted(video['questions'], 'question')} about {video['video']} counted as wrong: {video['reason']}")
    if all(outcome.unreadable for outcome in asked):
        fail(f"no question of {records} could be asked and judged", 1)
    if as_json:
        print_json(
            dict(
                summary,
                answers=[dict(answer.record.row(), said=answer.said, correct=answer.correct) for answer in asked],
            )
        )
        return
    table = Table("kind", "questions", "videos", "accuracy", "95% interval", "kept")
    for kind, row in [*summary["kinds"].items(), ("all", summary)]:
        table.add_row(
            kind,
            str(row["questions"]),
            str(row["videos"]),
            f"{row['accuracy']:.1%}",
            f"{row['low']:.1%} to {row['high']:.1%}",
            "" if row["kept"] is None else f"{row['kept']:.1%}",
        )
    console.print(table)
