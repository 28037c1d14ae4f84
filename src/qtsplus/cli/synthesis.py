"""`qtsplus data vscq1`, `vscq2`, `vqa` and `merge`: the paper's training sets, made with teacher models."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..output import check_folder
from .console import console, fail, one_line_errors, require_text, resumable, wrote
from .data import MediaRoot, filled_path
from .models import check_model_options, check_selection, load_model
from .options import Device, Dtype, Revision, Selection

if TYPE_CHECKING:
    from ..synthesis.endpoint import Endpoint
    from ..synthesis.engine import Price
    from ..synthesis.video_steps import Teacher


class Scoring(str, Enum):
    logprob = "logprob"
    letter = "letter"


_Captions = Annotated[
    Path,
    typer.Argument(
        help="Captions: JSONL or Parquet with vision_id and caption, or a folder of texts beside videos.",
        parser=filled_path,
        metavar="CAPTIONS",
    ),
]
_Questions = Annotated[
    Path,
    typer.Argument(
        help="Single-choice questions: JSONL or Parquet with options.", parser=filled_path, metavar="QUESTIONS"
    ),
]
_Shards = Annotated[
    Path,
    typer.Argument(help="The --out of the shards, which holds their folders.", parser=filled_path, metavar="DIR"),
]
_Out = Annotated[
    Path,
    typer.Option(help="The folder for the set, what was dropped, and the journal.", parser=filled_path, metavar="DIR"),
]
_Frames = Annotated[
    int | None, typer.Option(help="How many frames an endpoint is sent. Without it, 16.", min=1, max=4096)
]
_PriceIn = Annotated[float | None, typer.Option(help="Price of a million tokens that the teacher reads.", min=0)]
_PriceOut = Annotated[float | None, typer.Option(help="Price of a million tokens that the teacher writes.", min=0)]


@dataclass(frozen=True)
class _Run:
    """How much is made, where, and at which price; options of every command."""

    shard: Annotated[
        str | None,
        typer.Option(help="Only this part, such as 2/8 for the second of eight machines; then `data merge`."),
    ] = None
    limit: Annotated[
        int | None, typer.Option(help="Only the first items, to see what they cost.", min=1, max=2**40)
    ] = None
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try again what failed in an earlier run.")] = (
        False
    )
    price_in: _PriceIn = None
    price_out: _PriceOut = None

    def settings(self) -> dict[str, Any]:
        """As `engine.run` takes them."""
        from ..synthesis.engine import Shard

        price = _price(self.price_in, self.price_out)
        shard = None if self.shard is None else Shard.parse(self.shard)
        return {"shard": shard, "limit": self.limit, "retry_failed": self.retry_failed, "price": price}


@dataclass(frozen=True)
class _Server:
    """A teacher behind an endpoint; options of every command."""

    endpoint: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible API, such as http://localhost:8000/v1.")
    ] = None
    teacher: Annotated[str | None, typer.Option(help="The teacher's name at the endpoint.")] = None
    api_key_env: Annotated[
        str | None, typer.Option(help="The environment variable with the API key. Without it, OPENAI_API_KEY if set.")
    ] = None
    timeout: Annotated[float | None, typer.Option(help="Seconds until a reply must be whole. Without it, 300.")] = None
    extra_body: Annotated[
        str | None,
        typer.Option(
            help='JSON for every request, such as \'{"temperature": 0.2, "chat_template_kwargs": {"enable_thinking": '
            "false}}'."
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(help="How many items are worked on at a time. Without it, 64.", min=1, max=4096),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            help="Spread the requests over the machines of a Ray cluster: its address, auto for the one that this "
            "machine belongs to, or local for one of this machine alone."
        ),
    ] = None


@dataclass(frozen=True)
class _Local:
    """A video teacher that runs here."""

    model: Annotated[
        str | None,
        typer.Option(help="A teacher that runs here, in place of an endpoint: a folder or Hub id, QTSplus or stock."),
    ] = None
    revision: Revision = None
    selection: Selection = None
    device: Device = None
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights. Without it, auto.")] = None
    batch_size: Annotated[
        int | None,
        typer.Option(help="How many questions it reads at a time. Without it, 16.", min=1, max=4096),
    ] = None
    fps: Annotated[
        float | None,
        typer.Option(
            help="For records without a rate. For a file: how many frames to look at per second. For a folder: how "
            "many frames it has per second."
        ),
    ] = None


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of the dataclasses among its parameters as options of its own, for typer."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if kind in (_Run, _Server, _Local)}
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name not in groups
    ]
    shared = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for group in groups.values()
        for field in fields(group)
    ]

    @wraps(command)
    def run(**options: Any) -> None:
        filled = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        with _one_line():
            # Before a teacher is loaded, which takes minutes.
            check_folder(options["out"])
            filled["run"].settings()
            command(**options, **filled)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + shared
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@_with_options
def vscq1(
    captions: _Captions,
    out: _Out,
    server: _Server,
    run: _Run,
    per_caption: Annotated[int, typer.Option(help="Questions of each caption, each of another type.")] = 3,
) -> None:
    """Make QTS-VSCQ1: single-choice questions that a language model writes about captions."""
    from ..data.formats import iter_captions
    from ..synthesis.questions import WriteQuestions

    endpoint = _open(server, temperature=0.7)
    step = WriteQuestions(endpoint, per_caption)
    _make("vscq1", lambda: iter_captions(captions), step, endpoint, out, server, run)


@_with_options
def vscq2(
    questions: _Questions,
    out: _Out,
    server: _Server,
    local: _Local,
    run: _Run,
    media_root: MediaRoot = None,
    frames: _Frames = None,
    scoring: Annotated[
        Scoring | None,
        typer.Option(
            help="Choose by the log-probability of the letters, or by the letter that is said. Without it, logprob "
            "for a teacher that runs here and letter for an endpoint."
        ),
    ] = None,
    drop_guessable: Annotated[
        bool, typer.Option("--drop-guessable", help="Also drop what the teacher answers right without the video.")
    ] = False,
) -> None:
    """Make QTS-VSCQ2: keep the questions that a video teacher answers right. The others go to dropped.jsonl."""
    from ..synthesis.video_steps import Screen

    find = _finder(questions, media_root)
    teacher = _video_teacher(server, local, frames, scoring, max_tokens=64)
    step = Screen(teacher, find, drop_guessable)
    _make("vscq2", lambda: _choices(questions), step, teacher, out, server, run, local)


@_with_options
def vqa(
    questions: _Questions,
    out: _Out,
    server: _Server,
    local: _Local,
    run: _Run,
    media_root: MediaRoot = None,
    frames: _Frames = None,
) -> None:
    """Make QTS-VQA: a video teacher's answers in words to the questions that were kept."""
    from ..synthesis.video_steps import WriteAnswers

    find = _finder(questions, media_root)
    teacher = _video_teacher(server, local, frames, Scoring.letter, max_tokens=128)
    step = WriteAnswers(teacher, find)
    _make("vqa", lambda: _choices(questions), step, teacher, out, server, run, local)


def merge(out: _Shards, price_in: _PriceIn = None, price_out: _PriceOut = None) -> None:
    """Put the shards of several machines together, in the order of the input."""
    with _one_line():
        from ..synthesis.engine import merge as merge_shards

        _report(merge_shards(out, _price(price_in, price_out)))


@contextmanager
def _one_line() -> Iterator[None]:
    """Ends a command in one line: for bad input with exit code 2, for a run of which nothing came with 1."""
    from ..synthesis.engine import RunFailed

    with one_line_errors(), resumable():
        try:
            yield
        except RunFailed as error:
            typer.echo(f"qtsplus: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            extra = {"openai": "data", "tenacity": "data", "ray": "ray"}.get(package)
            if extra is None:
                raise
            fail(f"the package {package} is not installed: pip install 'qtsplus[{extra}]'")


def _make(
    name: str,
    read: Callable[[], Iterator[Any]],
    step: Any,
    teacher: Any,
    out: Path,
    server: _Server,
    run: _Run,
    local: _Local | None = None,
) -> None:
    from ..synthesis.engine import Job
    from ..synthesis.engine import run as run_job
    from ..synthesis.ray_runner import RayRunner

    is_local = local is not None and local.model is not None
    kept = run_job(
        Job(name, read, step, teacher, step.settings()),
        out,
        concurrency=2 * teacher.batch_size if is_local else server.concurrency or 64,
        progress=True,
        runner=None if server.ray is None else RayRunner(server.ray),
        **run.settings(),
    )
    _report(kept)


def _report(kept: Path) -> None:
    summary = json.loads((kept.parent / "summary.json").read_text(encoding="utf-8"))
    console.print(f"{summary['finished']} items: {summary['kept']} rows kept, {summary['dropped']} dropped.")
    for reason, count in summary["dropped_because"].items():
        console.print(f"  dropped, {reason}: {count}", markup=False, highlight=False)
    if summary["failed"]:
        console.print(f"{summary['failed']} items failed; failed.jsonl says why, and --retry-failed tries them again.")
    tokens = f"{summary['prompt_tokens']:,} tokens read and {summary['completion_tokens']:,} written"
    cost = f", cost {summary['cost']:,.2f}" if "cost" in summary else ""
    console.print(f"{summary['requests']:,} requests, {tokens}{cost}.", highlight=False)
    wrote(kept)


def _price(price_in: float | None, price_out: float | None) -> "Price | None":
    from ..synthesis.engine import Price

    if (price_in is None) != (price_out is None):
        fail("a cost needs both --price-in and --price-out")
    return None if price_in is None or price_out is None else Price(price_in, price_out)


def _open(server: _Server, temperature: float = 0.0) -> "Endpoint":
    require_text(endpoint=server.endpoint, teacher=server.teacher, ray=server.ray, api_key_env=server.api_key_env)
    if server.endpoint is None or server.teacher is None:
        fail("no teacher: give --endpoint URL and --teacher NAME")
    from ..synthesis.endpoint import Endpoint, EndpointSettings, read_key

    settings = EndpointSettings(
        server.endpoint,
        server.teacher,
        read_key(server.api_key_env),
        timeout=300.0 if server.timeout is None else server.timeout,
        temperature=temperature,
        extra_body=_json_object(server.extra_body),
    )
    return Endpoint(settings)


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"--extra-body is {text[:80]!r}; expected a JSON object.")
    return value


def _video_teacher(
    server: _Server, local: _Local, frames: int | None, scoring: Scoring | None, max_tokens: int
) -> "Teacher":
    if local.model is not None:
        _refuse(server, "--model is a teacher that runs here")
        if frames is not None:
            fail("--frames has no effect here: --model is a teacher that runs here; leave it out")
        return _local_teacher(local.model, local, scoring, max_tokens)
    _refuse(local, "it is about a teacher that runs here, with --model")
    from ..synthesis.endpoint_teacher import EndpointTeacher

    chosen = (scoring or Scoring.letter).value
    return EndpointTeacher(_open(server), frames or 16, scoring=chosen, max_tokens=max_tokens)


def _refuse(options: _Server | _Local, reason: str) -> None:
    """Ends the command for an option that would have no effect."""
    for field in fields(options):
        if getattr(options, field.name) is not None:
            fail(f"--{field.name.replace('_', '-')} has no effect here: {reason}; leave it out")


def _local_teacher(model: str, local: _Local, scoring: Scoring | None, max_tokens: int) -> "Teacher":
    check_model_options(model, local.revision, local.device)
    check_selection(local.selection)
    from ..backbones import OURS
    from ..synthesis.local_teacher import LocalTeacher, load_stock
    from ..training.models import model_type

    dtype = (local.dtype or Dtype.auto).value
    if model_type(model).endswith(OURS):
        loaded, processor = load_model(model, local.revision, local.device, dtype)
    else:
        if local.revision is not None or local.selection is not None:
            fail("--revision and --selection are about a QTSplus model; this one is stock, and reads all tokens")
        loaded, processor = load_stock(model, local.device, dtype)
    chosen = (scoring or Scoring.logprob).value
    return LocalTeacher(
        loaded, processor, model, local.batch_size or 16, chosen, max_tokens, local.selection, local.fps
    )


def _choices(path: Path) -> Iterator[Any]:
    from ..data.formats import iter_records
    from ..data.records import Choice

    for number, record in enumerate(iter_records(path), start=1):
        if not isinstance(record, Choice):
            raise ValueError(f"Row {number} of {path} is no single-choice question; expected what `vscq1` makes.")
        yield record


def _finder(path: Path, media_root: Path | None) -> Callable[[str], str]:
    """Where a question's video lies; ends the command where the first row is no question."""
    from ..data.formats import media_folder
    from ..data.media import find_media

    if media_root is not None and not media_root.is_dir():
        raise ValueError(f"There is no folder {media_root}; expected the one that the videos lie in.")
    root = media_folder(path, media_root)
    next(_choices(path), None)
    return lambda name: find_media(name, root)
