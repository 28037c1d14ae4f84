"""`qtsplus eval needle`, `ablation`, `analysis` and `efficiency`: what a selection finds, costs and does."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import fail, note, one_line_errors, require_fraction, require_seeds, require_text, wrote
from .models import check_model_options, check_selection, load_model
from .options import Device, Model, Overrides, Retention, Revision

_Results = Annotated[Path, typer.Option(help="The folder of the results.")]
_RESULTS = Path("benchmarks/results")
_MaxVisualTokens = Annotated[int | None, typer.Option(help="Keep this many visual tokens instead.", min=1)]
_HOUR = 3600


def needle(
    model: Model = None,
    revision: Revision = None,
    needles: Annotated[
        Path | None,
        typer.Option(
            help="A JSONL file of records, each with a clip or an image as its video, a question and its answer. "
            "Without it, clips of TinyWorld are made.",
            show_default=False,
        ),
    ] = None,
    background: Annotated[
        str | None,
        typer.Option(
            help="The long video that they are put into: a file, an http(s) address or a folder of frames. Without it, "
            "TinyWorld's is made.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        list[float] | None,
        typer.Option(help="A length in seconds. May be repeated. Without it, 60, 300, 600, 1800 and 3600."),
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(help="Where a needle is put, from 0 to 1. May be repeated. Without it, 0, 0.25, 0.5, 0.75 and 1."),
    ] = None,
    selection: Annotated[
        list[str] | None,
        typer.Option(help="How tokens are chosen. May be repeated. Without it, every way but all."),
    ] = None,
    retention: Retention = None,
    max_visual_tokens: _MaxVisualTokens = None,
    fps: Annotated[
        float | None, typer.Option(help="How many frames to look at per second; of a folder, how many it has.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many needles of TinyWorld.", min=1)] = 8,
    seconds: Annotated[int, typer.Option(help="How long a needle of TinyWorld is.", min=1, max=128)] = 4,
    name: Annotated[str, typer.Option(help="What the results are called.")] = "crowd",
    out: _Results = _RESULTS,
    work: Annotated[Path, typer.Option(help="Where made videos and the background's features are kept.")] = Path(
        "runs/needle"
    ),
    device: Device = None,
) -> None:
    """Hide clips at chosen depths in long videos, ask for them, and draw what is found by length and depth."""
    check_model_options(model, revision, device)
    require_text(background=background, name=name)
    require_fraction(retention)
    if retention is not None and max_visual_tokens is not None:
        fail("--retention and --max-visual-tokens exclude each other")
    if fps is not None and not 0 < fps < float("inf"):
        fail(f"--fps is {fps:g}; expected more than 0 frames per second, and a finite number")
    lengths = length or [60, 300, 600, 1800, _HOUR]
    with one_line_errors():
        from ..data.haystack import write_background, write_needles
        from ..evaluation.labelled import read_questions
        from ..evaluation.needle import SELECTIONS, check_places, run_needle

        for chosen in selection or ():
            check_selection(chosen)
        depths = depth or (0.0, 0.25, 0.5, 0.75, 1.0)
        check_places(lengths, depths)
        hidden = read_questions(needles or write_needles(work / f"needles-{seconds}s", count, seconds))
        whole = -int(-max(lengths) // 1)
        video = background or str(write_background(work / f"background-{whole}s.mp4", whole))
        loaded, processor = load_model(model, revision, device)
        target = run_needle(
            loaded,
            processor,
            hidden,
            video,
            out,
            name=name,
            lengths=lengths,
            depths=depths,
            selections=selection or SELECTIONS,
            retention=retention,
            max_visual_tokens=max_visual_tokens,
            fps=fps,
            work=work,
            command=_typed(),
            say=note,
        )
    wrote(target)


def ablation(
    test: Annotated[Path, typer.Argument(help="A JSONL file of records with videos.", show_default=False)],
    model: Model = None,
    revision: Revision = None,
    base: Annotated[
        Path | None,
        typer.Option(
            help="In the place of --model: a trained model that reads all tokens, from which a recipe trains the model "
            "and its variants.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[Path, typer.Option(help="With --base: the recipe.")] = Path("recipes/qtsplus-tiny.yaml"),
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="With --base: what to train beside the recipe as it is, such as gumbel or no_time. May be repeated. "
            "Without it, every variant that differs from the recipe; with qtsplus, nothing else."
        ),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="With --base: a seed of training. May be repeated.")] = None,
    retention: Annotated[
        list[float] | None,
        typer.Option(help="A fraction of the visual tokens to keep, in (0, 1]. May be repeated."),
    ] = None,
    n_max: Annotated[
        list[int] | None,
        typer.Option(
            help="A cap on the model's own budget. May be repeated. Without it and --retention, the paper's 256 and "
            "25600.",
            min=1,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="How many questions are asked at a time.", min=1)] = 16,
    name: Annotated[str, typer.Option(help="What the results are called.")] = "crowd",
    out: _Results = _RESULTS,
    work: Annotated[Path, typer.Option(help="Where trained models and answers are kept.")] = Path("runs/learned"),
    device: Device = None,
    overrides: Overrides = None,
) -> None:
    """Measure what each part of a model is worth: one table, with intervals and paired tests."""
    check_model_options(model, revision, device)
    require_text(name=name)
    require_seeds(*(seed or ()))
    for share in retention or ():
        require_fraction(share)
    if base is None and (variant or seed or overrides):
        fail("--variant, --seed and --set are about what is trained; name where from with --base")
    if base is not None and (model is not None or device is not None):
        fail("--base takes the place of --model, and trains where the recipe says; leave --model and --device out")
    with one_line_errors():
        from ..benchmark.learned.ablation import Budget, ablate_checkpoint, ablate_recipe

        caps = n_max if n_max or retention else (256, 25600)
        budgets = [*(Budget(None, cap) for cap in caps or ()), *(Budget(share) for share in retention or ())]
        common: dict[str, Any] = {"name": name, "budgets": budgets, "work": work, "batch_size": batch_size}
        common |= {"command": _typed(), "say": note}
        if base is None:
            loaded, processor = load_model(model, revision, device)
            target = ablate_checkpoint(loaded, processor, test, out, **common)
        else:
            trained: dict[str, Any] = {"recipe": recipe, "overrides": overrides or (), "variants": variant or ()}
            target = ablate_recipe(base, test, out, seeds=seed or (0,), **trained, **common)
    wrote(target)


def analysis(
    records: Annotated[Path, typer.Argument(help="A JSONL file of records with videos.", show_default=False)],
    model: Model = None,
    revision: Revision = None,
    name: Annotated[str, typer.Option(help="What the results are called.")] = "crowd",
    out: _Results = _RESULTS,
    work: Annotated[Path, typer.Option(help="Where the videos' features are kept.")] = Path("runs/analysis"),
    device: Device = None,
) -> None:
    """Hold the model's own budget against what it is made from, and draw how it spends its tokens."""
    check_model_options(model, revision, device)
    require_text(name=name)
    with one_line_errors():
        from ..evaluation.analysis import run_analysis
        from ..evaluation.labelled import read_questions

        questions = read_questions(records)
        loaded, processor = load_model(model, revision, device)
        target = run_analysis(loaded, processor, questions, out, name=name, work=work, command=_typed())
    wrote(target)


def efficiency(
    files: Annotated[list[Path], typer.Argument(help="Results of `qtsplus bench speed`.", show_default=False)],
    name: Annotated[str, typer.Option(help="What the results are called.")] = "cpu",
    out: _Results = _RESULTS,
) -> None:
    """Draw the paper's efficiency figure: embeddings to the language model, and latency, by the number of frames."""
    require_text(name=name)
    with one_line_errors():
        from ..benchmark.efficiency import run_efficiency

        target = run_efficiency(files, out, name=name, command=_typed())
    wrote(target)


def _typed() -> str:
    return shlex.join(["qtsplus", *sys.argv[1:]])
