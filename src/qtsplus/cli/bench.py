"""`qtsplus bench`: measurements."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from .console import console, note, notes, one_line_errors, require_seeds, require_text, resumable, wrote
from .options import Dtype, Overrides

bench_app = typer.Typer(
    help="Measure speed, memory and accuracy. The results are JSON files that hold every repeat.",
    no_args_is_help=True,
)

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
_Results = Annotated[Path, typer.Option(help="The folder of the results.")]
_Repeats = Annotated[int, typer.Option(help="How often each measurement is repeated.", min=1)]
_Retention = Annotated[float, typer.Option(help="The fraction of the visual tokens to keep, in (0, 1].")]
_Dtype = Annotated[
    Dtype, typer.Option(help="The type of both models' weights. auto takes what the device multiplies faster.")
]
_Selection = Annotated[
    str, typer.Option(help="What chooses: qtsplus, the selector, or lm_attention, the language model's attention.")
]
_RESULTS = Path("benchmarks/results")


@bench_app.command()
def learned(
    base: Annotated[
        list[Path],
        typer.Option(
            help="A trained model that reads all tokens. May be repeated, once for each seed.", show_default=False
        ),
    ],
    test: Annotated[Path, typer.Option(help="Test questions, made by `qtsplus data tinyworld`.", show_default=False)],
    recipe: Annotated[Path, typer.Option(help="The recipe that trains each variant from the base.")] = Path(
        "recipes/qtsplus-tiny.yaml"
    ),
    out: _Results = _RESULTS,
    work: Annotated[Path, typer.Option(help="Where trained models and answers are kept.")] = Path("runs/learned"),
    seed: Annotated[
        list[int] | None,
        typer.Option(help="A seed of training. May be repeated. Without it, 0, 1 and 2."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="What to train beside the recipe as it is, such as gumbel or mean. May be repeated. Without it, every "
            "variant that differs from the recipe; with qtsplus, nothing else."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="How many questions are asked at a time.", min=1)] = 64,
    overrides: Overrides = None,
) -> None:
    """Compare the accuracy of trained selectors, baselines and controls. What is on disk is not done again."""
    require_seeds(*(seed or ()))
    with one_line_errors():
        from ..benchmark.learned import run_learned

        results = run_learned(
            base,
            test,
            out,
            recipe=recipe,
            overrides=overrides or (),
            seeds=seed or (0, 1, 2),
            variants=variant or (),
            work=work,
            batch_size=batch_size,
            command=shlex.join(["qtsplus", *sys.argv[1:]]),
            say=note,
        )
    wrote(results)


@bench_app.command()
def attention(
    base: Annotated[
        list[Path],
        typer.Option(
            help="A trained model that reads all tokens. May be repeated, for bases of one backbone.",
            show_default=False,
        ),
    ],
    test: Annotated[Path, typer.Option(help="Test questions, made by `qtsplus data tinyworld`.", show_default=False)],
    trained: Annotated[
        list[Path] | None,
        typer.Option(help="The same base with a trained selector, to stand beside. Repeated as often as --base."),
    ] = None,
    out: _Results = _RESULTS,
    name: Annotated[str, typer.Option(help="What the results are called.")] = "lm-attention",
    work: Annotated[Path, typer.Option(help="Where answers are kept.")] = Path("runs/attention"),
    batch_size: Annotated[int, typer.Option(help="How many questions are asked at a time.", min=1)] = 64,
) -> None:
    """Compare selection by the language model's own attention, which needs no training, with all others."""
    require_text(name=name)
    with one_line_errors():
        from ..benchmark.learned.untrained import run_attention

        results = run_attention(
            base,
            test,
            out,
            trained=trained or (),
            name=name,
            work=work,
            batch_size=batch_size,
            command=shlex.join(["qtsplus", *sys.argv[1:]]),
            say=note,
        )
    wrote(results)


@bench_app.command()
def speed(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: _Results = _RESULTS,
    repeats: _Repeats = 5,
    retention: _Retention = 0.11,
    dtype: _Dtype = Dtype.auto,
    selection: _Selection = "qtsplus",
    two_passes: Annotated[
        bool,
        typer.Option(
            "--two-passes",
            help="Also measure our side as it reads the video small first, and then in part at full size.",
        ),
    ] = False,
    sweep: Annotated[bool, typer.Option(help="Also measure with other numbers of frames.")] = True,
) -> None:
    """Time each stage, and the way from an mp4 to the first token: the stock model and ours, on the same weights."""
    require_text(device=device)
    with one_line_errors(), resumable():
        from ..benchmark.speed import run_speed

        file = run_speed(
            shape,
            out,
            device=device,
            dtype=dtype.value,
            repeats=repeats,
            retention=retention,
            selection=selection,
            two_passes=two_passes,
            sweep=sweep,
        )
    _print_figures(file)


@bench_app.command()
def memory(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: _Results = _RESULTS,
    repeats: _Repeats = 5,
    retention: _Retention = 0.11,
    dtype: _Dtype = Dtype.auto,
) -> None:
    """Measure peak memory: up to the first token, and of the relevance alone. Each runs in a process of its own."""
    require_text(device=device)
    with one_line_errors(), resumable():
        from ..benchmark.memory import run_memory

        file = run_memory(shape, out, device=device, dtype=dtype.value, repeats=repeats, retention=retention)
    _print_figures(file)


@bench_app.command()
def scaling(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: _Results = _RESULTS,
    repeats: _Repeats = 5,
    size: Annotated[
        list[int] | None,
        typer.Option(help="A number of visual tokens. May be repeated. Without it, five sizes up to 1,000,000."),
    ] = None,
    selection: _Selection = "qtsplus",
) -> None:
    """Measure how time and memory of the selection grow with the number of visual tokens."""
    require_text(device=device)
    with one_line_errors(), resumable():
        from ..benchmark.scaling import run_scaling

        file = run_scaling(shape, out, device=device, selection=selection, sizes=size, repeats=repeats)
    _print_figures(file)


@bench_app.command(name="train")
def training_step(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: _Results = _RESULTS,
    repeats: _Repeats = 5,
    retention: _Retention = 0.11,
    dtype: _Dtype = Dtype.auto,
    frames: Annotated[
        int | None, typer.Option(help="The video's frames. Without it, as many as the shape has, at most 32.")
    ] = None,
) -> None:
    """Measure the time and peak memory of a training step with gradient checkpointing, for the stock model and ours."""
    require_text(device=device)
    with one_line_errors(), resumable():
        from ..benchmark.train import run_train

        file = run_train(
            shape, out, device=device, dtype=dtype.value, frames=frames, repeats=repeats, retention=retention
        )
    _print_figures(file)


def _print_figures(file: Path) -> None:
    for name, value in json.loads(file.read_text())["figures"].items():
        console.print(f"{name} {value:.3g}", highlight=False)
    notes.print(f"Wrote {file}", soft_wrap=True, markup=False)
