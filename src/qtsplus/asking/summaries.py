"""Summaries: videos in chapters by change, each described from the tokens that cover it, with an overview of all."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from transformers import StoppingCriteria, StoppingCriteriaList

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

JOIN = "These are parts of a video in their order. Tell what happens in all of them together."
TOGETHER = 32  # texts that are joined at a time
LONGEST = 60.0  # seconds of a chapter, if the model was not trained on shorter videos only
REPEATS = 4  # A text that says the same so often in a row ends there.
REPEATED_TOKENS = 16  # the longest repetition that is looked for, in tokens
# Options of a question or of `generate` that cannot be the same for every chapter.
REFUSED = ("turns", "queries", "subtitles", "past_key_values", "cache")
_WORD = re.compile(r"\w+")
_CLOCK_TIME = re.compile(r"\d:\d\d")
_REPETITION = re.compile(rf"(\s.+?)\1{{{REPEATS - 1},}}$", re.DOTALL)


@dataclass(frozen=True)
class Chapter:
    """A stretch of a video, from second `start` to `end` on a player's clock, and what the model says of it."""

    video: str
    start: float
    end: float
    text: str
    kept_tokens: int
    visual_tokens: int


@dataclass(frozen=True)
class Summary:
    """What the model says of each chapter of videos, and of all of them together."""

    text: str  # a line for each chapter: its times, and what the model says of it
    # What the model makes of all chapters' texts, without times. `None` if there is one chapter, if it repeats fewer of
    # the chapters' words than a single chapter has, or if it states a time: the model is not shown any.
    overview: str | None
    chapters: list[Chapter]
    warnings: list[str]  # as in `EncodedVideo`
    frames: int  # that were looked at
    seconds_of_video: float
    unheard: bool  # whether a video has sound


class StopRepeating(StoppingCriteria):
    """Ends a text whose last tokens say the same thing [`REPEATS`] times in a row."""

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        """Which rows of `input_ids` `[B, S]` end, bool `[B]`."""
        ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        longest = min(REPEATED_TOKENS, input_ids.shape[1] // REPEATS)
        for length in range(1, longest + 1):
            tail = input_ids[:, -length * REPEATS :]
            repeats = tail.unflatten(1, (REPEATS, length))
            ended |= (repeats == repeats[:, :1]).all(2).all(1)
        return ended


def summarise(
    about,
    prompt: str = "Summarise the video.",
    *,
    names: Sequence[str] | None = None,
    chapter_seconds: float | None = None,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: str | Method = "coverage",
    max_new_tokens: int | None = None,
    progress: bool = False,
    **generation,
) -> Summary:
    """
    Summarises the videos of a session or of a library, chapter by chapter. Memory holds one video's features at a time.

    Args:
        about: a `VideoSession` or a `Library`.
        prompt: what is asked of each chapter.
        names: of the videos, all when absent.
        chapter_seconds: the longest chapter. A longer stretch is split where its features change most, else in the
            middle. By default a minute, or the longest video of the model's training (`trained_seconds`) if shorter.
        retention, max_visual_tokens, selection: as for `answer_questions`. Where neither count is given, as many as the
            configuration allows, `rho_max`: a prompt about everything needs more than a question about one thing.
        max_new_tokens: of each chapter, and of the overview; as for `answer_questions` when absent.
        progress: show a bar on standard error.
        generation: as for `generate`.

    Raises:
        ValueError: no video, a stream's memory, an empty prompt; as `answer_questions`.
    """
    if not hasattr(about, "film"):
        raise ValueError(f"Got {type(about).__name__} to summarise; expected a VideoSession or a Library.")
    refused = [option for option in REFUSED if option in generation]
    if refused:
        raise ValueError(f"Got {', '.join(refused)} for a summary, which asks each chapter the same: leave it out.")
    names = _check_names(names, about.names)
    model = about.model
    processor = about.processor
    if chapter_seconds is None:
        chapter_seconds = min(LONGEST, model.config.qtsplus_config.trained_seconds or LONGEST)
    require_positive("chapter_seconds", chapter_seconds)
    stops = StoppingCriteriaList(generation.pop("stopping_criteria", ()))
    stops.append(StopRepeating())
    generation["stopping_criteria"] = stops
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
            edges = list(chapter_steps(video, chapter_seconds))
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
                    text=_without_repetition(answer.answer),
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
        text=_with_times(chapters, name_videos=len(names) > 1),
        overview=_overview(model, processor, chapters, options),
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


def _with_times(chapters: Sequence[Chapter], name_videos: bool) -> str:
    """A line for each chapter with its own times, which no model wrote."""
    lines = []
    for chapter in chapters:
        span = f"{clock(chapter.start)} to {clock(chapter.end)}"
        if name_videos:
            span = f"{printable(chapter.video)}, {span}"
        lines.append(f"{span}: {chapter.text}")
    return "\n".join(lines)


def _without_repetition(text: str) -> str:
    """A text whose end says the same [`REPEATS`] times or more, with that said once."""
    return _REPETITION.sub(r"\1", text).strip()


def _overview(
    model,
    processor,
    chapters: Sequence[Chapter],
    options: dict[str, Any],
) -> str | None:
    """One text of all chapters: of groups of their texts, then of groups of what was made of those, until it is one."""
    texts = [chapter.text for chapter in chapters]
    if len(texts) < 2:
        return None
    most_words = max(len(_words(text)) for text in texts)
    chapter_words = _words(" ".join(texts))
    while len(texts) > 1:
        texts = [_join(model, processor, group, options) for group in batches_of(texts, TOGETHER)]
    (overview,) = texts
    repeated_words = _words(overview) & chapter_words
    if len(repeated_words) < most_words or _CLOCK_TIME.search(overview):
        return None
    return overview


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


@torch.no_grad()
def _join(
    model,
    processor,
    texts: Sequence[str],
    options: dict[str, Any],
) -> str:
    """One text that the model makes from several."""
    content = {"type": "text", "text": "\n".join([JOIN, *texts])}
    message = {"role": "user", "content": [content]}
    inputs = processor.conversation_inputs([[message]])
    inputs = inputs.to(model.device)
    new_tokens = options["max_new_tokens"]
    length = inputs["input_ids"].shape[1]
    positions = model.config.get_text_config().max_position_embeddings
    if length + new_tokens > positions:
        raise ValueError(
            f"The texts of {len(texts)} chapters take {length} positions and what joins them {new_tokens}; the model "
            f"has {positions}: ask for less (max_new_tokens)."
        )
    output = model.generate(**inputs, **options)
    new_ids = output.sequences[0, length:]
    text = processor.tokenizer.decode(new_ids, skip_special_tokens=True)
    return _without_repetition(text)
