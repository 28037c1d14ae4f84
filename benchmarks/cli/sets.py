"""`make`: the paper's sets of questions about videos, and summaries."""

import json
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from qtsplus.cli.console import console, fail, one_line_errors, resumable, wrote
from qtsplus.cli.options import MediaRoot


class Kind(str, Enum):
    vscq1 = "vscq1"
    vscq2 = "vscq2"
    vqa = "vqa"
    summaries = "summaries"


def make(
    kind: Annotated[Kind, typer.Argument(help="Which set.", metavar="vscq1|vscq2|vqa|summaries")],
    source: Annotated[
        Path, typer.Argument(help="Of vscq1 and summaries captions; of the others single-choice questions.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for the set and the journal.")],
    endpoint: Annotated[str, typer.Option(help="An OpenAI-compatible API, such as http://localhost:8000/v1.")],
    teacher: Annotated[str, typer.Option(help="The teacher's name at the endpoint.")],
    media_root: MediaRoot = None,
    frames: Annotated[
        int | None, typer.Option(help="How many frames of a video the teacher is sent; 16.", min=1, max=4096)
    ] = None,
    extra_body: Annotated[str, typer.Option(help="JSON for every request, such as '{\"temperature\": 0.2}'.")] = "{}",
    concurrency: Annotated[int, typer.Option(help="How many items are worked on at a time.", min=1, max=4096)] = 64,
    limit: Annotated[
        int | None, typer.Option(help="Only the first items, to see what they cost.", min=1, max=2**40)
    ] = None,
) -> None:
    """
    Make one of the paper's training sets, or summaries, with a teacher model.

    vscq1: single-choice questions that a language model writes about captions. vscq2: those of them that a video
    teacher answers right; the others go to dropped.jsonl. vqa: a video teacher's answers in words to what was kept.
    summaries: what a video teacher sees happen, in order, in the videos of captions, for `eval` to score by.
    """
    if kind is Kind.vscq1 and (media_root is not None or frames is not None):
        fail(f"--{'frames' if media_root is None else 'media-root'} is about videos, and vscq1 is made from captions")
    with one_line_errors(), resumable():
        if find_spec("openai") is None:
            fail("the package openai is not installed: pip install -e '.[data]' in a clone")
        from qtsplus.data.formats import media_folder
        from qtsplus.data.media import find_media

        from ..synthesis.endpoint import Endpoint, read_key
        from ..synthesis.engine import Job, RunFailed, run_job
        from ..synthesis.inputs import iter_captions, iter_choices
        from ..synthesis.questions import PROMPTS, write_questions
        from ..synthesis.video_steps import VideoTeacher, screen, write_answers, write_summaries

        server = Endpoint(endpoint, teacher, read_key(), extra_body=_read_extra(extra_body))
        read: Any = iter_captions if kind in (Kind.vscq1, Kind.summaries) else iter_choices
        if kind is Kind.vscq1:
            server.temperature = 0.7
            step, settings = partial(write_questions, server), {**server.settings(), "prompts": PROMPTS}
        else:
            find = partial(find_media, root=media_folder(source, media_root))
            steps = {Kind.vscq2: (screen, 64), Kind.vqa: (write_answers, 128), Kind.summaries: (write_summaries, 1024)}
            ask, max_tokens = steps[kind]
            seeing = VideoTeacher(server, find, frames or 16, max_tokens)
            step, settings = partial(ask, seeing), seeing.settings()
        try:
            kept = run_job(Job(kind.value, partial(read, source), step, server, settings), out, concurrency, limit)
        except RunFailed as error:
            fail(error, 1)
    made = json.loads((kept.parent / "summary.json").read_text(encoding="utf-8"))
    lines = [f"{made['finished']} items: {made['kept']} rows kept, {made['dropped']} dropped."]
    lines += [f"  dropped, {reason}: {count}" for reason, count in made["dropped_because"].items()]
    if made["failed"]:
        lines.append(f"{made['failed']} items failed, as failed.jsonl says; the same command tries them again.")
    tokens = f"{made['prompt_tokens']:,} tokens read and {made['completion_tokens']:,} written"
    console.print("\n".join([*lines, f"{made['requests']:,} requests, {tokens}."]), highlight=False)
    wrote(kept)


def _read_extra(extra_body: str) -> dict[str, Any]:
    try:
        extra = json.loads(extra_body)
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(f"--extra-body is {extra_body[:80]!r}; expected a JSON object.")
    return extra
