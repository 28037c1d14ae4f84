"""`qtsplus batch`: the questions of a file."""

from pathlib import Path
from typing import Annotated

import typer

from ..asking.choice import Choice
from . import options
from .console import fail, note, resumable, wrote
from .models import Source


@options.command
def batch(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL, CSV or Parquet with video, question; also id, fps, start, end, retention, max_visual_tokens."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The JSONL file of the answers. A run that was stopped goes on.")],
    *,
    source: Source,
    choice: Choice,
    fps: options.Fps = None,
    max_new_tokens: options.MaxNewTokens = None,
    media_root: options.MediaRoot = None,
) -> None:
    """
    Answer the questions of a file. A video that cannot be read is an error in its rows, and the run goes on.

    Each row is answered once, however often the run is stopped and started again. A video is encoded once for all of
    its questions.
    """
    from ..asking.batch import Asker, read_questions, run_batch
    from ..common.files import listed
    from ..model.methods_qtsplus import add_method

    with resumable():
        add_method(choice.selection)
        questions = read_questions(file, media_root)
        if questions.unused:
            note(f"Not used of {file}: {listed(questions.unused)}")
        model, revision = source.name()
        asker = Asker(model, revision, source.device, source.dtype, fps, choice, max_new_tokens, str(file.resolve()))
        counts = run_batch(questions, out, asker)
    wrote(out)
    if counts["error"]:
        note(f"Rows with an error in {out}: {counts['error']} of {counts.total()}; the same command asks them again.")
    if not counts["answer"]:
        fail(f"no question of {file} was answered", 1)
