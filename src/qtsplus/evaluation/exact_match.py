"""Asks a model questions about videos, and counts the answers that match."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rich.console import Console
from rich.progress import track

from ..asking.answers import answer_questions, check_question
from ..common.files import first_line
from ..data.records import VideoRecord
from ..model.methods_qtsplus import Method
from ..training.dataset import SkippedRecord, require_rates
from ..video.encoded import FAILURES, EncodedVideo, encode
from .events import EVENTS, mean_scores, score_events

Video = tuple[str, float | None]  # its path and its rate


@dataclass(frozen=True)
class Outcome:
    """One question."""

    record: VideoRecord
    correct: bool  # what was `said` is the record's answer to the letter
    visual_tokens: int = 0
    rho: float = 0.0  # the fraction that the selection aimed at
    kept_indices: tuple[int, ...] = ()  # of the visual tokens, those that the language model read
    unreadable: SkippedRecord | None = None
    said: str = ""

    @property
    def kept_tokens(self) -> int:
        return len(self.kept_indices)


def exact_match(
    model,
    processor,
    records: Sequence[VideoRecord],
    *,
    retention: float | None = None,
    selection: str | Method | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> list[Outcome]:
    """
    Greedy answers to records with a video, compared with the records' own, letter for letter: an outcome for each. Each
    video is encoded once for all of its questions, of which `batch_size` are asked at a time. A `ValueError` for a
    folder of frames whose record does not give its rate, and for a question longer than the model's positions.
    """
    require_rates(records)
    for record in records:
        check_question(model, processor, record.question)
    longest = max((len(processor.text_ids(record.answer)) for record in records), default=0)
    options: dict = {
        "retention": retention,
        "selection": selection,
        "do_sample": False,
        "max_new_tokens": longest + 2,
    }
    by_video: dict[Video, list[int]] = {}
    for index, record in enumerate(records):
        by_video.setdefault((str(record.video), record.fps), []).append(index)
    outcomes: dict[int, Outcome] = {}
    for (name, fps), indices in track(by_video.items(), "Asking", console=Console(stderr=True), disable=not progress):
        try:
            video = encode(model, processor, name, fps=fps)
            for batch in _batches(records, indices, batch_size):
                asked = [records[index] for index in batch]
                for index, outcome in zip(batch, _ask(model, processor, video, asked, options), strict=True):
                    outcomes[index] = outcome
        except FAILURES as error:
            problem = SkippedRecord(name, first_line(error))
            for index in indices:
                outcomes.setdefault(index, Outcome(records[index], False, unreadable=problem))
    return [outcomes[index] for index in range(len(records))]


def _batches(
    records: Sequence[VideoRecord],
    indices: Sequence[int],
    batch_size: int,
) -> Iterator[list[int]]:
    """The indices in batches of questions after the same earlier turns."""
    by_earlier: dict[Any, list[int]] = {}
    for index in indices:
        by_earlier.setdefault(records[index].earlier, []).append(index)
    for group in by_earlier.values():
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


def _ask(
    model,
    processor,
    video: EncodedVideo,
    records: Sequence[VideoRecord],
    options: Mapping,
) -> list[Outcome]:
    """Asks the questions of one batch about a video."""
    questions = [record.question for record in records]
    queries = [record.query or record.question for record in records]
    turns = list(chain.from_iterable(records[0].earlier))
    videos = {video.video: video}
    answers = answer_questions(model, processor, videos, questions, queries=queries, turns=turns, **options)
    outcomes = []
    for record, answer in zip(records, answers, strict=True):
        kept = answer.keep_map.flatten().nonzero()[:, 0].tolist()
        outcome = Outcome(
            record,
            correct=answer.answer == record.answer,
            visual_tokens=answer.visual_tokens,
            rho=answer.rho,
            kept_indices=tuple(kept),
            said=answer.answer,
        )
        outcomes.append(outcome)
    return outcomes


def tally(outcomes: Sequence[Outcome]) -> dict:
    """
    Questions, videos, accuracy with Wilson's 95% interval over videos (questions about one video are not independent),
    and kept fraction (`None` where no video could be read); the same per kind, and the videos that could not be read,
    with the number of their questions. Of the kind "events" also the means of [`score_events`].
    """

    by_kind: dict[str, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.record.kind):
        by_kind.setdefault(outcome.record.kind, []).append(outcome)
    kinds = {kind: _row(of_kind) for kind, of_kind in by_kind.items()}
    if EVENTS in kinds:
        scores = [score_events(outcome.record.answer, outcome.said) for outcome in by_kind[EVENTS]]
        kinds[EVENTS].update(mean_scores(scores))
    problems = Counter(outcome.unreadable for outcome in outcomes if outcome.unreadable is not None)
    unreadable = []
    for problem, count in problems.items():
        unreadable.append({"video": problem.name, "reason": problem.reason, "questions": count})
    result: dict = dict(_row(outcomes))
    result["kinds"] = kinds
    result["unreadable"] = unreadable
    return result


def _row(outcomes: Sequence[Outcome]) -> dict[str, float | int | None]:
    videos = len({outcome.record.video for outcome in outcomes})
    accuracy = sum(outcome.correct for outcome in outcomes) / len(outcomes)
    low, high = _wilson_interval(accuracy, videos)
    visual_tokens = sum(outcome.visual_tokens for outcome in outcomes)
    kept = sum(outcome.kept_tokens for outcome in outcomes)
    return {
        "questions": len(outcomes),
        "videos": videos,
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "kept": kept / visual_tokens if visual_tokens else None,
    }


def _wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share among `count` independent things."""
    z = 1.96
    scale = 1 + z**2 / count
    middle = (share + z**2 / 2 / count) / scale
    variance = share * (1 - share) / count + (z / 2 / count) ** 2
    half = z / scale * math.sqrt(variance)
    return max(0.0, middle - half), min(1.0, middle + half)
