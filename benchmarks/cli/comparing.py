"""`learned`, `attention`, `ablation` and `library`: what selections are worth in right answers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from qtsplus.cli.console import fail, note, one_line_errors, require_fraction, wrote
from qtsplus.cli.models import load_named, split_revision
from qtsplus.cli.options import Device, Model, Overrides

from .options import RESULTS, Results, typed

_RECIPE = Path("benchmarks/recipes/crowd.yaml")
_Test = Annotated[Path, typer.Option(help="Test questions, made by the command tinyworld.", show_default=False)]


def learned(
    base: Annotated[
        list[Path],
        typer.Option(
            help="A trained model that reads all tokens. May be repeated, once for each seed.",
            show_default=False,
        ),
    ],
    test: _Test,
    recipe: Annotated[Path, typer.Option(help="The recipe that trains each variant from the base.")] = _RECIPE,
    out: Results = RESULTS,
    work: Annotated[Path, typer.Option(help="Where trained models and answers are kept.")] = Path("runs/learned"),
    seed: Annotated[
        list[int] | None,
        typer.Option(help="A seed of training. May be repeated. Without it, 0, 1 and 2.", min=0, max=2**32 - 1),
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
    with one_line_errors():
        from ..learned import run_learned

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
            command=typed(),
            say=note,
        )
    wrote(results)


def attention(
    base: Annotated[
        list[Path],
        typer.Option(
            help="A trained model that reads all tokens. May be repeated, for bases of one backbone.",
            show_default=False,
        ),
    ],
    test: _Test,
    trained: Annotated[
        list[Path] | None,
        typer.Option(help="The same base with a trained selector, to stand beside. Repeated as often as --base."),
    ] = None,
    out: Results = RESULTS,
    name: Annotated[str, typer.Option(help="What the results are called.")] = "lm-attention",
    work: Annotated[Path, typer.Option(help="Where answers are kept.")] = Path("runs/attention"),
    batch_size: Annotated[int, typer.Option(help="How many questions are asked at a time.", min=1)] = 64,
) -> None:
    """Compare selection by the language model's own attention, which needs no training, with all others."""
    with one_line_errors():
        from ..learned.untrained import run_attention

        results = run_attention(
            base,
            test,
            out,
            trained=trained or (),
            name=name,
            work=work,
            batch_size=batch_size,
            command=typed(),
            say=note,
        )
    wrote(results)


def ablation(
    test: Annotated[Path, typer.Argument(help="A JSONL file of records with videos.", show_default=False)],
    model: Model = None,
    base: Annotated[
        Path | None,
        typer.Option(
            help="In the place of --model: a trained model that reads all tokens, from which a recipe trains the model "
            "and its variants.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[Path, typer.Option(help="With --base: the recipe.")] = _RECIPE,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="With --base: what to train beside the recipe as it is, such as gumbel or no_time. May be repeated. "
            "Without it, every variant that differs from the recipe; with qtsplus, nothing else."
        ),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(help="With --base: a seed of training. May be repeated.", min=0, max=2**32 - 1),
    ] = None,
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
    out: Results = RESULTS,
    work: Annotated[Path, typer.Option(help="Where trained models and answers are kept.")] = Path("runs/learned"),
    device: Device = None,
    overrides: Overrides = None,
) -> None:
    """Measure what each part of a model is worth: one table, with intervals and paired tests."""
    model, revision = split_revision(model)
    for share in retention or ():
        require_fraction(share)
    if base is None and (variant or seed or overrides):
        fail("--variant, --seed and --set are about what is trained; name where from with --base")
    if base is not None and (model is not None or device is not None):
        fail("--base takes the place of --model, and trains where the recipe says; leave --model and --device out")
    with one_line_errors():
        from ..learned.ablation import Budget, ablate_checkpoint, ablate_recipe

        caps = n_max if n_max or retention else (256, 25600)
        budgets = [*(Budget(None, cap) for cap in caps or ()), *(Budget(share) for share in retention or ())]
        common: dict[str, Any] = {"name": name, "budgets": budgets, "work": work, "batch_size": batch_size}
        common |= {"command": typed(), "say": note}
        if base is None:
            loaded, processor = load_named(model, revision, device)
            target = ablate_checkpoint(loaded, processor, test, out, **common)
        else:
            trained: dict[str, Any] = {"recipe": recipe, "overrides": overrides or (), "variants": variant or ()}
            target = ablate_recipe(base, test, out, seeds=seed or (0,), **trained, **common)
    wrote(target)


Work = Annotated[Path, typer.Option(help="Where the videos and the library are kept.")]


def library(
    model: Model = None,
    videos: Annotated[int, typer.Option(help="How many videos the library has.", min=2)] = 200,
    out: Results = RESULTS,
    work: Work = Path("runs/library"),
    device: Device = None,
) -> None:
    """Ask a library of crowds about objects that stand in one of its videos only; other rankings stand beside."""
    model, revision = split_revision(model)
    with one_line_errors():
        from ..library import run_library

        loaded, processor = load_named(model, revision, device)
        target = run_library(loaded, processor, out, work, videos=videos, command=typed())
    wrote(target)


def evidence(
    model: Model = None,
    videos: Annotated[int, typer.Option(help="How many crowds are asked about.", min=3)] = 200,
    out: Results = RESULTS,
    work: Work = Path("runs/library"),
    device: Device = None,
) -> None:
    """Ask about crowds whether evidence names what was to be seen, and which of two cameras has seen it."""
    model, revision = split_revision(model)
    with one_line_errors():
        from ..library import run_evidence

        loaded, processor = load_named(model, revision, device)
        target = run_evidence(loaded, processor, out, work, videos=videos, command=typed())
    wrote(target)
