"""`qtsplus data vscq1`, `vscq2` and `vqa`: the paper's training sets, made with teacher models behind an endpoint."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import complain, console, fail, one_line_errors, resumable, wrote
from .options import MediaRoot

if TYPE_CHECKING:
    from ..synthesis.endpoint import Endpoint
    from ..synthesis.engine import Job
    from ..synthesis.video_steps import VideoTeacher

_Questions = Annotated[Path, typer.Argument(help="Single-choice questions: JSONL or Parquet with options.")]
_Out = Annotated[Path, typer.Option(help="The folder for the set and the journal.")]
_Url = Annotated[str, typer.Option(help="An OpenAI-compatible API, such as http://localhost:8000/v1.")]
_Teacher = Annotated[str, typer.Option(help="The teacher's name at the endpoint.")]
_Timeout = Annotated[float, typer.Option(help="Seconds until a reply must be whole.", min=0.001, max=86_400)]
_Extra = Annotated[str, typer.Option(help="JSON for every request, such as '{\"temperature\": 0.2}'.")]
_Concurrency = Annotated[int, typer.Option(help="How many items are worked on at a time.", min=1, max=4096)]
_Frames = Annotated[int, typer.Option(help="How many frames of a video the teacher is sent.", min=1, max=4096)]
_Limit = Annotated[int | None, typer.Option(help="Only the first items, to see what they cost.", min=1, max=2**40)]


def vscq1(
    captions: Annotated[Path, typer.Argument(help="JSONL, JSON or Parquet with vision_id and caption.")],
    out: _Out,
    endpoint: _Url,
    teacher: _Teacher,
    timeout: _Timeout = 300.0,
    extra_body: _Extra = "{}",
    concurrency: _Concurrency = 64,
    limit: _Limit = None,
) -> None:
    """Make QTS-VSCQ1: single-choice questions that a language model writes about captions."""
    with _one_line():
        from ..data.formats import iter_captions
        from ..synthesis.engine import Job
        from ..synthesis.questions import PROMPTS, write_questions

        server = _open(endpoint, teacher, timeout, extra_body, temperature=0.7)
        settings = {**server.settings(), "prompts": PROMPTS}
        job = Job("vscq1", lambda: iter_captions(captions), partial(write_questions, server), server, settings)
        _make(job, out, concurrency, limit)


def vscq2(
    questions: _Questions,
    out: _Out,
    endpoint: _Url,
    teacher: _Teacher,
    media_root: MediaRoot = None,
    frames: _Frames = 16,
    timeout: _Timeout = 300.0,
    extra_body: _Extra = "{}",
    concurrency: _Concurrency = 64,
    limit: _Limit = None,
) -> None:
    """Make QTS-VSCQ2: keep the questions that a video teacher answers right. The others go to dropped.jsonl."""
    with _one_line():
        from ..synthesis.video_steps import VideoTeacher, screen

        video_teacher = VideoTeacher(_open(endpoint, teacher, timeout, extra_body), frames, max_tokens=64)
        _ask("vscq2", screen, questions, media_root, video_teacher, out, concurrency, limit)


def vqa(
    questions: _Questions,
    out: _Out,
    endpoint: _Url,
    teacher: _Teacher,
    media_root: MediaRoot = None,
    frames: _Frames = 16,
    timeout: _Timeout = 300.0,
    extra_body: _Extra = "{}",
    concurrency: _Concurrency = 64,
    limit: _Limit = None,
) -> None:
    """Make QTS-VQA: a video teacher's answers in words to the questions that were kept."""
    with _one_line():
        from ..synthesis.video_steps import VideoTeacher, write_answers

        video_teacher = VideoTeacher(_open(endpoint, teacher, timeout, extra_body), frames, max_tokens=128)
        _ask("vqa", write_answers, questions, media_root, video_teacher, out, concurrency, limit)


@contextmanager
def _one_line() -> Iterator[None]:
    """Ends a command in one line: for bad input with exit code 2, for a run of which nothing came with 1."""
    from ..synthesis.engine import RunFailed

    with one_line_errors(), resumable():
        try:
            yield
        except RunFailed as error:
            complain(str(error))
            raise typer.Exit(1) from None
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "openai":
                raise
            fail("the package openai is not installed: pip install -e '.[data]' in a clone")


def _ask(
    name: str,
    step: Any,
    questions: Path,
    media_root: Path | None,
    teacher: "VideoTeacher",
    out: Path,
    concurrency: int,
    limit: int | None,
) -> None:
    """Asks a video teacher every question."""
    from ..data.formats import media_folder
    from ..data.media import find_media
    from ..synthesis.engine import Job

    if media_root is not None and not media_root.is_dir():
        raise ValueError(f"There is no folder {media_root}; expected the one that the videos lie in.")
    find = partial(find_media, root=media_folder(questions, media_root))
    asked = partial(step, teacher, find)
    _make(Job(name, lambda: _choices(questions), asked, teacher.endpoint, teacher.settings()), out, concurrency, limit)


def _make(job: "Job", out: Path, concurrency: int, limit: int | None) -> None:
    from ..synthesis.engine import run

    kept = run(job, out, concurrency=concurrency, limit=limit)
    summary = json.loads((kept.parent / "summary.json").read_text(encoding="utf-8"))
    console.print(f"{summary['finished']} items: {summary['kept']} rows kept, {summary['dropped']} dropped.")
    for reason, count in summary["dropped_because"].items():
        console.print(f"  dropped, {reason}: {count}", highlight=False)
    if summary["failed"]:
        console.print(f"{summary['failed']} items failed, as failed.jsonl says; the same command tries them again.")
    tokens = f"{summary['prompt_tokens']:,} tokens read and {summary['completion_tokens']:,} written"
    console.print(f"{summary['requests']:,} requests, {tokens}.", highlight=False)
    wrote(kept)


def _open(url: str, teacher: str, timeout: float, extra_body: str, temperature: float = 0.0) -> "Endpoint":
    from ..synthesis.endpoint import Endpoint, read_key

    try:
        extra = json.loads(extra_body)
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(f"--extra-body is {extra_body[:80]!r}; expected a JSON object.")
    return Endpoint(url, teacher, read_key(), timeout, temperature, extra)


def _choices(path: Path) -> Iterator[Any]:
    from ..data.formats import iter_records
    from ..data.records import Choice

    for number, record in enumerate(iter_records(path), start=1):
        if not isinstance(record, Choice):
            raise ValueError(f"Row {number} of {path} is no single-choice question; expected what `vscq1` makes.")
        yield record
