"""Asks a model questions about videos, and counts the answers that match."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from ..asking.answers import Answer, answer_questions, check_question
from ..common.files import first_line
from ..data.records import VideoRecord
from ..model.methods_qtsplus import Method
from ..training.dataset import SkippedRecord, require_rates
from ..training.features import with_bar
from ..video.encoded import FAILURES, EncodedVideo, encode

Video = tuple[str, float | None]  # its place, and the rate at which it is read


@dataclass(frozen=True)
class Outcome:
    """One question."""

    record: VideoRecord
    said: str = ""
    visual_tokens: int = 0
    rho: float = 0.0  # the fraction that the selection aimed at
    kept_indices: tuple[int, ...] = ()  # of the visual tokens, those that the language model read
    unreadable: SkippedRecord | None = None

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
    ask = partial(
        answer_questions,
        model,
        processor,
        retention=retention,
        selection=selection,
        do_sample=False,
        max_new_tokens=longest + 2,
    )
    by_video: dict[Video, list[VideoRecord]] = {}
    for record in dict.fromkeys(records):
        video = (str(record.video), record.fps)
        by_video.setdefault(video, []).append(record)
    outcomes: dict[VideoRecord, Outcome] = {}
    for (name, fps), asked in with_bar(by_video.items(), "Asking"):
        try:
            encoded = encode(model, processor, name, fps=fps)
            for batch in _batches(asked, batch_size):
                outcomes.update(_outcomes(ask, encoded, batch))
        except FAILURES as error:
            problem = SkippedRecord(name, first_line(error))
            for record in asked:
                outcomes.setdefault(record, Outcome(record, unreadable=problem))
    return [outcomes[record] for record in records]


def _batches(
    records: Sequence[VideoRecord],
    batch_size: int,
) -> Iterator[list[VideoRecord]]:
    """The records in batches of questions after the same earlier turns."""
    by_earlier: dict[tuple, list[VideoRecord]] = {}
    for record in records:
        by_earlier.setdefault(record.earlier, []).append(record)
    for group in by_earlier.values():
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


def _outcomes(
    ask: Callable[..., list[Answer]],
    video: EncodedVideo,
    records: Sequence[VideoRecord],
) -> Iterator[tuple[VideoRecord, Outcome]]:
    """Asks the questions of one batch about a video."""
    questions = [record.question for record in records]
    queries = [record.query or record.question for record in records]
    turns = list(chain.from_iterable(records[0].earlier))
    answers = ask({video.video: video}, questions, queries=queries, turns=turns)
    for record, answer in zip(records, answers, strict=True):
        kept = answer.keep_map.flatten().nonzero()[:, 0].tolist()
        outcome = Outcome(
            record,
            said=answer.answer,
            visual_tokens=answer.visual_tokens,
            rho=answer.rho,
            kept_indices=tuple(kept),
        )
        yield record, outcome


def tally(outcomes: Sequence[Outcome]) -> dict:
    """
    Questions, videos, accuracy with Wilson's 95% interval over videos (questions about one video are not independent),
    and kept fraction (`None` where no video could be read); the same per kind, and the videos that could not be read,
    with the number of their questions.
    """
    by_kind: dict[str, list[Outcome]] = {}
    problems = Counter[SkippedRecord]()
    for outcome in outcomes:
        by_kind.setdefault(outcome.record.kind, []).append(outcome)
        if outcome.unreadable is not None:
            problems[outcome.unreadable] += 1
    unreadable = []
    for problem, count in problems.items():
        row = {"video": problem.name, "reason": problem.reason, "questions": count}
        unreadable.append(row)
    result: dict = dict(_row(outcomes))
    result["kinds"] = {}
    for kind in sorted(by_kind):
        result["kinds"][kind] = _row(by_kind[kind])
    result["unreadable"] = unreadable
    return result


def _row(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    videos = set()
    correct = 0
    visual_tokens = 0
    kept_tokens = 0
    for outcome in outcomes:
        videos.add(outcome.record.video)
        correct += outcome.correct
        visual_tokens += outcome.visual_tokens
        kept_tokens += len(outcome.kept_indices)
    accuracy = correct / len(outcomes)
    low, high = _wilson_interval(accuracy, len(videos))
    return {
        "questions": len(outcomes),
        "videos": len(videos),
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "kept": kept_tokens / visual_tokens if visual_tokens else None,
    }


def _wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share among `count` independent things."""
    z = 1.96
    scale = 1 + z**2 / count
    middle = (share + z**2 / 2 / count) / scale
    variance = share * (1 - share) / count + (z / 2 / count) ** 2
    half = z / scale * math.sqrt(variance)
    return max(0.0, middle - half), min(1.0, middle + half)
