"""`qtsplus data vscq1`, `vscq2`, `vqa` and `merge`: the paper's training sets, made with teacher models."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..output import check_folder
from .console import console, fail, one_line_errors, resumable, wrote
from .options import Dtype, MediaRoot

if TYPE_CHECKING:
    from ..synthesis.endpoint import Endpoint
    from ..synthesis.video_steps import Teacher


_ONLY_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def _option(help: str, *names: str, min: int | None = None, max: int | None = None) -> Any:
    return field(default=None, metadata={"option": typer.Option(None, *names, help=help, min=min, max=max)})


@dataclass(frozen=True)
class _Run:
    """How much is made."""

    shard: str | None = _option("Only this part, such as 2/8 for the second of eight machines; then `data merge`.")
    limit: int | None = _option("Only the first items, to see what they cost.", min=1, max=2**40)
    retry_failed: bool | None = _option("Try again what failed in an earlier run.", "--retry-failed")

    def settings(self) -> dict[str, Any]:
        """As `engine.run` takes them."""
        from ..synthesis.engine import Shard

        shard = None if self.shard is None else Shard.parse(self.shard)
        return {"shard": shard, "limit": self.limit, "retry_failed": bool(self.retry_failed)}


@dataclass(frozen=True)
class _Server:
    """A teacher behind an endpoint, whose key is in OPENAI_API_KEY."""

    endpoint: str | None = _option("An OpenAI-compatible API, such as http://localhost:8000/v1.")
    teacher: str | None = _option("The teacher's name at the endpoint.")
    timeout: float | None = _option("Seconds until a reply must be whole; 300 without it.")
    extra_body: str | None = _option("JSON for every request, such as '{\"temperature\": 0.2}'.")
    concurrency: int | None = _option("How many items are worked on at a time; 64 without it.", min=1, max=4096)


@dataclass(frozen=True)
class _VideoServer(_Server):
    """A video teacher behind an endpoint."""

    frames: int | None = _option("How many frames of a video it is sent; 16 without it.", min=1, max=4096)


@dataclass(frozen=True)
class _Local:
    """A video teacher that runs here."""

    model: str | None = _option("A teacher that runs here, in place of an endpoint: a folder or Hub id.")
    device: str | None = _option("Where to run, such as cuda or cpu. Without it, a GPU if there is one.")
    dtype: Dtype | None = _option("Of its weights; auto without it.")
    batch_size: int | None = _option("How many questions it reads at a time; 16 without it.", min=1, max=4096)
    fps: float | None = _option("For records without a rate: frames that a folder has, or to read of a file, a second.")


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: the fields of the dataclasses among its parameters are options of their own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    own = inspect.signature(command).parameters.values()
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=_ONLY_BY_NAME)
        for parameter in own
        if parameter.name not in groups
    ]
    for option in (option for group in groups.values() for option in fields(group)):
        default = option.metadata["option"]
        parameters.append(inspect.Parameter(option.name, _ONLY_BY_NAME, default=default, annotation=option.type))

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{option.name: values.pop(option.name) for option in fields(group)})
        with _one_line():
            # Before a teacher is loaded, which takes minutes.
            check_folder(values["out"])
            values["run"].settings()
            command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


_Questions = Annotated[Path, typer.Argument(help="Single-choice questions: JSONL or Parquet with options.")]
_Out = Annotated[Path, typer.Option(help="The folder for the set and the journal.")]


@_with_options
def vscq1(
    captions: Annotated[
        Path, typer.Argument(help="JSONL or Parquet with vision_id and caption, or a folder of texts beside videos.")
    ],
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
    server: _VideoServer,
    local: _Local,
    run: _Run,
    media_root: MediaRoot = None,
    drop_guessable: Annotated[
        bool, typer.Option("--drop-guessable", help="Also drop what the teacher answers right without the video.")
    ] = False,
) -> None:
    """Make QTS-VSCQ2: keep the questions that a video teacher answers right. The others go to dropped.jsonl."""
    from ..synthesis.video_steps import Screen

    find = _finder(questions, media_root)
    teacher = _video_teacher(server, local, max_tokens=64)
    step = Screen(teacher, find, drop_guessable)
    _make("vscq2", lambda: _choices(questions), step, teacher, out, server, run)


@_with_options
def vqa(
    questions: _Questions,
    out: _Out,
    server: _VideoServer,
    local: _Local,
    run: _Run,
    media_root: MediaRoot = None,
) -> None:
    """Make QTS-VQA: a video teacher's answers in words to the questions that were kept."""
    from ..synthesis.video_steps import WriteAnswers

    find = _finder(questions, media_root)
    teacher = _video_teacher(server, local, max_tokens=128)
    _make("vqa", lambda: _choices(questions), WriteAnswers(teacher, find), teacher, out, server, run)


def merge(out: Annotated[Path, typer.Argument(help="The --out of the shards, which holds their folders.")]) -> None:
    """Put the shards of several machines together, in the order of the input."""
    with _one_line():
        from ..synthesis.engine import merge as merge_shards

        _report(merge_shards(out))


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
            if (error.name or "").partition(".")[0] != "openai":
                raise
            fail("the package openai is not installed: pip install -e '.[data]' in a clone")


def _make(
    name: str, read: Callable[[], Iterator[Any]], step: Any, teacher: Any, out: Path, server: _Server, run: _Run
) -> None:
    from ..synthesis.engine import Job
    from ..synthesis.engine import run as run_job

    job = Job(name, read, step, teacher, step.settings())
    together = server.concurrency or (64 if server.endpoint else 2 * teacher.batch_size)
    _report(run_job(job, out, concurrency=together, progress=True, **run.settings()))


def _report(kept: Path) -> None:
    summary = json.loads((kept.parent / "summary.json").read_text(encoding="utf-8"))
    console.print(f"{summary['finished']} items: {summary['kept']} rows kept, {summary['dropped']} dropped.")
    for reason, count in summary["dropped_because"].items():
        console.print(f"  dropped, {reason}: {count}", markup=False, highlight=False)
    if summary["failed"]:
        console.print(f"{summary['failed']} items failed; failed.jsonl says why, and --retry-failed tries them again.")
    tokens = f"{summary['prompt_tokens']:,} tokens read and {summary['completion_tokens']:,} written"
    console.print(f"{summary['requests']:,} requests, {tokens}.", highlight=False)
    wrote(kept)


def _open(server: _Server, temperature: float = 0.0) -> "Endpoint":
    if server.endpoint is None or server.teacher is None:
        fail("no teacher: give --endpoint URL and --teacher NAME")
    from ..synthesis.endpoint import Endpoint, EndpointSettings, read_key

    timeout = 300.0 if server.timeout is None else server.timeout
    extra = {} if server.extra_body is None else _json_object(server.extra_body)
    return Endpoint(EndpointSettings(server.endpoint, server.teacher, read_key(), timeout, temperature, extra))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"--extra-body is {text[:80]!r}; expected a JSON object.")
    return value


def _video_teacher(server: _VideoServer, local: _Local, max_tokens: int) -> "Teacher":
    if local.model is not None:
        _refuse(server, "--model is a teacher that runs here")
        return _local_teacher(local.model, local, max_tokens)
    _refuse(local, "it is about a teacher that runs here, with --model")
    from ..synthesis.endpoint_teacher import EndpointTeacher

    return EndpointTeacher(_open(server), server.frames or 16, max_tokens=max_tokens)


def _refuse(options: _Server | _Local, reason: str) -> None:
    """Ends the command for an option that would have no effect."""
    for option in fields(options):
        if getattr(options, option.name) is not None:
            fail(f"--{option.name.replace('_', '-')} has no effect here: {reason}; leave it out")


def _local_teacher(model: str, local: _Local, max_tokens: int) -> "Teacher":
    from ..synthesis.local_teacher import LocalTeacher, load_teacher

    loaded, processor = load_teacher(model, local.device, (local.dtype or Dtype.auto).value)
    return LocalTeacher(loaded, processor, model, local.batch_size or 16, max_tokens, local.fps)


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
