"""Summaries: videos are split into chapters where they change. A model describes each chapter, then all of them."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from transformers import StoppingCriteria, StoppingCriteriaList

from ..common.files import clock, printable
from ..model.methods_qtsplus import MethodOrName
from ..model.numbers_qtsplus import require_count, require_positive
from ..video.encoded import EncodedVideo, with_bar
from .answers import answer_questions
from .generation import generation_options
from .question import check_names, conversation
from .ranking import Piece
from .recall import Remembered

JOIN = "These are parts of a video in their order. Tell what happens in all of them together."
LONGEST = 60.0  # the default of `chapter_seconds`, or the model's `trained_seconds` if that is lower
_WORD = re.compile(r"\w+")

# Small models repeat themselves. `StopRepeating` ends such a text early, which saves time. `_REPETITION` then finds the
# repeats that are already in the text, and only the first of them is kept.
REPEATS = 4  # A text ends when it says the same thing this many times in a row.
MAX_REPEATED_TOKENS = 16  # `StopRepeating` does not notice longer repetitions.
_REPETITION = re.compile(rf"(\s.+?)\1{{{REPEATS - 1},}}$", re.DOTALL)

# The model is told no times, so a time that it states is invented. `_TIME` finds such a time, with the words that lead
# to it. The pieces below are parts of `_TIME`; there, in the verbose form, a space is written as "\ ".
_AM_PM = r"(?:\ ?[ap](?:m\b|\.m\.))"  # "pm" or " p.m."
_CLOCK = rf"\d+(?::\d\d)+(?:\.\d+)?{_AM_PM}?"  # "0:05", "1:02:03.5" or "5:30 pm"
_COUNT = r"(?<![\w.])\d[\d.,]*(?:(?:-|–|\ to\ |\ and\ )\d[\d.,]*)?"  # "5", "1.5", "3-4" or "3 to 4"
_AMOUNT = r"""(?:
    \w+teen | \w+ty  # "fifteen" or "fifty"; that "city" fits too is harmless, since a unit of time has to follow
    | one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|hundred | dozens?(?:\ of)?
    | half | couple\ of | few|several|some|many|more|multiple|numerous|mere|long|short|full
)"""
# In these places a number with "s" is a time, as in "at 5 s", but not in "the 80s". Words of one length share a line,
# since Python looks back by a fixed number of characters.
_BEFORE_S = r"""(?:
    ^ | (?<=[\n(\[~–-]) | (?<=[^\w\s]\ )  # at the start of the text or of a line, or after a punctuation mark
    | (?<=\ba\ )
    | (?<=\b(?:at|to|by|in|or|of)\ )
    | (?<=\b(?:for|and)\ )
    | (?<=\b(?:from|last|next|than|over|just|only)\ )
    | (?<=\b(?:after|until|about|first|every|lasts|takes)\ )
    | (?<=\b(?:before|within|around)\ )
    | (?<=\b(?:between|another)\ )
)"""
_TIME = re.compile(
    rf"""
    \ ?(?:\b(?:at|after|before|from|to|until|between|for|in|within|by|about|around)\ )*
    (?:the\ (?:first|last|next)\ )?
    (?:
        # "0:05" or "[0:00 - 0:08]", but not "a ratio of 16:9" or "a mix of 1:10"
        (?<!(?:ratio|scale|score)\ of\ )(?<!mix\ of\ )[\[(]?\b{_CLOCK}(?:\ ?(?:-|–|to|and)\ ?{_CLOCK})?[\])]?
        # "20 seconds", "20-second", "3 to 4 mins" or "2h", but not "2H"
        | {_COUNT}[\ -]?(?:secs?|seconds?|mins?|minutes?|(?-i:h)|hours?)\b
        # "at 5 s" or "(1.5s", but not "the 80s" or "iPhone 4 s"
        | {_BEFORE_S}\d{{1,3}}(?:\.\d+)?\ ?s\b
        # "5 s later" or "the 30s mark"
        | (?<![\w.])\d{{1,3}}(?:\.\d+)?\ ?s(?=\ (?:later|ago|long|into|in|mark)\b)
        # "1h30" or "2m 30s"
        | \b(?:\d+h\ ?\d+m?|\d+m\ ?\d+s)\b
        # "5 pm"
        | (?<![\w.])\d{{1,2}}{_AM_PM}
        # "a few minutes", "forty five seconds" or "two and a half hours"
        | (?:\ba\ )?\b{_AMOUNT}(?:[\ -](?:(?:and|or|to|a)\ )*{_AMOUNT})*\ (?:seconds|minutes|hours)\b
        # "half a minute", "the last second" or "the 3rd hour"
        | \b(?:one|half\ an?|first|last|\d+(?:st|nd|rd|th))\ (?:second|minute|hour)\b
        # "a minute" or "a second later", but not "a second dog"
        | \ban?\ (?:minute|hour|second(?=\ (?:later|after|ago)))\b
        # "at second 20", but not "the second 3 cars" or "second 5-year-old"
        | (?<!the\ )\b(?:second|minute|hour)\ \d+\b(?!-)
    )
    (?:\ into\ the\ \w+)?[,:]?
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class Chapter:
    """
    A stretch of a video, and what the model says about it.

    Args:
        video: the video's name.
        start, end: seconds, as a player shows them.
        text: what the model says, without the times that it states.
        kept_tokens, visual_tokens: as in an `Answer`.
    """

    video: str
    start: float
    end: float
    text: str
    kept_tokens: int
    visual_tokens: int


@dataclass(frozen=True)
class Summary:
    """What the model says about each chapter, and about all chapters together."""

    text: str  # a line for each chapter: its video, its times, and what the model says about it, without times
    # One text that the model makes from the texts of all chapters. It is `None`
    # - if there is only one chapter;
    # - if there are more chapters than `max_new_tokens`, since it could not mention them all;
    # - if the texts of the chapters are too long for the model's positions;
    # - if it states a time, since the model is told no times;
    # - if it leaves a chapter out: it has no word that is typical of this chapter. Words are typical if at most half of
    #   the chapters have them. If a chapter has no such word, all of its words count as typical.
    overview: str | None
    chapters: list[Chapter]
    warnings: list[str]  # as in `AboutVideo`
    frames: int  # how many the model saw
    seconds_of_video: float
    unheard: bool  # whether a video has sound, which the model does not hear


class StopRepeating(StoppingCriteria):
    """Ends a text when its last tokens say the same thing [`REPEATS`] times in a row."""

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        """Which rows of `input_ids` `[B, S]` end, bool `[B]`."""
        ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        longest = min(MAX_REPEATED_TOKENS, input_ids.shape[1] // REPEATS)
        for length in range(1, longest + 1):
            repeats = input_ids[:, -length * REPEATS :].unflatten(1, (REPEATS, length))
            ended |= (repeats == repeats[:, :1]).all(2).all(1)
        return ended


def summarise(
    source,
    prompt: str = "Summarise the video.",
    *,
    names: Sequence[str] | None = None,
    chapter_seconds: float | None = None,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: MethodOrName = "coverage",
    max_new_tokens: int | None = None,
    **generation,
) -> Summary:
    """
    Summarises the videos of a session or of a library, chapter by chapter. Memory holds one video's features at a time.

    Args:
        source: a `VideoSession` or a `Library`.
        prompt: what is asked about each chapter.
        names: the videos to summarise; all of them by default.
        chapter_seconds: the most seconds of a chapter. A longer stretch is split where its features change most, or in
            the middle if they change equally. By default a minute, or the longest video in the model's training
            (`trained_seconds`) if that is shorter. It is raised until there are at most `max_visual_tokens` chapters,
            since every chapter needs a token.
        retention, selection: as for `answer_questions`. By default the fraction is `rho_max` of the configuration: a
            prompt about everything needs more tokens than a question about one thing.
        max_visual_tokens: the most that are kept of a video, shared out equally among its chapters.
        max_new_tokens: the most for each chapter, and for the overview; by default as for `answer_questions`.
        generation: as for `generate`.

    Raises:
        ValueError: without a video; for a name that no video has; for a stream's memory; for an empty prompt; and as
            `answer_questions` does.
    """
    if not hasattr(source, "video"):
        raise ValueError(f"Got {type(source).__name__} to summarise; expected a VideoSession or a Library.")
    if names is None:
        names = source.names
    check_names(names, source.names)
    model = source.model
    processor = source.processor
    selector = model.config.qtsplus_config
    if chapter_seconds is None:
        chapter_seconds = min(LONGEST, selector.trained_seconds or LONGEST)
    require_positive("chapter_seconds", chapter_seconds)
    options = generation_options(model, generation, max_new_tokens)
    stops = StoppingCriteriaList(generation.get("stopping_criteria") or ())
    stops.append(StopRepeating())
    generation["stopping_criteria"] = stops
    options["stopping_criteria"] = stops
    if max_visual_tokens is not None:
        max_visual_tokens = require_count("max_visual_tokens", max_visual_tokens)
    if retention is None and selection != "all":
        retention = selector.rho_max
    chapters = []
    lines = []
    abouts = []
    warnings = list(source.warnings)
    for name in names:
        video = source.video(name)
        if isinstance(video, Remembered):
            raise ValueError("A stream's memory has no chapters to summarise: ask it a question instead.")
        abouts.append(video.about)
        warnings += video.about.warnings
        bounds = chapter_steps(video, chapter_seconds, max_visual_tokens or inf)
        tokens_of_chapter = None
        if max_visual_tokens is not None:
            tokens_of_chapter = max_visual_tokens // len(bounds)
        if video.seconds_per_step > chapter_seconds:
            warnings.append(
                f"The chapters of {name} last {video.seconds_per_step:g} s, one step in time: encode more frames per "
                "second for shorter ones."
            )
        for first, last in with_bar(bounds, printable(name)):
            (answer,) = answer_questions(
                model,
                processor,
                {name: Piece(name, first, last).cut(video)},
                [prompt],
                retention=retention,
                max_visual_tokens=tokens_of_chapter,
                selection=selection,
                max_new_tokens=max_new_tokens,
                **generation,
            )
            start, end = video.span(first, last)
            text = _without_repetition(_TIME.sub("", answer.answer))
            chapters.append(Chapter(name, start, end, text, answer.kept_tokens, answer.visual_tokens))
            lines.append(f"{printable(name)}, {clock(start)} to {clock(end)}: {text}")
    return Summary(
        text="\n".join(lines),
        overview=_overview(model, processor, chapters, options),
        chapters=chapters,
        warnings=list(dict.fromkeys(warnings)),
        frames=sum(about.frames for about in abouts),
        seconds_of_video=sum(about.length for about in abouts),
        unheard=any(about.sound for about in abouts),
    )


def chapter_steps(video: EncodedVideo, longest: float, max_chapters: float = inf) -> list[tuple[int, int]]:
    """
    The chapters of a video in order: for each, its first step in the grid and the step after its last.

    A chapter takes at most `longest` seconds, which are raised until there are at most `max_chapters` chapters.
    """
    edges = video.steps
    num_steps = len(edges) - 1
    step_features = video.features.unflatten(0, (num_steps, -1)).float()
    difference = 1 - F.cosine_similarity(step_features[1:], step_features[:-1], dim=-1)
    changes = [0.0] + difference.mean(1).tolist()  # how much each step differs from the previous one

    def split(first: int, last: int) -> Iterator[tuple[int, int]]:
        count = last - first
        if count < 2 or edges[last] - edges[first] <= longest:
            yield first, last
            return
        shortest = max(1, count // 8)  # the fewest steps on each side of a cut
        middle = (first + last) / 2

        def preference(step: int):
            """Prefers the largest change and, among equal changes, the one nearest to the middle."""
            return round(changes[step], 4), -abs(step - middle)

        candidates = range(first + shortest, last - shortest + 1)
        cut = max(candidates, key=preference)
        yield from split(first, cut)
        yield from split(cut, last)

    while True:
        chapters = list(split(0, num_steps))
        if len(chapters) <= max_chapters:
            return chapters
        longest *= 1.1  # `split` reads the new value


def _without_repetition(text: str) -> str:
    """The text, in which an ending that says the same thing [`REPEATS`] times or more says it once."""
    return _REPETITION.sub(r"\1", text).strip()


def _overview(
    model,
    processor,
    chapters: Sequence[Chapter],
    options: dict[str, Any],
) -> str | None:
    """One text from the texts of all chapters, or `None`, as [`Summary`] says."""
    texts = [chapter.text for chapter in chapters if chapter.text]
    # With less than one new token for each chapter an overview cannot mention them all.
    if not 1 < len(texts) <= options["max_new_tokens"]:
        return None
    # If the texts are too long, `_join` gives an empty text, which leaves out all of them.
    overview = _join(model, processor, texts, options)
    if _TIME.search(overview) or _leaves_out(overview, texts):
        return None
    return overview


def _leaves_out(joined: str, texts: Sequence[str]) -> bool:
    """Whether a joined text leaves out one of the texts: it has no word that is typical of that text."""
    words_of_texts = [set(_WORD.findall(text.lower())) for text in texts]
    counts = Counter(chain.from_iterable(words_of_texts))
    common = {word for word, count in counts.items() if count > len(texts) / 2}
    joined_words = _WORD.findall(joined.lower())
    for words in words_of_texts:
        typical = (words - common) or words
        if typical.isdisjoint(joined_words):
            return True
    return False


@torch.no_grad()
def _join(
    model,
    processor,
    texts: Sequence[str],
    options: dict[str, Any],
) -> str:
    """One text that the model makes from several; an empty text if they take more positions than the model has."""
    text = "\n".join([JOIN, *texts])
    messages = conversation(videos=[], turns=[], texts=[text])
    inputs = processor.conversation_inputs([messages]).to(model.device)
    length = inputs["input_ids"].shape[1]
    if length + options["max_new_tokens"] > model.config.get_text_config().max_position_embeddings:
        return ""
    new_ids = model.generate(**inputs, **options).sequences[0, length:]
    text = processor.tokenizer.decode(new_ids, skip_special_tokens=True)
    return _without_repetition(text)
