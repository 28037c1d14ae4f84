"""Asks a model questions about videos, and counts the answers that match."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from ..data.records import VideoRecord
from ..methods_qtsplus import Method
from ..output import first_line
from ..training.dataset import SkippedRecord, require_rates
from ..videos import FAILURES, EncodedVideo, encode
from .intervals import share_interval


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
    folder of frames whose record does not give its rate.
    """
    require_rates(records)
    outcomes: dict[int, Outcome] = {}
    videos: dict[tuple[str, float | None], list[int]] = {}
    for index, record in enumerate(records):
        videos.setdefault((str(record.video), record.fps), []).append(index)
    for (video, fps), indices in track(videos.items(), "Asking", console=Console(stderr=True), disable=not progress):
        try:
            encoded = encode(model, processor, video, fps=fps)
        except FAILURES as error:
            problem = SkippedRecord(video, first_line(error))
            outcomes |= {index: Outcome(records[index], False, unreadable=problem) for index in indices}
            continue
        for start in range(0, len(indices), batch_size):
            batch = [records[index] for index in indices[start : start + batch_size]]
            conversations = [
                [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": record.question}]}]
                for record in batch
            ]
            query = [record.query or record.question for record in batch]
            longest = max(len(processor.text_ids(record.answer)) for record in batch) + 2
            call: dict[str, Any] = {"retention": retention, "selection": selection, "max_new_tokens": longest}
            videos_of_all = [encoded] * len(batch)
            ids, chosen = answer(model, processor, conversations, videos_of_all, query, do_sample=False, **call)
            texts = processor.batch_decode(ids, skip_special_tokens=True)
            for row, (index, text) in enumerate(zip(indices[start:], texts, strict=False)):
                correct, kept = text.strip() == records[index].answer, tuple(chosen.kept_indices[row].tolist())
                rho = float(chosen.rho[row])
                outcomes[index] = Outcome(records[index], correct, len(encoded.features), rho, kept, said=text.strip())
    return [outcomes[index] for index in range(len(records))]


@torch.no_grad()
def answer(
    model: Any,
    processor: Any,
    conversations: Sequence[list[dict[str, Any]]],
    videos: Sequence[EncodedVideo],
    query: Sequence[str] | None = None,
    images: Sequence[Any] = (),
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """
    The ids `[B, T]` that a model answers conversations with, and the `QTSplusOutput` that says what they rest on. The
    videos are those of all conversations, in order; the images a list for each that has some.
    """
    given: dict[str, Any] = {"query": query} if query else {}
    if images:
        given["images"] = images
    if videos:
        given["video_grid_thw"] = torch.cat([video.video_grid_thw for video in videos])
        given["video_metadata"] = [video.metadata for video in videos]
        options["video_features"] = [video.features for video in videos]
        options["second_per_grid_ts"] = [seconds for video in videos for seconds in video.second_per_grid_ts]
    inputs = processor.conversation_inputs(conversations, **given)
    output = model.generate(**inputs.to(model.device), **options, return_dict_in_generate=True)
    return output.sequences[:, inputs["input_ids"].shape[1] :], output.qtsplus


def tally(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """
    Questions, videos, accuracy with its interval over videos (`None` for one video) and kept fraction (`None` where no
    video could be read), the same per kind, and the videos that could not be read, with the number of their questions.
    """

    def row(chosen: Sequence[Outcome]) -> dict[str, float | int | None]:
        correct = np.array([outcome.correct for outcome in chosen], dtype=float)
        videos = np.array([str(outcome.record.video) for outcome in chosen])
        interval = share_interval(correct, videos)
        visual_tokens = sum(outcome.visual_tokens for outcome in chosen)
        kept = sum(outcome.kept_tokens for outcome in chosen)
        return {
            "questions": len(chosen),
            "videos": len(set(videos)),
            "accuracy": float(correct.mean()),
            "low": interval.get("low"),
            "high": interval.get("high"),
            "kept": kept / visual_tokens if visual_tokens else None,
        }

    kinds = sorted({outcome.record.kind for outcome in outcomes})
    by_kind = {kind: row([outcome for outcome in outcomes if outcome.record.kind == kind]) for kind in kinds}
    problems = Counter(outcome.unreadable for outcome in outcomes if outcome.unreadable is not None)
    return {
        **row(outcomes),
        "kinds": by_kind,
        "unreadable": [
            {"video": problem.name, "reason": problem.reason, "questions": count} for problem, count in problems.items()
        ],
    }
