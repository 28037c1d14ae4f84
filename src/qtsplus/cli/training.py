"""`qtsplus train` and `qtsplus calibrate`: training, and what decides it."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import console, note, resumable, wrote
from .options import Overrides, RecipeFile, command

if TYPE_CHECKING:
    from ..training.trainer import QTSplusTrainer


DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Only check the recipe, its folders and records, that videos exist, and say what it trains and takes.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last complete checkpoint; a finished stage is not run again.")
]


@command
def train(recipe: RecipeFile, dry_run: DryRun = False, resume: Resume = False, overrides: Overrides = None) -> None:
    """Train a model by a recipe, stage by stage. The result is a complete Hub folder."""
    from ..training.trainer import QTSplusTrainer

    train_by(QTSplusTrainer, recipe, dry_run, resume, overrides or ())


def train_by(kind: "type[QTSplusTrainer]", recipe: Path, dry_run: bool, resume: bool, overrides: Sequence[str]) -> None:
    """Trains with a `kind` of trainer, or counts what it would train, and says what came of it."""
    from ..training.plan import make_plan
    from ..training.recipe import load_stages
    from ..training.running import check_folders, read_sets, run_stages

    if dry_run:
        # Nothing is computed: a recipe in bfloat16 for a GPU can be counted on any machine.
        stages = load_stages(recipe, [*overrides, "training.use_cpu=true"], kind)
        for stage in check_folders(stages, resume):
            # What a later stage starts from need not be there yet; it has the shape of what the first starts from.
            start = replace(stage.model, weights=stages[0].model.weights)
            lines = "\n  ".join(make_plan(replace(stage, model=start)).lines)
            console.print(f"{stage.name}: {lines}", soft_wrap=True, highlight=False)
            videos = {record.video for record in chain(*read_sets(stage))}
            missing = [video for video in videos if video and "://" not in video and not os.path.exists(video)]
            if missing:
                note(f"{stage.name}: videos that are missing: {len(missing)}, such as {min(missing)}.")
        return
    if not sys.stderr.isatty():
        overrides = ["training.disable_tqdm=true", *overrides]  # no bars in a pipe
    # The metrics that a Trainer prints are no result.
    with resumable("interrupted; --resume goes on from the last complete checkpoint"), redirect_stdout(sys.stderr):
        folder = run_stages(load_stages(recipe, overrides, kind), resume)
    wrote(folder)


@command
def calibrate(
    model: Annotated[
        str,
        typer.Argument(help="A folder or Hub id: the model whose attention is to teach or select.", show_default=False),
    ],
    records: Annotated[
        Path,
        typer.Argument(help="JSONL of questions with evidence of their answers. A few dozen do.", show_default=False),
    ],
) -> None:
    """
    Find the heads whose attention finds what an answer rests on, for attention distillation and for
    selection="lm_attention". The latter are written into the configuration of a model's folder.
    """
    from ..evaluation import calibration
    from ..evaluation.labelled import labelled_questions
    from ..training.models import load_either

    questions = labelled_questions(records)
    calibration.halves(questions)  # raises before the model is loaded
    result = calibration.calibrate(*load_either(model), questions)
    best = result.best
    finds = result.choices[best]
    console.print(
        "Measured on {} questions, checked on {}. Of as many tokens with the most attention as show the answer,\nown "
        "is the share that does, other the share that shows only what other questions about the video ask for.\n"
        f"For distillation, the best heads: {finds}".format(*result.questions),
        soft_wrap=True,
    )
    if finds.lead > 0:
        console.print(
            f"by these lines of a recipe:\ntraining:\n  relevance_heads: {json.dumps(best.heads)}\n"
            f"  relevance_positions: {best.positions}",
            soft_wrap=True,
        )
    else:
        note(
            "No head finds the question's own evidence better than that of other questions. Do not train by attention: "
            "calibrate with more questions, each about a single thing, or with another model."
        )
    console.print(f"For selection=lm_attention, with right answers from {calibration.KEPT:.1%} of the tokens:")
    name = "present"
    verdict = "The present setting stays: no calibrated layer gave more right answers."
    for reading, finds in result.readings.items():
        fields = json.dumps(calibration.attention_fields(reading))
        console.print(f"  {name}: {result.right[reading]} right, {finds}: {fields}", soft_wrap=True)
        if name == "calibrated" and reading == result.best_reading:
            # By a sign test: with 5 changed answers, p is 0.06 even if all of them became right.
            verdict = "A calibrated layer gave more right answers. A lead of fewer than 6 questions may be chance."
        name = "calibrated"
    console.print(verdict, soft_wrap=True)
    configuration = calibration.write_attention(Path(model), result)
    if configuration is None:
        note("Nothing was written, since the model is not a folder of a QTSplus model.")
    else:
        wrote(configuration)
