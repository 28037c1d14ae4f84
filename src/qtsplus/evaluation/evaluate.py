"""Asks a model questions about videos, and counts the right answers."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from string import ascii_uppercase
from typing import Any

from ..asking.answers import Answer
from ..asking.choice import Choice
from ..asking.question import Question, check_question
from ..asking.session import answer_file
from ..common.files import first_line
from ..data.records import VideoRecord, options_by_letter
from ..model.sampling_qtsplus import Sampling
from ..video.encoded import with_bar
from .matching import Matcher, is_exact

SENTENCE_TOKENS = 64  # at least so many new tokens are allowed if an answer may be a sentence


@dataclass(frozen=True)
class Outcome:
    """What came of asking a record's question: the model's answer, and whether it is right."""

    record: VideoRecord
    said: str = ""
    visual_tokens: int = 0  # of the whole video
    kept_tokens: int = 0  # those that the language model read
    correct: bool = False
    unreadable: str | None = None  # why the question could not be asked, or its answer not be judged


def evaluate_records(
    model,
    processor,
    records: Sequence[VideoRecord],
    *,
    choice: Choice = Choice(),
    sampling: Sampling = Sampling(),
    batch_size: int = 16,
    matcher: Matcher = is_exact,
    by_likelihood: bool = False,
) -> list[Outcome]:
    """
    Asks the questions of records with a video, decodes greedily, and returns an outcome for each record, in the same
    order. Each video is encoded once for all of its questions; `batch_size` of them are asked at a time.

    Args:
        choice: how the visual tokens of every question are chosen; by default as the model's configuration says.
        sampling: which frames of every video are looked at; the `fps` of a record replaces its own.
        matcher: says whether a text gives a record's answer (`matching.py`).
        by_likelihood: if a record has options, the model's answer is the letter of an option that it finds most likely
            as the first token; otherwise it answers freely.

    Raises:
        ValueError: for a folder of frames whose record has no rate; for a question longer than the model's positions;
            by likelihood for a question that does not name its options.
    """
    max_new_tokens = 0 if matcher is is_exact else SENTENCE_TOKENS
    # Records are asked together if they have the same video and rate, and by likelihood the same letters to choose.
    groups: dict[tuple, list[VideoRecord]] = {}
    for record in dict.fromkeys(records):
        video = str(record.video)
        fps = record.fps or sampling.fps
        if fps is None and os.path.isdir(video):
            raise ValueError(
                f'{video} is a folder of frames: give its rate, such as "fps": 2 in its records, or --fps 2.'
            )
        letters = ""
        if by_likelihood and record.options:
            letters = ascii_uppercase[: len(record.options)]
            question = " ".join(record.question.casefold().split())
            if not all(option in question for option in options_by_letter(record.options).values()):
                raise ValueError(f"{record.question!r} does not name its options: their letters would say nothing.")
        check_question(model, processor, record.question)
        max_new_tokens = max(max_new_tokens, len(processor.text_ids(record.answer)) + 2)
        groups.setdefault((video, fps, letters), []).append(record)
    outcomes = {}
    for (video, fps, letters), group in with_bar(groups.items(), "Asking"):
        generation: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        if letters:
            allowed = [processor.text_ids(letter)[0] for letter in letters]
            generation = {
                "max_new_tokens": 1,
                "prefix_allowed_tokens_fn": lambda row, written, allowed=allowed: allowed,
            }
        results = answer_file(
            model,
            processor,
            video,
            replace(sampling, fps=fps),
            [Question(record.question, record.query, record.turns, choice) for record in group],
            batch_size=batch_size,
            do_sample=False,
            **generation,
        )
        for number, result in results:
            record = group[number]
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
    """The outcome of an answer. If a judge cannot be reached, the answer counts as wrong, with the reason."""
    correct = False
    problem = None
    try:
        correct = matcher(record, answer.answer)
    except ValueError as error:
        problem = first_line(error)
    return Outcome(record, answer.answer, answer.visual_tokens, answer.kept_tokens, correct, problem)


def tally(outcomes: Sequence[Outcome]) -> dict:
    """
    What `qtsplus eval --json` prints beside the answers, for all questions and under `kinds` for each kind:

    - `questions`, `videos`: how many there are.
    - `accuracy`, `low`, `high`: the share of right answers and its Wilson 95% interval. The interval counts videos,
      since questions about one video are not independent.
    - `kept`: the fraction of the visual tokens that was kept, `None` if no video could be read.

    `unreadable` lists each video about which questions could not be asked, or their answers not be judged, with the
    reason for the first of these questions and their number.
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
    """Wilson's 95% interval of a share of `count` independent observations."""
    square = 1.96**2
    total = count + square
    middle = (share * count + square / 2) / total
    variance = share * (1 - share) * count + square / 4
    half = math.sqrt(square * variance) / total
    return max(0.0, middle - half), min(1.0, middle + half)
