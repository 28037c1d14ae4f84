"""`qtsplus data vscq1`, `vscq2`, `vqa` and `merge`: the paper's training sets, made with teacher models."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import console, fail, one_line_errors, require_text, resumable, wrote
from .models import load_model
from .options import Device, Dtype, Revision, Selection

if TYPE_CHECKING:
    from ..synthesis.endpoint import Endpoint
    from ..synthesis.engine import Job
    from ..synthesis.progress import Price
    from ..synthesis.video_teachers import Teacher


class Scoring(str, Enum):
    logprob = "logprob"
    letter = "letter"


class Send(str, Enum):
    frames = "frames"
    video = "video"


_Out = Annotated[
    Path, typer.Option(help="The folder for the set, what was dropped, and the journal.", show_default=False)
]
_Questions = Annotated[
    Path, typer.Argument(help="Single-choice questions: JSONL or Parquet with options.", show_default=False)
]
_MediaRoot = Annotated[
    Path | None, typer.Option(help="The folder in which vision_id is looked for. Without it, beside the questions.")
]
_Endpoint = Annotated[
    str | None, typer.Option("--endpoint", help="An OpenAI-compatible API, such as http://localhost:8000/v1.")
]
_Name = Annotated[str | None, typer.Option("--teacher", help="The teacher's name at the endpoint.")]
_Local = Annotated[
    str | None,
    typer.Option(
        "--model", help="A folder or Hub id of a teacher that runs here, in place of an endpoint: QTSplus or stock."
    ),
]
_KeyVariable = Annotated[str, typer.Option("--api-key-env", help="The environment variable with the API key.")]
_KeyFile = Annotated[Path | None, typer.Option("--api-key-file", help="A file with the API key, instead.")]
_Temperature = Annotated[float, typer.Option(help="Of the teacher's sampling.")]
_Timeout = Annotated[float, typer.Option(help="Seconds until an answer must be whole.")]
_PerMinute = Annotated[float | None, typer.Option(help="Send at most this many requests per minute.")]
_Body = Annotated[
    str | None,
    typer.Option(
        help='JSON for every request, such as \'{"chat_template_kwargs": {"enable_thinking": false}}\'.',
    ),
]
_Concurrency = Annotated[int, typer.Option(help="How many items are worked on at a time.", min=1)]
_Batch = Annotated[int, typer.Option(help="How many questions a teacher that runs here reads at a time.", min=1)]
_Shard = Annotated[
    str | None, typer.Option(help="Only this part, such as 2/8 for the second of eight machines; then `data merge`.")
]
_Ray = Annotated[
    str | None,
    typer.Option(
        help="Spread the requests over the machines of a Ray cluster: its address, auto for the one that this machine "
        "belongs to, or local for one of this machine alone.",
    ),
]
_Limit = Annotated[int | None, typer.Option(help="Only the first items, to see what they cost.", min=1)]
_Retry = Annotated[bool, typer.Option("--retry-failed", help="Try again what failed in an earlier run.")]
_PriceIn = Annotated[float | None, typer.Option(help="Price of a million tokens that the teacher reads.", min=0)]
_PriceOut = Annotated[float | None, typer.Option(help="Price of a million tokens that the teacher writes.", min=0)]
_Fps = Annotated[
    float | None,
    typer.Option(
        help="For a teacher that runs here and records without a rate. For a file: how many frames to look at per "
        "second. For a folder: how many frames it has per second."
    ),
]
_Scoring = Annotated[
    Scoring | None,
    typer.Option(
        help="Choose by the log-probability of the letters, or by the letter that is said. Without it, logprob for a "
        "teacher that runs here and letter for an endpoint."
    ),
]
_Send = Annotated[Send, typer.Option(help="What an endpoint is sent: frames as images, or the video file.")]
_Frames = Annotated[int, typer.Option(help="How many frames of a video an endpoint is sent.", min=1)]
_Side = Annotated[int, typer.Option(help="The longest side of such a frame in pixels.", min=28)]
_KEY_VARIABLE = "OPENAI_API_KEY"


def vscq1(
    captions: Annotated[
        Path,
        typer.Argument(
            help="Captions: JSONL or Parquet with vision_id and caption, or a folder of texts beside videos.",
            show_default=False,
        ),
    ],
    out: _Out,
    endpoint: _Endpoint = None,
    teacher: _Name = None,
    per_caption: Annotated[int, typer.Option(help="Questions of each caption, each of another type.")] = 3,
    rounds: Annotated[int, typer.Option(help="How often a reply that cannot be used is asked for, in all.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Of a reply.", min=1)] = 2048,
    temperature: _Temperature = 0.7,
    api_key_env: _KeyVariable = _KEY_VARIABLE,
    api_key_file: _KeyFile = None,
    timeout: _Timeout = 300.0,
    requests_per_minute: _PerMinute = None,
    extra_body: _Body = None,
    concurrency: _Concurrency = 64,
    shard: _Shard = None,
    ray: _Ray = None,
    limit: _Limit = None,
    retry_failed: _Retry = False,
    price_in: _PriceIn = None,
    price_out: _PriceOut = None,
) -> None:
    """Make QTS-VSCQ1: single-choice questions that a language model writes about captions."""
    with _making():
        from ..data.formats import iter_captions
        from ..synthesis.engine import Job
        from ..synthesis.questions import WriteQuestions

        asked = _open_endpoint(
            endpoint, teacher, api_key_env, api_key_file, temperature, timeout, requests_per_minute, extra_body, ray
        )
        step = WriteQuestions(asked, per_caption, rounds, max_tokens)
        job = Job("vscq1", lambda: iter_captions(captions), step, asked, step.settings())
        _run(job, out, concurrency, shard, limit, retry_failed, _price(price_in, price_out), ray)


def vscq2(
    questions: _Questions,
    out: _Out,
    media_root: _MediaRoot = None,
    endpoint: _Endpoint = None,
    teacher: _Name = None,
    model: _Local = None,
    revision: Revision = None,
    scoring: _Scoring = None,
    drop_guessable: Annotated[
        bool, typer.Option("--drop-guessable", help="Also drop what the teacher answers right without the video.")
    ] = False,
    send: _Send = Send.frames,
    frames: _Frames = 16,
    longest_side: _Side = 640,
    fps: _Fps = None,
    selection: Selection = None,
    device: Device = None,
    dtype: Dtype = Dtype.auto,
    batch_size: _Batch = 16,
    temperature: _Temperature = 0.0,
    api_key_env: _KeyVariable = _KEY_VARIABLE,
    api_key_file: _KeyFile = None,
    timeout: _Timeout = 300.0,
    requests_per_minute: _PerMinute = None,
    extra_body: _Body = None,
    concurrency: _Concurrency = 64,
    shard: _Shard = None,
    ray: _Ray = None,
    limit: _Limit = None,
    retry_failed: _Retry = False,
    price_in: _PriceIn = None,
    price_out: _PriceOut = None,
) -> None:
    """Make QTS-VSCQ2: keep the questions that a video teacher answers right. The others go to dropped.jsonl."""
    with _making():
        from ..synthesis.engine import Job
        from ..synthesis.screening import Screen

        chosen: Teacher
        if model is None:
            asked = _open_endpoint(
                endpoint, teacher, api_key_env, api_key_file, temperature, timeout, requests_per_minute, extra_body, ray
            )
            chosen = _endpoint_teacher(asked, send, frames, longest_side, scoring, max_tokens=64)
        else:
            _only_local(endpoint, teacher, ray)
            chosen = _local_teacher(model, revision, device, dtype, batch_size, scoring, selection, fps, max_tokens=16)
            concurrency = 2 * batch_size
        step = Screen(chosen, _finder(questions, media_root), drop_guessable)
        job = Job("vscq2", lambda: _choices(questions), step, chosen, step.settings())
        _run(job, out, concurrency, shard, limit, retry_failed, _price(price_in, price_out), ray)


def vqa(
    questions: _Questions,
    out: _Out,
    media_root: _MediaRoot = None,
    endpoint: _Endpoint = None,
    teacher: _Name = None,
    model: _Local = None,
    revision: Revision = None,
    fewest_words: Annotated[int, typer.Option(help="Drop shorter answers.")] = 1,
    most_words: Annotated[int, typer.Option(help="Drop longer answers.")] = 80,
    max_tokens: Annotated[int, typer.Option(help="Of an answer; what is cut off is dropped.", min=1)] = 128,
    send: _Send = Send.frames,
    frames: _Frames = 16,
    longest_side: _Side = 640,
    fps: _Fps = None,
    selection: Selection = None,
    device: Device = None,
    dtype: Dtype = Dtype.auto,
    batch_size: _Batch = 16,
    temperature: _Temperature = 0.0,
    api_key_env: _KeyVariable = _KEY_VARIABLE,
    api_key_file: _KeyFile = None,
    timeout: _Timeout = 300.0,
    requests_per_minute: _PerMinute = None,
    extra_body: _Body = None,
    concurrency: _Concurrency = 64,
    shard: _Shard = None,
    ray: _Ray = None,
    limit: _Limit = None,
    retry_failed: _Retry = False,
    price_in: _PriceIn = None,
    price_out: _PriceOut = None,
) -> None:
    """Make QTS-VQA: a video teacher's answers in words to the questions that were kept."""
    with _making():
        from ..synthesis.answering import WriteAnswers
        from ..synthesis.engine import Job

        chosen: Teacher
        if model is None:
            asked = _open_endpoint(
                endpoint, teacher, api_key_env, api_key_file, temperature, timeout, requests_per_minute, extra_body, ray
            )
            chosen = _endpoint_teacher(asked, send, frames, longest_side, Scoring.letter, max_tokens)
        else:
            _only_local(endpoint, teacher, ray)
            letter = Scoring.letter
            chosen = _local_teacher(model, revision, device, dtype, batch_size, letter, selection, fps, max_tokens)
            concurrency = 2 * batch_size
        step = WriteAnswers(chosen, _finder(questions, media_root), fewest_words, most_words)
        job = Job("vqa", lambda: _choices(questions), step, chosen, step.settings())
        _run(job, out, concurrency, shard, limit, retry_failed, _price(price_in, price_out), ray)


def merge(
    out: Annotated[
        Path, typer.Argument(help="The --out of the shards, which holds their folders.", show_default=False)
    ],
    price_in: _PriceIn = None,
    price_out: _PriceOut = None,
) -> None:
    """Put the shards of several machines together, in the order of the input."""
    with one_line_errors():
        from ..synthesis.engine import merge as merge_shards

        _report(merge_shards(out, _price(price_in, price_out)))


@contextmanager
def _making() -> Iterator[None]:
    with one_line_errors(), resumable():
        try:
            yield
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            extra = {"openai": "data", "tenacity": "data", "ray": "ray"}.get(package)
            if extra is None:
                raise
            fail(f"the package {package} is not installed: pip install 'qtsplus[{extra}]'")


def _run(
    job: "Job",
    out: Path,
    concurrency: int,
    shard: str | None,
    limit: int | None,
    retry_failed: bool,
    price: "Price | None",
    ray: str | None,
) -> None:
    from ..synthesis.engine import Shard, run
    from ..synthesis.ray_runner import RayRunner

    part = None if shard is None else Shard.parse(shard)
    settings: dict[str, Any] = {"shard": part, "limit": limit, "retry_failed": retry_failed, "price": price}
    runner = None if ray is None else RayRunner(ray)
    _report(run(job, out, concurrency=concurrency, progress=True, runner=runner, **settings))


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
    from ..synthesis.progress import Price

    if (price_in is None) != (price_out is None):
        fail("a cost needs both --price-in and --price-out")
    return None if price_in is None or price_out is None else Price(price_in, price_out)


def _open_endpoint(
    endpoint: str | None,
    teacher: str | None,
    variable: str,
    file: Path | None,
    temperature: float,
    timeout: float,
    requests_per_minute: float | None,
    extra_body: str | None,
    ray: str | None,
) -> "Endpoint":
    require_text(endpoint=endpoint, teacher=teacher, ray=ray)
    if ray is not None and requests_per_minute is not None:
        fail("--requests-per-minute counts in one process; with --ray, bound the requests by --concurrency")
    if endpoint is None or teacher is None:
        fail("no teacher: give --endpoint URL and --teacher NAME")
    from ..synthesis.endpoint import Endpoint, EndpointSettings, read_key

    settings = EndpointSettings(
        endpoint,
        teacher,
        read_key(variable, file),
        timeout=timeout,
        requests_per_minute=requests_per_minute,
        temperature=temperature,
        extra_body=_json_object(extra_body),
    )
    return Endpoint(settings)


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"--extra-body is {text[:80]!r}; expected a JSON object.")
    return found


def _only_local(endpoint: str | None, teacher: str | None, ray: str | None) -> None:
    if endpoint is not None or teacher is not None:
        fail("--model is a teacher that runs here; leave out --endpoint and --teacher")
    if ray is not None:
        fail("--ray spreads requests to an endpoint; for a teacher that runs here, give each machine its --shard")


def _endpoint_teacher(
    endpoint: "Endpoint", send: Send, frames: int, longest_side: int, scoring: Scoring | None, max_tokens: int
) -> "Teacher":
    from ..synthesis.endpoint_teacher import EndpointTeacher

    chosen = scoring or Scoring.letter
    return EndpointTeacher(endpoint, send.value, frames, longest_side, chosen.value, max_tokens)


def _local_teacher(
    model: str,
    revision: str | None,
    device: str | None,
    dtype: Dtype,
    batch_size: int,
    scoring: Scoring | None,
    selection: str | None,
    fps: float | None,
    max_tokens: int,
) -> "Teacher":
    from ..backbones import OURS
    from ..methods_qtsplus import METHODS
    from ..synthesis.local_teacher import LocalTeacher, load_stock
    from ..training.models import model_type

    require_text(model=model, revision=revision, device=device)
    if selection is not None and selection not in METHODS:
        fail(f"--selection is {selection!r}; expected one of {', '.join(METHODS)}")
    if model_type(model).endswith(OURS):
        loaded, processor = load_model(model, revision, device, dtype.value)
    else:
        if revision is not None or selection is not None:
            fail("--revision and --selection are about a QTSplus model; this one is stock, and reads all tokens")
        loaded, processor = load_stock(model, device, dtype.value)
    chosen = scoring or Scoring.logprob
    return LocalTeacher(loaded, processor, model, batch_size, chosen.value, max_tokens, selection, fps)


def _choices(path: Path) -> Iterator[Any]:
    from ..data.formats import iter_records
    from ..data.records import Choice

    for number, record in enumerate(iter_records(path), start=1):
        if not isinstance(record, Choice):
            raise ValueError(f"Row {number} of {path} is no single-choice question; expected what `vscq1` makes.")
        yield record


def _finder(path: Path, media_root: Path | None) -> Callable[[str], str]:
    from ..data.formats import media_folder
    from ..data.media import find_media

    if media_root is not None and not media_root.is_dir():
        raise ValueError(f"There is no folder {media_root}; expected the one that the videos lie in.")
    root = media_folder(path, media_root)
    return lambda name: find_media(name, root)
