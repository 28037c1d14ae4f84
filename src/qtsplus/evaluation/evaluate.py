"""Asks a model questions about videos, and counts the right answers."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from string import ascii_uppercase
from typing import Any

from ..asking.answers import Answer
from ..asking.choice import Choice
from ..asking.question import Question, check_question
from ..asking.session import answer_file
from ..common.files import first_line
from ..data.records import VideoRecord, options_by_letter
from ..model.methods_qtsplus import MethodOrName
from ..model.sampling_qtsplus import Sampling
from ..video.encoded import with_bar
from .matching import Matcher, is_exact

SENTENCE = 64  # the most new tokens, at least, where an answer may be a sentence around the record's answer


@dataclass(frozen=True)
class Outcome:
    """A record's question, the model's answer, and whether it is right."""

    record: VideoRecord
    said: str = ""
    visual_tokens: int = 0
    kept_tokens: int = 0  # how many visual tokens the language model read
    correct: bool = False
    unreadable: str | None = None  # why it could not be asked or judged, such as a video that cannot be read


def evaluate_records(
    model,
    processor,
    records: Sequence[VideoRecord],
    *,
    retention: float | None = None,
    selection: MethodOrName | None = None,
    batch_size: int = 16,
    matcher: Matcher = is_exact,
    by_likelihood: bool = False,
) -> list[Outcome]:
    """
    Asks the questions of records with a video, decodes greedily, and returns an outcome for each record. Each video is
    encoded once for all of its questions; `batch_size` of them are asked at a time.

    Args:
        matcher: says whether a text gives a record's answer (`matching.py`).
        by_likelihood: if a record has options, its answer is the letter that the model finds most likely.

    Raises:
        ValueError: for a folder of frames whose record has no rate; for a question longer than the model's positions;
            by likelihood for a question that does not name its options.
    """
    max_new_tokens = 0 if matcher is is_exact else SENTENCE
    for record in records:
        if record.fps is None and os.path.isdir(str(record.video)):
            raise ValueError(f'{record.video} is a folder of frames: give its rate in its records, such as "fps": 2.')
        if by_likelihood and record.options:
            shown = " ".join(record.question.casefold().split())
            if not all(option in shown for option in options_by_letter(record.options).values()):
                raise ValueError(f"{record.question!r} does not name its options: their letters would say nothing.")
        check_question(model, processor, record.question)
        max_new_tokens = max(max_new_tokens, len(processor.text_ids(record.answer)) + 2)
    choice = Choice(retention=retention, selection=selection)
    groups: dict[tuple, list[VideoRecord]] = {}  # by what the records that are asked together have in common
    for record in dict.fromkeys(records):
        letters = ascii_uppercase[: len(record.options or ())] if by_likelihood else ""
        groups.setdefault((str(record.video), record.fps, letters), []).append(record)
    outcomes = {}
    for (video, fps, letters), asked in with_bar(groups.items(), "Asking"):
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        if letters:
            allowed = [processor.text_ids(letter)[0] for letter in letters]
            options = {"max_new_tokens": 1, "prefix_allowed_tokens_fn": lambda row, written, allowed=allowed: allowed}
        results = answer_file(
            model,
            processor,
            video,
            Sampling(fps=fps),
            [Question(record.question, record.query, record.turns, choice) for record in asked],
            batch_size=batch_size,
            do_sample=False,
            **options,
        )
        for number, result in results:
            record = asked[number]
            if isinstance(result, Answer):
                outcomes[record] = _outcome(record, result, matcher)
            else:
                outcomes[record] = Outcome(record, unreadable=first_line(result))
    return [outcomes[record] for record in records]


def _outcome(
    record: VideoRecord,
    answer: Answer,
    matcher: Matcher,
) -> Outcome:
    """The outcome of an answer, which a judge may be unable to reply about."""
    correct = False
    problem = None
    try:
        correct = matcher(record, answer.answer)
    except ValueError as error:
        problem = first_line(error)
    return Outcome(record, answer.answer, answer.visual_tokens, answer.kept_tokens, correct, problem)


def tally(outcomes: Sequence[Outcome]) -> dict:
    """
    Counts questions and videos, and gives the accuracy, its Wilson 95% interval and the kept fraction (`None` if no
    video could be read): for all questions and for each kind. The interval counts videos, since questions about one
    video are not independent. Videos about which questions could not be asked are listed with the reason of the first
    and with the number of such questions.
    """
    by_kind: dict[str, list[Outcome]] = {}
    unreadable: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.record.kind, []).append(outcome)
        if outcome.unreadable is not None:
            video = str(outcome.record.video)
            unread = {"video": video, "reason": outcome.unreadable, "questions": 0}
            unreadable.setdefault(video, unread)["questions"] += 1
    return _row(outcomes) | {
        "kinds": {kind: _row(asked) for kind, asked in sorted(by_kind.items())},
        "unreadable": list(unreadable.values()),
    }


def _row(outcomes: Sequence[Outcome]) -> dict:
    videos = len({outcome.record.video for outcome in outcomes})
    visual_tokens = sum(outcome.visual_tokens for outcome in outcomes)
    accuracy = fmean(outcome.correct for outcome in outcomes)
    low, high = _wilson_interval(accuracy, videos)
    return {
        "questions": len(outcomes),
        "videos": videos,
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "kept": sum(outcome.kept_tokens for outcome in outcomes) / visual_tokens if visual_tokens else None,
    }


def _wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share among `count` independent things."""
    square = 1.96**2
    total = count + square
    middle = (share * count + square / 2) / total
    variance = share * (1 - share) * count + square / 4
    half = math.sqrt(square * variance) / total
    return max(0.0, middle - half), min(1.0, middle + half)
