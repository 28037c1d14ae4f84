"""Summaries: films in chapters by change, each told from the tokens that cover it, joined by the model into one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress

from ..common.files import printable
from ..common.validation import show
from ..library.library import Library, clock
from ..model.methods_qtsplus import Method, check_budget
from ..model.video_qtsplus import require_positive
from ..video.encoded import EncodedVideo
from .answers import answer_questions, check_question, generation_options
from .ranking import Piece
from .recall import Remembered
from .session import VideoSession

JOIN = "These are parts of a video in their order, with their times. Tell what happens in all of them together."
TOGETHER = 32  # parts that are joined at a time
SIDE_BY_SIDE = 16  # prompts that the language model reads at a time, at most
AT_ONCE = 4096  # their tokens, of which a longer prompt is read alone
ALONE = ("prompt_lookup_num_tokens", "min_length", "max_time", "guidance_scale")  # of a model's own configuration
REFUSED = ("turns", "queries", "subtitles", "past_key_values", "cache")  # of the options of a question


@dataclass(frozen=True)
class Chapter:
    """A stretch of a film, from second `start` to `end` on a player's clock, and what the model says of it."""

    video: str
    start: float
    end: float
    text: str
    kept_tokens: int
    visual_tokens: int


Part = tuple[Chapter, Chapter, str]  # from the begin of one to the end of another, and what is said of it


@dataclass(frozen=True)
class Summary:
    """What the model says of films: of all of them, and of each chapter."""

    text: str
    chapters: list[Chapter]
    warnings: list[str]  # as in `EncodedVideo`
    frames: int  # that were looked at
    seconds_of_video: float
    unheard: bool  # whether a film has sound


def summarise(
    about: VideoSession | Library,
    prompt: str = "Summarise the video.",
    *,
    names: Sequence[str] | None = None,
    longest: float = 60.0,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: str | Method = "coverage",
    max_new_tokens: int | None = None,
    progress: bool = False,
    **generation: Any,
) -> Summary:
    """
    Summarises the videos of a session or of a library: chapter by chapter, which the model then joins. Memory holds one
    film's features at a time, and the language model reads up to 16 chapters of 4,096 tokens in all, or one.

    Args:
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
    if not isinstance(about, VideoSession | Library):
        raise ValueError(f"Got {type(about).__name__} to summarise; expected a VideoSession or a Library.")
    model, processor = about.model, about.processor
    require_positive("longest", longest)
    check_question(model, processor, prompt)
    if refused := [option for option in REFUSED if option in generation]:
        raise ValueError(f"Got {', '.join(refused)} for a summary, which asks each chapter the same: leave it out.")
    check_budget(selection, [retention], 1, max_visual_tokens)
    known = dict.fromkeys(about.names)
    names = [*known] if names is None else names
    if not isinstance(names, list | tuple) or not names or {*map(type, names)} != {str} or not {*names} <= {*known}:
        raise ValueError(f"names={show(names)}: no video to summarise; expected a list, some of {show(about.names)}.")
    if isinstance(about, VideoSession) and any(isinstance(about.videos[name], Remembered) for name in names):
        raise ValueError("What a stream remembers has no chapters to summarise: ask about it.")
    if retention is None and max_visual_tokens is None and selection != "all":
        retention = model.config.qtsplus_config.rho_max
    choice: dict[str, Any] = {"retention": retention, "max_visual_tokens": max_visual_tokens, "selection": selection}
    longest_text = generation_options(model, generation, max_new_tokens)["max_new_tokens"]
    writing: dict[str, Any] = {**generation, "max_new_tokens": longest_text}
    alone = bool(generation) or any(getattr(model.generation_config, option, None) for option in ALONE)
    chapters, warnings = [], [*about.warnings] if isinstance(about, Library) else []
    frames, seconds, unheard, words = 0, 0.0, False, len(processor.text_ids(prompt))
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("Summarising", total=len(names))
        for number, name in enumerate(names):
            film = about.film(name) if isinstance(about, Library) else about.videos[name]
            frames, seconds, unheard = frames + film.frames, seconds + film.length, unheard or film.sound
            warnings += [warning for warning in film.warnings if warning not in warnings]
            edges, a_step = list(chapter_steps(film, longest)), len(film.features) / film.count * (retention or 1)
            sizes = [min((last - first) * a_step, max_visual_tokens or AT_ONCE) + words for first, last in edges]
            for group in _side_by_side(edges, sizes, alone):
                videos = [{name: Piece(name, first, last, 0.0).cut(film)} for first, last in group]
                answers = answer_questions(model, processor, videos, [prompt] * len(group), **choice, **writing)
                for steps, one in zip(group, answers, strict=True):
                    chapters.append(Chapter(name, *film.span(*steps), one.answer, one.kept_tokens, one.visual_tokens))
                bar.update(task, completed=number + (edges.index(group[-1]) + 1) / len(edges))
    parts = [(one, one, one.text) for one in chapters]
    while len(parts) > 1:
        groups = [parts[start : start + TOGETHER] for start in range(0, len(parts), TOGETHER)]
        few = _side_by_side(groups, [len(group) * longest_text for group in groups], alone)
        texts = [text for some in few for text in _join(model, processor, some, writing)]
        parts = [(group[0][0], group[-1][1], text) for group, text in zip(groups, texts, strict=True)]
    return Summary(parts[0][2], chapters, warnings, frames, seconds, unheard)


def chapter_steps(film: EncodedVideo, longest: float) -> Iterator[tuple[int, int]]:
    """The chapters of a film in turn, as steps of its grid from one on, up to another that is not part of it."""
    edges = film.steps
    tokens = film.features.unflatten(0, (len(edges) - 1, -1)).float()
    change = [0.0, *(1 - F.cosine_similarity(tokens[1:], tokens[:-1], dim=-1)).mean(1).tolist()]  # from the step before

    def parted(first: int, last: int) -> Iterator[tuple[int, int]]:
        if edges[last] - edges[first] <= longest or last - first < 2:
            yield first, last
            return
        spare = max(1, (last - first) // 8)  # steps that neither part is without
        middle = (first + last) / 2
        cut = max(range(first + spare, last - spare + 1), key=lambda at: (round(change[at], 4), -abs(at - middle)))
        yield from parted(first, cut)
        yield from parted(cut, last)

    return parted(0, len(edges) - 1)


def _side_by_side(items: Sequence[Any], sizes: Sequence[float], alone: bool) -> Iterator[list[Any]]:
    """Items in their order, as many at a time as the language model may read, padded to the longest."""
    group, longest, most = list[Any](), 0.0, 1 if alone else SIDE_BY_SIDE
    for item, size in zip(items, sizes, strict=True):
        if group and (len(group) == most or max(longest, size) * (len(group) + 1) > AT_ONCE):
            yield group
            group, longest = [], 0.0
        group, longest = [*group, item], max(longest, size)
    yield group


@torch.no_grad()
def _join(model: Any, processor: Any, groups: list[list[Part]], writing: dict[str, Any]) -> list[str]:
    """Of each group of stretches, from the begin of one chapter to the end of another, one text of their texts."""
    asked = []
    for parts in groups:
        lines = [JOIN]
        for first, last, text in parts:
            until = clock(last.end) if first.video == last.video else f"{printable(last.video)}, {clock(last.end)}"
            lines.append(f"{printable(first.video)}, {clock(first.start)} to {until}: {text}")
        asked.append([{"role": "user", "content": [{"type": "text", "text": "\n".join(lines)}]}])
    inputs = processor.conversation_inputs(asked).to(model.device)
    options = generation_options(model, writing, writing["max_new_tokens"])
    length, room = inputs["input_ids"].shape[1], model.config.get_text_config().max_position_embeddings
    if length + writing["max_new_tokens"] > room:
        raise ValueError(
            f"The texts of {max(map(len, groups))} chapters take {length} positions and what joins them "
            f"{writing['max_new_tokens']}; the model has {room}: ask for less (max_new_tokens)."
        )
    ids = model.generate(**inputs, **options).sequences[:, length:]
    return [text.strip() for text in processor.tokenizer.batch_decode(ids, skip_special_tokens=True)]
