"""The `qtsplus` command: parses, calls, prints."""

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .session import Answer

app = typer.Typer(
    help="Query-aware visual-token selection for long videos.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Make training data.", no_args_is_help=True)
app.add_typer(data_app, name="data")
bench_app = typer.Typer(help="Measure; every figure is one of JSON files with all repeats.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
# Standard output carries results only; everything said on the way goes to standard error.
console = Console()
notes = Console(stderr=True, highlight=False)


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def ask(
    video: Annotated[Path, typer.Argument(help="A video file, or a folder of frames.", show_default=False)],
    question: Annotated[str, typer.Argument(help="What to ask about it.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Folder or Hub id; the bundled tiny model when absent.")] = None,
    retention: Annotated[float | None, typer.Option(help="Fraction of the visual tokens to keep, in (0, 1].")] = None,
    max_visual_tokens: Annotated[int | None, typer.Option(help="Most visual tokens to keep.")] = None,
    fps: Annotated[
        float | None,
        typer.Option(help="Of a file: frames to look at per second. Of a folder: the rate its frames were taken at."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    device: Annotated[str | None, typer.Option(help="Such as cuda or cpu; a GPU where there is one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; auto is the checkpoint's.")] = Dtype.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer a question about a video, and say which seconds the answer rests on."""
    if not video.exists():
        _fail(f"there is no video at {video}")
    if video.is_dir() and fps is None:
        _fail(f"{video} is a folder of frames: give the rate at which they were taken, such as --fps 2")
    if fps is not None and not fps > 0:
        _fail(f"--fps is {fps:g}; expected more than 0 frames per second")
    if retention is not None and max_visual_tokens is not None:
        _fail("--retention and --max-visual-tokens exclude each other")
    if retention is not None and not 0 < retention <= 1:
        _fail(f"--retention is {retention:g}; expected a fraction in (0, 1]")
    if max_visual_tokens is not None and max_visual_tokens < 1:
        _fail(f"--max-visual-tokens is {max_visual_tokens}; expected at least 1")
    if max_new_tokens < 1:
        _fail(f"--max-new-tokens is {max_new_tokens}; expected at least 1")
    if not question.strip():
        _fail("the question is empty; expected some text")

    with _one_line_errors():
        from . import session

        name = model or _bundled_model()
        started = time.perf_counter()
        with notes.status("Loading the model"):
            loaded, processor = session.load(name, device, dtype.value)
        seconds_to_load = time.perf_counter() - started
        encoded = session.encode(loaded, processor, video, fps=fps, progress=True)
        with notes.status("Asking"):
            answer = session.ask(
                loaded,
                processor,
                encoded,
                question,
                retention=retention,
                max_visual_tokens=max_visual_tokens,
                max_new_tokens=max_new_tokens,
            )
    answer.timings.update(load=seconds_to_load, encode=encoded.seconds)
    if as_json:
        print(json.dumps(answer.as_dict()))
    else:
        _print_answer(answer)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder or Hub id: a Qwen2.5-VL, a reference QTSplus, or one of ours to make a Qwen2.5-VL of.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    variant: Annotated[
        str | None, typer.Option(help="Whose selector hyperparameters a stock model gets, such as qtsplus-3b.")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="Start of a new selector: identity (when absent), or lm for layers of the language model."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A field of a new selector, such as n_max=512; may be repeated.")
    ] = None,
    vision_config: Annotated[
        Path | None, typer.Option(help="Of a reference checkpoint, which lacks it: a JSON file, or a folder with one.")
    ] = None,
    processor: Annotated[
        str | None, typer.Option(help="Folder or Hub id to take the processor from, where the source has none.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of the source on the Hub.")] = None,
    seed: Annotated[int, typer.Option(help="Of a new selector.")] = 0,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write beside files that are already there.")] = False,
) -> None:
    """Make a QTSplus model of a Qwen2.5-VL or of a reference checkpoint, or a Qwen2.5-VL of a QTSplus model."""
    with _one_line_errors():
        from .hub import convert as conversion

        folder = conversion.convert(
            source,
            out,
            variant=variant,
            initialise=init,
            selector=_parse_settings(settings),
            vision_config=vision_config,
            processor=processor,
            revision=revision,
            seed=seed,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=True,
            say=_note,
        )
    console.print(f"Wrote {folder}", soft_wrap=True, highlight=False)


@app.command()
def split(
    model: Annotated[Path, typer.Argument(help="A folder with a QTSplus model.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The folder to write; beside the model's, with -split, when absent.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write beside files that are already there.")] = False,
) -> None:
    """Write the vision head and the language model as checkpoints of their own, checked against the whole model."""
    with _one_line_errors():
        from .hub import split as splitting

        parts = splitting.split(model, out, overwrite=overwrite, say=_note)
    for part in parts:
        console.print(f"Wrote {part}", soft_wrap=True, highlight=False)


@app.command()
def publish(
    model: Annotated[str, typer.Argument(help="A folder with weights, or a variant's name such as qtsplus-tiny.")],
    to: Annotated[Path | None, typer.Option(help="A folder to write.", show_default=False)] = None,
    repo: Annotated[str | None, typer.Option(help="ORG/NAME on the Hub to upload to.", show_default=False)] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository a private one.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and their sizes; upload nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write beside files that are already there.")] = False,
) -> None:
    """Assemble a complete Hub repository (weights, configuration, processor, code, model card) and upload it."""
    if to is None and repo is None:
        _fail("nothing to do: give --repo ORG/NAME to upload, --to DIR to write a folder, or both")
    if repo is None and (private or dry_run):
        _fail(f"{'--private' if private else '--dry-run'} is about an upload: give --repo ORG/NAME")
    with _one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        from .hub import publish as publishing

        if repo is not None:
            publishing.check_repository(repo)
        keep = to is not None and not dry_run
        folder = to if to is not None and keep else Path(scratch) / "repository"
        if not Path(model).is_dir() and model in publishing.variants():
            built = publishing.load_variant(model)
            publishing.assemble(
                built.model,
                built.processor,
                folder,
                variant=built.variant,
                random_seed=built.random_seed,
                repository=repo,
                overwrite=overwrite,
            )
            if built.random_seed is not None:
                _note(f"{model} was built with random weights (seed {built.random_seed}), as its card says.")
        else:
            publishing.assemble_folder(
                model, folder, repository=repo, overwrite=overwrite, link_weights=not keep, say=_note
            )
        if keep:
            console.print(f"Wrote {folder.resolve()}", soft_wrap=True, highlight=False)
        if repo is not None and dry_run:
            _print_files(folder, f"{repo} ({'private' if private else 'public, or as the organization has it'})")
        elif repo is not None:
            with notes.status(f"Uploading to {repo}"):
                address = publishing.upload(folder, repo, private, say=_note)
            console.print(f"Uploaded {address}", soft_wrap=True, highlight=False)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count what would be trained; loads nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field, such as training.seed=1; may be repeated.")
    ] = None,
) -> None:
    """Train a model by a recipe; the result is a complete Hub folder."""
    with _one_line_errors():
        from .training import recipe as recipes

        if dry_run:
            # Nothing is computed: a recipe in bfloat16 for a GPU can be counted on any machine.
            loaded = recipes.load_recipe(recipe, [*(overrides or ()), "training.use_cpu=true"])
            console.print(f"{recipe.stem}: {recipes.dry_run(loaded)}", soft_wrap=True, highlight=False)
            return
        folder = recipes.run(recipes.load_recipe(recipe, overrides or ()), resume)
    console.print(f"Wrote {folder}", soft_wrap=True, highlight=False)


@app.command(name="eval")
def evaluate(
    records: Annotated[Path, typer.Argument(help="A JSONL file of records with videos.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Folder or Hub id; the bundled tiny model when absent.")] = None,
    retention: Annotated[float | None, typer.Option(help="Fraction of the visual tokens to keep, in (0, 1].")] = None,
    selection: Annotated[
        str | None, typer.Option(help="Another way to choose: uniform, random or all, instead of the model's own.")
    ] = None,
    skip_kind: Annotated[list[str] | None, typer.Option(help="Leave a kind of question out; may be repeated.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cuda or cpu; a GPU where there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Ask a model the questions of a file, and count the answers that match to the letter."""
    with _one_line_errors():
        from . import session
        from .configuration_qtsplus import SELECTIONS
        from .evaluation.exact_match import exact_match, summarise
        from .training.dataset import read_records

        if selection is not None and selection not in SELECTIONS:
            _fail(f"--selection is {selection!r}; expected one of {', '.join(SELECTIONS)}")
        chosen = [one for one in read_records(records) if one.video is not None and one.kind not in (skip_kind or ())]
        if not chosen:
            _fail(f"{records} holds no question about a video that is not left out")
        loaded, processor = session.load(model or _bundled_model(), device)
        if selection is not None:
            loaded.config.qtsplus_config.selection = selection
        summary = summarise(exact_match(loaded, processor, chosen, retention=retention, progress=not as_json))
    if as_json:
        print(json.dumps(summary))
        return
    table = Table("kind", "questions", "accuracy", "95% interval", "kept")
    for kind, row in [*summary.pop("kinds").items(), ("all", summary)]:
        interval = f"{row['low']:.1%} to {row['high']:.1%}"
        table.add_row(kind, str(row["questions"]), f"{row['accuracy']:.1%}", interval, f"{row['kept']:.1%}")
    console.print(table)


@data_app.command()
def tinyworld(
    out: Annotated[Path, typer.Option(help="Where `SPLIT/*.mp4` and `SPLIT.jsonl` go.", show_default=False)],
    size: Annotated[int, typer.Option(help="How many videos.", min=1, show_default=False)],
    split: Annotated[str, typer.Option(help="train, validation or test; no two share a video.")] = "train",
    seconds: Annotated[list[int] | None, typer.Option(help="Lengths to draw from, 2 to 128; may be repeated.")] = None,
    max_objects: Annotated[int, typer.Option(help="Most objects in one video.", min=1)] = 12,
    multiple_choice: Annotated[float, typer.Option(help="Share of questions with options.", min=0, max=1)] = 0.5,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="One record per video, its questions as turns.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes that render.", min=1)] = 1,
) -> None:
    """Render TinyWorld: mp4 files of moving shapes, with questions, answers and captions for `qtsplus train`."""
    with _one_line_errors():
        from .data.tinyworld import build_dataset

        records = build_dataset(
            out, split, size, seconds or (8, 16), max_objects, multiple_choice, conversations, workers
        )
    console.print(f"Wrote {records}", soft_wrap=True, highlight=False)


@bench_app.command()
def learned(
    base: Annotated[Path, typer.Option(help="A trained model that reads all tokens.", show_default=False)],
    test: Annotated[Path, typer.Option(help="Test questions, made by `qtsplus data tinyworld`.", show_default=False)],
    recipe: Annotated[Path, typer.Option(help="By which each variant is trained from the base.")] = Path(
        "recipes/qtsplus-tiny.yaml"
    ),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
    work: Annotated[Path, typer.Option(help="Where trained models and answers are kept.")] = Path("runs/learned"),
    seed: Annotated[
        list[int] | None, typer.Option(help="Of training, 0, 1 and 2 when absent; may be repeated.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Questions at a time.", min=1)] = 64,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of the recipe; may be repeated.")
    ] = None,
) -> None:
    """Accuracy of trained selectors, training-free baselines and controls; what is on disk is not done again."""
    with _one_line_errors():
        from .benchmark.learned import run_learned

        results = run_learned(
            base,
            test,
            out,
            recipe=recipe,
            overrides=overrides or (),
            seeds=seed or (0, 1, 2),
            work=work,
            batch_size=batch_size,
            command=shlex.join(["qtsplus", *sys.argv[1:]]),
            say=lambda line: notes.print(line, soft_wrap=True),
        )
    console.print(f"Wrote {results}", soft_wrap=True, highlight=False)


_Shape = Annotated[
    str,
    typer.Option(
        help="cpu: 3B widths, a quarter of the layers. 3b: whole, on a GPU. small; tiny. Other backbones: "
        "internvl2.5-8b, llava-video-7b and qwen3-vl-8b, whole; with -cpu behind, a quarter of the layers."
    ),
]
_Device = Annotated[str | None, typer.Option(help="Such as cuda or cpu; what the shape is meant for when absent.")]
_Results = Annotated[Path, typer.Option(help="Folder of the results.")]
_Repeats = Annotated[int, typer.Option(help="Repeats of each measurement.", min=1)]
_Retention = Annotated[float, typer.Option(help="Fraction of the visual tokens that is kept.")]
_Dtype = Annotated[Dtype, typer.Option(help="Of both sides; auto is what the device multiplies faster.")]
_RESULTS = Path("benchmarks/results")


@bench_app.command()
def speed(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: _Results = _RESULTS,
    repeats: _Repeats = 5,
    retention: _Retention = 0.11,
    dtype: _Dtype = Dtype.auto,
    sweep: Annotated[bool, typer.Option(help="Also measure over the number of frames.")] = True,
) -> None:
    """Seconds per stage and from an mp4 to the first token, the stock model and ours in turn on the same weights."""
    with _one_line_errors(), _resumable():
        from .benchmark.speed import run_speed

        file = run_speed(
            shape, out, device=device, dtype=dtype.value, repeats=repeats, retention=retention, sweep=sweep
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
    """Peak memory up to the first token, and of relevance beside its readable twin, each in a process of its own."""
    with _one_line_errors(), _resumable():
        from .benchmark.memory import run_memory

        file = run_memory(shape, out, device=device, dtype=dtype.value, repeats=repeats, retention=retention)
    _print_figures(file)


@bench_app.command()
def scaling(
    shape: _Shape = "cpu",
    device: _Device = None,
    out: _Results = _RESULTS,
    repeats: _Repeats = 5,
    size: Annotated[
        list[int] | None, typer.Option(help="Visual tokens, up to 1,000,000 when absent; may be repeated.")
    ] = None,
) -> None:
    """Time and memory of selection over the visual tokens, and the exponents with which they grow."""
    with _one_line_errors(), _resumable():
        from .benchmark.scaling import run_scaling

        file = run_scaling(shape, out, device=device, sizes=size, repeats=repeats)
    _print_figures(file)


def _print_figures(file: Path) -> None:
    for name, value in json.loads(file.read_text())["figures"].items():
        console.print(f"{name} {value:.3g}", highlight=False)
    notes.print(f"Wrote {file}", soft_wrap=True)


@contextmanager
def _resumable() -> Iterator[None]:
    """An interruption is no failure: what has been measured stays on disk."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("qtsplus: interrupted; the same command goes on with what is missing", err=True)
        raise typer.Exit(130) from None


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the clip, the model and the picture go.")] = Path("demo"),
) -> None:
    """Ask the bundled tiny model about a rendered clip, and draw the tokens that it kept."""
    with _one_line_errors():
        from .demo import run_demo

        answer, asked = run_demo(out, lambda line: console.print(line, soft_wrap=True, highlight=False))
    console.print(f"\nQuestion: {asked.question} (In truth: {asked.answer})", highlight=False)
    _print_answer(answer)


def _print_files(folder: Path, target: str) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size:>15,}  {name}")
    print(f"{sum(sizes.values()):>15,}  bytes in {len(sizes)} files, for {target}; nothing was uploaded")


def _parse_settings(settings: list[str] | None) -> dict[str, object] | None:
    """`["n_max=512"]` as `{"n_max": 512}`; the values are YAML."""
    if not settings:
        return None
    import yaml

    parsed = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            _fail(f"--set {setting!r}: expected name=value")
        parsed[name] = yaml.safe_load(value)
    return parsed


def _note(line: str) -> None:
    notes.print(line, soft_wrap=True, markup=False)


def _print_answer(answer: "Answer") -> None:
    console.print(answer.answer or "(an empty answer)", style="bold", markup=False, highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    share = answer.kept_tokens / answer.visual_tokens
    table.add_row("kept", f"{answer.kept_tokens} of {answer.visual_tokens} visual tokens ({share:.1%})")
    table.add_row("video", f"{answer.seconds_of_video:.1f} s, {answer.frames} frames looked at")
    for number, interval in enumerate(answer.evidence):
        span = f"{interval.start:.1f} to {interval.end:.1f} s  ({interval.weight:.0%} of the relevance)"
        table.add_row("seen in" if number == 0 else "", span)
    timings = ", ".join(f"{stage.replace('_', ' ')} {answer.timings[stage]:.2f} s" for stage in _stages(answer.timings))
    table.add_row("time", timings)
    console.print(table)


def _stages(timings: dict[str, float]) -> list[str]:
    return [stage for stage in ("load", "encode", "first_token", "generate") if stage in timings]


def _bundled_model() -> str:
    from .demo import cached_tiny

    folder = cached_tiny()
    notes.print(
        f"No --model given: using the bundled tiny model at {folder}, which only knows TinyWorld's moving shapes.",
        soft_wrap=True,
    )
    return str(folder)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Bad input ends in one line on standard error and exit code 2; anything else is a bug and keeps its traceback."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    except (ValueError, OSError) as error:
        _fail(next(iter(str(error).strip().splitlines()), type(error).__name__))


def _fail(message: str) -> NoReturn:
    typer.echo(f"qtsplus: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
