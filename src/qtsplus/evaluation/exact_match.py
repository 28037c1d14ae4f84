"""Asks a model questions about videos, and counts the answers that match."""

import math
from collections import Counter
from collections.abc import Sequence
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
from ..video.encoded import FAILURES, encode
from .events import EVENTS, mean_scores, score_events


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
    model: Any,
    processor: Any,
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
    outcomes: dict[int, Outcome] = {}
    videos: dict[Any, dict[Any, list[int]]] = {}  # by video and rate, by earlier turns
    for index, record in enumerate(records):
        videos.setdefault((str(record.video), record.fps), {}).setdefault(record.earlier, []).append(index)
    choice: dict[str, Any] = {"retention": retention, "selection": selection, "do_sample": False}
    choice["max_new_tokens"] = max((len(processor.text_ids(record.answer)) for record in records), default=0) + 2
    for (video, fps), asked in track(videos.items(), "Asking", console=Console(stderr=True), disable=not progress):
        try:
            encoded = {video: encode(model, processor, video, fps=fps)}
            for earlier, own in asked.items():
                turns = list(chain.from_iterable(earlier))
                for indices in (own[start : start + batch_size] for start in range(0, len(own), batch_size)):
                    batch = [records[index] for index in indices]
                    questions, queries = [one.question for one in batch], [one.query or one.question for one in batch]
                    choice |= {"queries": queries, "turns": turns}
                    answers = answer_questions(model, processor, encoded, questions, **choice)
                    for index, record, answer in zip(indices, batch, answers, strict=True):
                        kept = tuple(answer.keep_map.flatten().nonzero()[:, 0].tolist())
                        correct, tokens = answer.answer == record.answer, answer.visual_tokens
                        outcomes[index] = Outcome(record, correct, tokens, answer.rho, kept, said=answer.answer)
        except FAILURES as error:
            problem, waiting = SkippedRecord(video, first_line(error)), chain.from_iterable(asked.values())
            failed = [index for index in waiting if index not in outcomes]
            outcomes |= {index: Outcome(records[index], False, unreadable=problem) for index in failed}
    return [outcomes[index] for index in range(len(records))]


def tally(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """
    Questions, videos, accuracy with Wilson's 95% interval over videos (questions about one video are not independent),
    and kept fraction (`None` where no video could be read); the same per kind, and the videos that could not be read,
    with the number of their questions. Of the kind "events" also the means of [`score_events`].
    """

    def row(chosen: Sequence[Outcome]) -> dict[str, float | int | None]:
        videos = len({outcome.record.video for outcome in chosen})
        accuracy = sum(outcome.correct for outcome in chosen) / len(chosen)
        z = 1.96
        middle = (accuracy + z**2 / 2 / videos) / (1 + z**2 / videos)
        half = z / (1 + z**2 / videos) * math.sqrt(accuracy * (1 - accuracy) / videos + (z / 2 / videos) ** 2)
        visual_tokens = sum(outcome.visual_tokens for outcome in chosen)
        kept = sum(outcome.kept_tokens for outcome in chosen)
        return {
            "questions": len(chosen),
            "videos": videos,
            "accuracy": accuracy,
            "low": max(0.0, middle - half),
            "high": min(1.0, middle + half),
            "kept": kept / visual_tokens if visual_tokens else None,
        }

    kinds = sorted({outcome.record.kind for outcome in outcomes})
    by_kind = {kind: row([outcome for outcome in outcomes if outcome.record.kind == kind]) for kind in kinds}
    if EVENTS in by_kind:
        told = [outcome for outcome in outcomes if outcome.record.kind == EVENTS]
        by_kind[EVENTS] |= mean_scores([score_events(outcome.record.answer, outcome.said) for outcome in told])
    problems = Counter(outcome.unreadable for outcome in outcomes if outcome.unreadable is not None)
    return {
        **row(outcomes),
        "kinds": by_kind,
        "unreadable": [
            {"video": problem.name, "reason": problem.reason, "questions": count} for problem, count in problems.items()
        ],
    }
