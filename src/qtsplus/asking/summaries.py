"""Summaries: videos in chapters by change, each told from the tokens that cover it, joined by the model into one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress

from ..common.files import clock, printable
from ..common.validation import show
from ..model.methods_qtsplus import Method
from ..model.sampling_qtsplus import require_positive
from ..model.video_qtsplus import AboutVideo
from ..video.encoded import EncodedVideo
from .answers import answer_questions
from .generation import generation_options
from .ranking import Piece
from .recall import Remembered
from .session import batches_of

JOIN = "These are parts of a video in their order, with their times. Tell what happens in all of them together."
TOGETHER = 32  # parts that are joined at a time
# Options of a question or of `generate` that cannot be the same for every chapter.
REFUSED = ("turns", "queries", "subtitles", "past_key_values", "cache")


@dataclass(frozen=True)
class Chapter:
    """A stretch of a video, from second `start` to `end` on a player's clock, and what the model says of it."""

    video: str
    start: float
    end: float
    text: str
    kept_tokens: int
    visual_tokens: int


class Part(NamedTuple):
    """What is said of a stretch, from the begin of one chapter to the end of another."""

    first: Chapter
    last: Chapter
    text: str


@dataclass(frozen=True)
class Summary:
    """What the model says of videos: of all of them, and of each chapter."""

    text: str
    chapters: list[Chapter]
    warnings: list[str]  # as in `EncodedVideo`
    frames: int  # that were looked at
    seconds_of_video: float
    unheard: bool  # whether a video has sound


def summarise(
    about,
    prompt: str = "Summarise the video.",
    *,
    names: Sequence[str] | None = None,
    longest: float = 60.0,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: str | Method = "coverage",
    max_new_tokens: int | None = None,
    progress: bool = False,
    **generation,
) -> Summary:
    """
    Summarises the videos of a session or of a library: chapter by chapter, which the model then joins. Memory holds one
    video's features at a time.

    Args:
        about: a `VideoSession` or a `Library`.
        prompt: what is asked of each chapter.
        names: of the videos, all when absent.
        longest: seconds of a chapter. A longer stretch is parted where its features change most, else in the middle.
        retention, max_visual_tokens, selection: as for `answer_questions`. Where neither count is given, as many as the
            configuration allows, `rho_max`: a prompt about everything needs more than a question about one thing.
        max_new_tokens: of each chapter, and of what joins them; as for `answer_questions` when absent.
        progress: show a bar on standard error.
        generation: as for `generate`.

    Raises:
        ValueError: no video, a stream's memory, an empty prompt; as `answer_questions`.
    """
    if not hasattr(about, "film"):
        raise ValueError(f"Got {type(about).__name__} to summarise; expected a VideoSession or a Library.")
    require_positive("longest", longest)
    refused = [option for option in REFUSED if option in generation]
    if refused:
        raise ValueError(f"Got {', '.join(refused)} for a summary, which asks each chapter the same: leave it out.")
    names = _check_names(names, about.names)
    model = about.model
    processor = about.processor
    if retention is None and max_visual_tokens is None and selection != "all":
        retention = model.config.qtsplus_config.rho_max
    chapters = []
    known: list[AboutVideo] = []
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("Summarising", total=len(names))
        for name in names:
            video = about.film(name)
            if isinstance(video, Remembered):
                raise ValueError("What a stream remembers has no chapters to summarise: ask about it.")
            known.append(video.about)
            edges = list(chapter_steps(video, longest))
            for first, last in edges:
                (answer,) = answer_questions(
                    model,
                    processor,
                    {name: Piece(name, first, last).cut(video)},
                    [prompt],
                    retention=retention,
                    max_visual_tokens=max_visual_tokens,
                    selection=selection,
                    max_new_tokens=max_new_tokens,
                    **generation,
                )
                start, end = video.span(first, last)
                chapter = Chapter(
                    video=name,
                    start=start,
                    end=end,
                    text=answer.answer,
                    kept_tokens=answer.kept_tokens,
                    visual_tokens=answer.visual_tokens,
                )
                chapters.append(chapter)
                bar.advance(task, 1 / len(edges))
    warnings = list(about.warnings)
    for video_known in known:
        warnings += video_known.warnings
    options = generation_options(model, generation, max_new_tokens)
    return Summary(
        text=_join_all(model, processor, chapters, options),
        chapters=chapters,
        warnings=list(dict.fromkeys(warnings)),
        frames=sum(video.frames for video in known),
        seconds_of_video=sum(video.length for video in known),
        unheard=any(video.sound for video in known),
    )


def _check_names(
    names: Sequence[str] | None,
    known: Sequence[str],
) -> Sequence[str]:
    """The videos to summarise, all that are known by default."""
    if names is None:
        names = known
    are_good = False
    if isinstance(names, list | tuple) and names:
        are_good = all(name in known for name in names)
    if not are_good:
        raise ValueError(f"names={show(names)}: no video to summarise; expected a list, some of {show(known)}.")
    return names


def chapter_steps(video: EncodedVideo, longest: float) -> Iterator[tuple[int, int]]:
    """The chapters of a video in turn, each by its first step of the grid and the step behind its last."""
    edges = video.steps
    steps = len(edges) - 1
    tokens = video.features.unflatten(0, (steps, -1)).float()
    later = tokens[1:]
    earlier = tokens[:-1]
    difference = 1 - F.cosine_similarity(later, earlier, dim=-1)
    changes = [0.0] + difference.mean(1).tolist()  # of each step from the one before

    def parted(first: int, last: int) -> Iterator[tuple[int, int]]:
        count = last - first
        seconds = edges[last] - edges[first]
        if count < 2 or seconds <= longest:
            yield first, last
            return
        shortest = max(1, count // 8)  # steps of either part
        middle = (first + last) / 2

        def preference(step: int) -> tuple[float, float]:
            """The largest change; among equal ones, the nearest to the middle."""
            change = round(changes[step], 4)
            return change, -abs(step - middle)

        candidates = range(first + shortest, last - shortest + 1)
        cut = max(candidates, key=preference)
        yield from parted(first, cut)
        yield from parted(cut, last)

    return parted(0, steps)


def _join_all(
    model,
    processor,
    chapters: Sequence[Chapter],
    options: dict[str, Any],
) -> str:
    """One text of all chapters: of groups of them, then of groups of what was said of those, until one is left."""
    parts = [Part(chapter, chapter, chapter.text) for chapter in chapters]
    while len(parts) > 1:
        joined = []
        for group in batches_of(parts, TOGETHER):
            text = _join(model, processor, group, options)
            first = group[0].first
            last = group[-1].last
            joined.append(Part(first, last, text))
        parts = joined
    return parts[0].text


@torch.no_grad()
def _join(
    model,
    processor,
    parts: Sequence[Part],
    options: dict[str, Any],
) -> str:
    """One text that the model makes from the texts of parts and their times."""
    lines = [JOIN]
    for first, last, text in parts:
        begin = f"{printable(first.video)}, {clock(first.start)}"
        end = clock(last.end)
        if first.video != last.video:
            end = f"{printable(last.video)}, {end}"
        lines.append(f"{begin} to {end}: {text}")
    content = {"type": "text", "text": "\n".join(lines)}
    message = {"role": "user", "content": [content]}
    inputs = processor.conversation_inputs([[message]])
    inputs = inputs.to(model.device)
    new_tokens = options["max_new_tokens"]
    length = inputs["input_ids"].shape[1]
    positions = model.config.get_text_config().max_position_embeddings
    if length + new_tokens > positions:
        raise ValueError(
            f"The texts of {len(parts)} chapters take {length} positions and what joins them {new_tokens}; the model "
            f"has {positions}: ask for less (max_new_tokens)."
        )
    output = model.generate(**inputs, **options)
    new_ids = output.sequences[0, length:]
    text = processor.tokenizer.decode(new_ids, skip_special_tokens=True)
    return text.strip()
