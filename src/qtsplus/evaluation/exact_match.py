"""Asks a model questions about videos, and counts the answers that match."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from transformers.utils import logging

from ..asking.answers import Answer
from ..asking.choice import Choice
from ..asking.question import Question, check_question
from ..asking.session import answer_file
from ..common.files import first_line
from ..data.records import VideoRecord
from ..model.methods_qtsplus import Method
from ..training.dataset import require_rates
from ..video.sampling import Sampling

Video = tuple[str, float | None]  # its place, and the rate at which it is read


@dataclass(frozen=True)
class Outcome:
    """One question."""

    record: VideoRecord
    said: str = ""
    visual_tokens: int = 0
    kept_indices: tuple[int, ...] = ()  # of the visual tokens, those that the language model read
    unreadable: str | None = None  # why its video could not be read

    @property
    def kept_tokens(self) -> int:
        return len(self.kept_indices)

    @property
    def correct(self) -> bool:
        """Whether what was said is the record's answer to the letter."""
        return self.unreadable is None and self.said == self.record.answer


def exact_match(
    model,
    processor,
    records: Sequence[VideoRecord],
    *,
    retention: float | None = None,
    selection: str | Method | None = None,
    batch_size: int = 16,
) -> list[Outcome]:
    """
    Greedy answers to records with a video, compared with the records' own, letter for letter: an outcome for each. Each
    video is encoded once for all of its questions, of which `batch_size` are asked at a time. A `ValueError` for a
    folder of frames whose record does not give its rate, and for a question longer than the model's positions.
    """
    require_rates(records)
    longest = 0
    for record in records:
        check_question(model, processor, record.question)
        longest = max(longest, len(processor.text_ids(record.answer)))
    choice = Choice(retention=retention, selection=selection)
    by_video: dict[Video, list[VideoRecord]] = {}
    for record in dict.fromkeys(records):
        video = (str(record.video), record.fps)
        by_video.setdefault(video, []).append(record)
    outcomes: dict[VideoRecord, Outcome] = {}
    for (name, fps), asked in logging.tqdm(by_video.items(), "Asking", disable=None):
        results = answer_file(
            model,
            processor,
            name,
            Sampling(fps=fps),
            [_question(record, choice) for record in asked],
            batch_size=batch_size,
            do_sample=False,
            max_new_tokens=longest + 2,
        )
        for number, result in results:
            outcomes[asked[number]] = _outcome(asked[number], result)
    return [outcomes[record] for record in records]


def _question(record: VideoRecord, choice: Choice) -> Question:
    turns = tuple(chain.from_iterable(record.earlier))
    return Question(record.question, record.query, turns, choice)


def _outcome(
    record: VideoRecord,
    result: Answer | BaseException,
) -> Outcome:
    if not isinstance(result, Answer):
        return Outcome(record, unreadable=first_line(result))
    kept = result.keep_map.flatten().nonzero()[:, 0].tolist()
    return Outcome(
        record,
        said=result.answer,
        visual_tokens=result.visual_tokens,
        kept_indices=tuple(kept),
    )


def tally(outcomes: Sequence[Outcome]) -> dict:
    """
    Questions, videos, accuracy with Wilson's 95% interval over videos (questions about one video are not independent),
    and kept fraction (`None` where no video could be read); the same per kind, and the videos that could not be read,
    with the number of their questions.
    """
    by_kind: dict[str, list[Outcome]] = {}
    unreadable: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.record.kind, []).append(outcome)
        if outcome.unreadable is not None:
            video = str(outcome.record.video)
            unreadable.setdefault(video, {"video": video, "reason": outcome.unreadable, "questions": 0})
            unreadable[video]["questions"] += 1
    kinds = {kind: _row(by_kind[kind]) for kind in sorted(by_kind)}
    return _row(outcomes) | {"kinds": kinds, "unreadable": list(unreadable.values())}


def _row(outcomes: Sequence[Outcome]) -> dict:
    videos = set()
    correct = 0
    visual_tokens = 0
    kept_tokens = 0
    for outcome in outcomes:
        videos.add(outcome.record.video)
        correct += outcome.correct
        visual_tokens += outcome.visual_tokens
        kept_tokens += len(outcome.kept_indices)
    kept = None
    if visual_tokens > 0:
        kept = kept_tokens / visual_tokens
    accuracy = correct / len(outcomes)
    low, high = _wilson_interval(accuracy, len(videos))
    return {
        "questions": len(outcomes),
        "videos": len(videos),
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "kept": kept,
    }


def _wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share among `count` independent things."""
    z = 1.96
    scale = 1 + z**2 / count
    middle = (share + z**2 / 2 / count) / scale
    variance = share * (1 - share) / count + (z / 2 / count) ** 2
    half = z / scale * math.sqrt(variance)
    return max(0.0, middle - half), min(1.0, middle + half)
