"""`qtsplus batch`: the questions of a file."""

from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .console import fail, note, one_line_errors, resumable, wrote
from .evaluating import fail_run
from .models import name_model, split_revision


class Engine(str, Enum):
    here = "here"
    vllm = "vllm"


def batch(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL, CSV or Parquet with video and question; beside them id, fps, retention, max_visual_tokens."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The JSONL file of the answers. A run that was stopped goes on.")],
    model: options.Model = None,
    retention: options.Retention = None,
    max_visual_tokens: options.MaxVisualTokens = None,
    selection: options.Selection = None,
    fps: options.Fps = None,
    max_new_tokens: options.MaxNewTokens = 128,
    media_root: options.MediaRoot = None,
    engine: Annotated[Engine, typer.Option(help="Where the model runs.")] = Engine.here,
    device: options.Device = None,
    dtype: options.WeightType = options.Dtype.auto,
) -> None:
    """
    Answer the questions of a file. A video that cannot be read is an error in its rows, and the run goes on.

    Each row is answered once, however often the run is stopped and started again. A video is encoded once for all of
    its questions.
    """
    model, revision = split_revision(model)
    if engine is Engine.vllm and device is not None:
        fail("--device has no effect with --engine vllm, which takes the device that it was built for")
    if engine is Engine.vllm and find_spec("vllm") is None:
        fail("the package vllm is not installed: pip install vllm")
    with one_line_errors(), resumable():
        from ..batch import Asker, answer_here, answer_in_vllm, read_questions, run_batch
        from ..methods_qtsplus import add_method

        add_method(selection)
        questions = read_questions(file, media_root)
        name = name_model(model)
        asker = Asker(name, revision, device, dtype.value, fps, retention, max_visual_tokens, selection, max_new_tokens)
        counts = run_batch(questions, out, asker, answer_in_vllm if engine is Engine.vllm else answer_here)
    wrote(out)
    if counts["error"]:
        note(f"{counts['error']} of {counts.total()} rows have an error; the same command asks them again.")
    if not counts["answer"]:
        fail_run(f"no question of {file} was answered")
