"""Summaries: videos in chapters by change, each told from the tokens that cover it, joined by the model into one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress

from ..common.files import clock, printable
from ..common.validation import show
from ..model.methods_qtsplus import Method, check_budget
from ..model.sampling_qtsplus import require_positive
from ..model.video_qtsplus import AboutVideo
from ..video.encoded import EncodedVideo
from .answers import answer_batch
from .choice import Choice
from .generation import generation_options
from .question import Question, check_question
from .ranking import Piece
from .recall import Remembered
from .session import VideoSession, batches_of

JOIN = "These are parts of a video in their order, with their times. Tell what happens in all of them together."
TOGETHER = 32  # parts that are joined at a time
SIDE_BY_SIDE = 16  # prompts that the language model reads at a time, at most
AT_ONCE = 4096  # their tokens, of which a longer prompt is read alone
ALONE = ("prompt_lookup_num_tokens", "min_length", "max_time", "guidance_scale")  # of a model's own configuration
# Options of a question or of `generate` that cannot be the same for every chapter.
REFUSED = ("turns", "queries", "subtitles", "videos", "past_key_values", "cache")

T = TypeVar("T")


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
    video's features at a time, and the language model reads up to 16 chapters of 4,096 tokens in all, or one.

    Args:
        about: a `VideoSession` or a `Library`.
        prompt: what is asked of each chapter.
        names: of the videos, all when absent.
        longest: seconds of a chapter. A longer stretch is parted where its features change most, else in the middle.
        retention, max_visual_tokens, selection: as for `answer_questions`. Where neither count is given, as many as the
            configuration allows, `rho_max`: a prompt about everything needs more than a question about one thing.
        max_new_tokens: of each chapter, and of what joins them; as for `answer_questions` when absent.
        progress: show a bar on standard error.
        generation: as for `generate`, which then reads chapter by chapter.

    Raises:
        ValueError: no video, a stream's memory, an empty prompt; as `answer_questions`.
    """
    if not hasattr(about, "film"):
        raise ValueError(f"Got {type(about).__name__} to summarise; expected a VideoSession or a Library.")
    model = about.model
    processor = about.processor
    require_positive("longest", longest)
    check_question(model, processor, prompt)
    refused = [option for option in REFUSED if option in generation]
    if refused:
        raise ValueError(f"Got {', '.join(refused)} for a summary, which asks each chapter the same: leave it out.")
    check_budget(selection, [retention], 1, max_visual_tokens)
    names = _check_names(about, names)
    if retention is None and max_visual_tokens is None and selection != "all":
        retention = model.config.qtsplus_config.rho_max
    writing = dict(generation)
    writing["max_new_tokens"] = generation_options(model, generation, max_new_tokens)["max_new_tokens"]
    teller = _Teller(
        model=model,
        processor=processor,
        prompt=prompt,
        choice=Choice(retention, max_visual_tokens, selection),
        writing=writing,
        alone=bool(generation) or any(getattr(model.generation_config, option, None) for option in ALONE),
    )
    chapters = []
    known: list[AboutVideo] = []
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("Summarising", total=len(names))
        for number, name in enumerate(names):
            video = about.film(name)
            known.append(video.about)
            edges = list(chapter_steps(video, longest))
            told = 0
            for group in teller.tell(name, video, edges):
                chapters += group
                told += len(group)
                bar.update(task, completed=number + told / len(edges))
    warnings = list(about.warnings)
    for video_known in known:
        warnings += video_known.warnings
    return Summary(
        text=teller.join(chapters),
        chapters=chapters,
        warnings=list(dict.fromkeys(warnings)),
        frames=sum(video.frames for video in known),
        seconds_of_video=sum(video.length for video in known),
        unheard=any(video.sound for video in known),
    )


def _check_names(about, names: Sequence[str] | None) -> Sequence[str]:
    known = set(about.names)
    if names is None:
        names = about.names
    is_list = isinstance(names, list | tuple)
    if not is_list or not names or not all(isinstance(name, str) and name in known for name in names):
        raise ValueError(f"names={show(names)}: no video to summarise; expected a list, some of {show(about.names)}.")
    if isinstance(about, VideoSession) and any(isinstance(about.film(name), Remembered) for name in names):
        raise ValueError("What a stream remembers has no chapters to summarise: ask about it.")
    return names


@dataclass(frozen=True)
class _Teller:
    """A model and how it tells what happens in chapters."""

    model: Any
    processor: Any
    prompt: str
    choice: Choice
    writing: dict  # options of `generate`, with `max_new_tokens`
    alone: bool  # whether the model reads one prompt at a time

    def tell(self, name: str, video: EncodedVideo, edges: Sequence[tuple[int, int]]) -> Iterator[list[Chapter]]:
        """The chapters of a video between these steps, as many at a time as are read together."""
        tokens_per_step = len(video.features) / video.count * (self.choice.retention or 1)
        most_visual = self.choice.max_visual_tokens or AT_ONCE
        words = len(self.processor.text_ids(self.prompt))
        sizes = []
        for first, last in edges:
            visual = (last - first) * tokens_per_step
            sizes.append(min(visual, most_visual) + words)
        for group in _side_by_side(edges, sizes, self.alone):
            questions = []
            for first, last in group:
                chapter = Piece(name, first, last, 0.0).cut(video)
                questions.append(Question({name: chapter}, self.prompt, choice=self.choice))
            answers = answer_batch(self.model, self.processor, questions, **self.writing)
            chapters = []
            for (first, last), answer in zip(group, answers, strict=True):
                start, end = video.span(first, last)
                chapters.append(Chapter(name, start, end, answer.answer, answer.kept_tokens, answer.visual_tokens))
            yield chapters

    def join(self, chapters: Sequence[Chapter]) -> str:
        """One text of all chapters: of groups of them, then of groups of what was said of those, until one is left."""
        parts = [Part(chapter, chapter, chapter.text) for chapter in chapters]
        while len(parts) > 1:
            groups = list(batches_of(parts, TOGETHER))
            sizes = [len(group) * self.writing["max_new_tokens"] for group in groups]
            parts = []
            for batch in _side_by_side(groups, sizes, self.alone):
                texts = _join(self.model, self.processor, batch, self.writing)
                for group, text in zip(batch, texts, strict=True):
                    parts.append(Part(group[0].first, group[-1].last, text))
        return parts[0].text


def chapter_steps(video: EncodedVideo, longest: float) -> Iterator[tuple[int, int]]:
    """The chapters of a video in turn, each by its first step of the grid and the step behind its last."""
    edges = video.steps
    tokens = video.features.unflatten(0, (len(edges) - 1, -1)).float()
    likeness = F.cosine_similarity(tokens[1:], tokens[:-1], dim=-1)
    changes = [0.0] + (1 - likeness).mean(1).tolist()  # of each step from the one before

    def parted(first: int, last: int) -> Iterator[tuple[int, int]]:
        count = last - first
        if count < 2 or edges[last] - edges[first] <= longest:
            yield first, last
            return
        shortest = max(1, count // 8)  # steps of either part
        middle = (first + last) / 2

        def preference(step: int) -> tuple[float, float]:
            """The largest change; among equal ones, the nearest to the middle."""
            return round(changes[step], 4), -abs(step - middle)

        cut = max(range(first + shortest, last - shortest + 1), key=preference)
        yield from parted(first, cut)
        yield from parted(cut, last)

    return parted(0, len(edges) - 1)


def _side_by_side(items: Sequence[T], sizes: Sequence[float], alone: bool) -> Iterator[list[T]]:
    """Items in their order, as many at a time as the language model may read, padded to the longest."""
    most = 1 if alone else SIDE_BY_SIDE
    group: list[T] = []
    longest = 0.0
    for item, size in zip(items, sizes, strict=True):
        longest = max(longest, size)
        if group and (len(group) == most or longest * (len(group) + 1) > AT_ONCE):
            yield group
            group = []
            longest = size
        group.append(item)
    yield group


@torch.no_grad()
def _join(model, processor, groups: Sequence[Sequence[Part]], writing: dict) -> list[str]:
    """One text for each group of parts, made by the model from their texts and times."""
    conversations = []
    for parts in groups:
        lines = [JOIN]
        for first, last, text in parts:
            begin = f"{printable(first.video)}, {clock(first.start)}"
            end = clock(last.end)
            if first.video != last.video:
                end = f"{printable(last.video)}, {end}"
            lines.append(f"{begin} to {end}: {text}")
        content = {"type": "text", "text": "\n".join(lines)}
        conversations.append([{"role": "user", "content": [content]}])
    inputs = processor.conversation_inputs(conversations).to(model.device)
    new_tokens = writing["max_new_tokens"]
    length = inputs["input_ids"].shape[1]
    positions = model.config.get_text_config().max_position_embeddings
    if length + new_tokens > positions:
        raise ValueError(
            f"The texts of {max(map(len, groups))} chapters take {length} positions and what joins them "
            f"{new_tokens}; the model has {positions}: ask for less (max_new_tokens)."
        )
    options = generation_options(model, writing, new_tokens)
    ids = model.generate(**inputs, **options).sequences[:, length:]
    return [text.strip() for text in processor.tokenizer.batch_decode(ids, skip_special_tokens=True)]
