"""`qtsplus train` and `qtsplus data`: training, and what it reads."""

from pathlib import Path
from typing import Annotated

import typer

from .console import console, one_line_errors, wrote
from .options import Overrides, RecipeFile

data_app = typer.Typer(help="Make training data.", no_args_is_help=True)


def train(
    recipe: RecipeFile,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be trained. Load nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    overrides: Overrides = None,
) -> None:
    """Train a model by a recipe. The result is a complete Hub folder."""
    with one_line_errors():
        from ..training import recipe as recipes

        if dry_run:
            # Nothing is computed: a recipe in bfloat16 for a GPU can be counted on any machine.
            loaded = recipes.load_recipe(recipe, [*(overrides or ()), "training.use_cpu=true"])
            console.print(f"{recipe.stem}: {recipes.dry_run(loaded)}", soft_wrap=True, markup=False, highlight=False)
            return
        folder = recipes.run(recipes.load_recipe(recipe, overrides or ()), resume)
    wrote(folder)


@data_app.command()
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
    workers: Annotated[int, typer.Option(help="How many processes render.", min=1)] = 1,
) -> None:
    """Render TinyWorld: videos of moving shapes, with questions, answers and captions for `qtsplus train`."""
    with one_line_errors():
        from ..data.tinyworld import build_dataset

        records = build_dataset(
            out, split, size, seconds or (8, 16), max_objects, multiple_choice, conversations, workers, crowd=crowd
        )
    wrote(records)
