"""Asks the questions of a file, video by video: each row is answered exactly once, however often a run is killed."""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, Any

import torch
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import track

from . import session
from .data.formats import Row, iter_rows, media_folder
from .data.media import UNREADABLE, find_media
from .data.records import Rate, String, Text, explain
from .output import check_output, whole_file
from .results import Journal
from .settings import show

# By the numbers of the rows: the fields of an answer, or `error`.
Results = Iterator[tuple[int, dict[str, Any]]]
FAILURES = (*UNREADABLE, torch.OutOfMemoryError)  # of one video or one question, and the run goes on


class Question(BaseModel):
    """What a row says; other columns are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    video: Text
    question: Text
    id: String | int | None = None
    fps: Rate | None = None
    retention: Annotated[float, Field(gt=0, le=1)] | None = None
    max_visual_tokens: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True)
class Task:
    """A row that can be asked."""

    number: int  # of the row, from 1
    question: Question
    place: str  # where the video lies


@dataclass(frozen=True)
class Questions:
    """A file of questions."""

    digest: str
    rows: list[Row]
    tasks: list[Task]
    problems: dict[int, str]  # by number, why a row cannot be asked

    def videos(self) -> list[list[Task]]:
        """The tasks about one video after those about another."""
        videos: dict[tuple[str, float | None], list[Task]] = {}
        for task in self.tasks:
            videos.setdefault((task.place, task.question.fps), []).append(task)
        return list(videos.values())


def read_questions(path: Path, media_root: Path | None = None) -> Questions:
    """
    The rows of a JSONL, JSON, CSV or Parquet file; relative videos lie beside it, or under the media root.

    Raises:
        ValueError: no such file, one that cannot be read, or one of which no row can be asked.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a file of questions, such as JSONL, CSV or Parquet.")
    rows = list(_read_csv(path) if path.suffix == ".csv" else iter_rows(path))
    questions = Questions(hashlib.sha256(path.read_bytes()).hexdigest()[:16], rows, [], {})
    root = media_folder(path, media_root)
    for row in rows:
        try:
            question = _question(row)
            questions.tasks.append(Task(row.number, question, find_media(question.video, root)))
        except ValueError as error:
            questions.problems[row.number] = explain(error) if isinstance(error, ValidationError) else str(error)
    if not questions.tasks:
        reason = next((f" Row {number}: {problem}" for number, problem in questions.problems.items()), "")
        raise ValueError(f"{path} holds no row with a video and a question.{reason}")
    return questions


def _question(row: Row) -> Question:
    if isinstance(row.content, _Cells):
        if None in row.content:
            raise ValueError("it has more cells than the first line has names.")
        return Question.model_validate_strings(row.content)
    if not isinstance(row.content, Mapping):
        raise ValueError(row.problem if row.content is None else f"it is {show(row.content)}; expected an object.")
    return Question.model_validate(row.content)


class _Cells(dict[Any, Any]):
    """A row of texts alone."""


def _read_csv(path: Path) -> Iterator[Row]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, cells in enumerate(csv.DictReader(file, strict=True), start=1):
                yield Row(number, _Cells({name: cell for name, cell in cells.items() if cell not in (None, "")}))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}.") from error


@dataclass(frozen=True)
class Asker:
    """
    A model and how it is asked, where rows say nothing else; see [`session.load`] and [`session.ask`].

    Called with the questions about one video, it encodes the video once. What is wrong with the video or with a
    question is the `error` of its row.
    """

    model: str
    revision: str | None = None
    device: str | None = None
    dtype: str = "auto"
    fps: float | None = None
    retention: float | None = None
    max_visual_tokens: int | None = None
    selection: str | None = None
    max_new_tokens: int = 128

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        return session.load(self.model, self.device, self.dtype, revision=self.revision)

    def settings(self) -> dict[str, Any]:
        """All that decides an answer."""
        return {name: value for name, value in vars(self).items() if name not in ("device", "loaded")}

    def __call__(self, tasks: Sequence[Task]) -> Results:
        model, processor = self.loaded
        fps = tasks[0].question.fps or self.fps
        try:
            video = session.encode(model, processor, tasks[0].place, fps=fps)
        except FAILURES as error:
            yield from ((task.number, _failure(error)) for task in tasks)
            return
        for task in tasks:
            try:
                yield task.number, self._ask(video, task.question)
            except FAILURES as error:
                yield task.number, _failure(error)

    def _ask(self, video: session.EncodedVideo, question: Question) -> dict[str, Any]:
        choice = {name: getattr(question, name) or getattr(self, name) for name in ("retention", "max_visual_tokens")}
        answer = session.ask(
            *self.loaded,
            video,
            question.question,
            selection=self.selection,
            max_new_tokens=self.max_new_tokens,
            **choice,
        )
        fields = answer.as_dict()
        return {name: fields[name] for name in ("answer", "kept_tokens", "visual_tokens", "evidence", "warnings")}


def _failure(error: BaseException) -> dict[str, Any]:
    return {"error": " ".join(str(error).split()) or type(error).__name__}


def answer_here(asker: Asker, videos: list[list[Task]]) -> Results:
    """One video after another."""
    shown = track(videos, "Asking", console=(console := Console(stderr=True)), disable=not console.is_terminal)
    return chain.from_iterable(map(asker, shown))


@dataclass(frozen=True)
class RayEngine:
    """
    Workers on a Ray cluster, each with a model of its own; a worker that dies has its video asked by another.

    Args:
        address: of the cluster; "auto" for the one that this machine belongs to, "local" for a new one here.
        workers: how many; as many as the cluster has GPUs, or else machines, when absent.
        cpus: of each worker, where the cluster has no GPUs; may be a fraction.
    """

    address: str = "local"
    workers: int | None = None
    cpus: float = 1.0

    def __call__(self, asker: Asker, videos: list[list[Task]]) -> Results:
        if not videos:
            return
        import ray

        from .synthesis.ray_runner import cluster, spread

        with cluster(self.address) as machines:
            gpus = int(ray.cluster_resources().get("GPU", 0))
            resources: dict[str, float] = {"num_gpus": 1} if gpus else {"num_cpus": self.cpus}
            yield from spread(partial(_ask_on_ray, asker), videos, self.workers or gpus or machines, **resources)


def _ask_on_ray(asker: Asker, tasks: list[Task]) -> list[Any]:
    try:
        return list(asker(tasks))
    except (ValueError, OSError) as error:  # a model that cannot be loaded
        return [ValueError(str(error))]


def run(
    questions: Questions,
    out: Path,
    asker: Asker,
    engine: Callable[[Asker, list[list[Task]]], Results] | None = None,
    *,
    share: tuple[int, int] = (0, 1),
    retry_failed: bool = False,
) -> Counter[str] | None:
    """
    Answers what is not answered yet, and writes all rows in the order of the file once there is nothing left.

    What is finished stands in the journal in the folder `<out>.run`, which processes share: each adds its own.

    Args:
        asker: a run goes on only with the same settings.
        engine: has the asker answer the questions about each of some videos, in any order; here when absent.
        share: the index of this process among so many, which take the videos in turn.
        retry_failed: ask again what has an error.

    Returns:
        how many rows have an `answer` and an `error`; `None` where other processes are still at work.

    Raises:
        ValueError: a file that this run has not written, or a run that was begun with other settings.
    """
    folder = Path(f"{out}.run")
    check_output(out, overwrite=folder.is_dir())
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    with lock:
        settings = {"input": questions.digest, **asker.settings()}
        journal = Journal(folder / "journal.jsonl", settings, begin_anew=False)
        done = {number for number, result in journal.done.items() if not (retry_failed and "error" in result)}
    mine = questions.videos()[share[0] :: share[1]]
    left = [tasks for video in mine if (tasks := [task for task in video if task.number not in done])]
    for number, result in (engine or answer_here)(asker, left):
        with lock:
            journal.add(number, result)
    with lock:
        finished = Journal(journal.path).done
        if len(finished) < len(questions.tasks):
            return None
        with whole_file(out) as file:
            counts = Counter(_write(file, row, questions, finished) for row in questions.rows)
    return counts


def _write(file: IO[str], row: Row, questions: Questions, finished: Mapping[Any, Any]) -> str:
    """Writes a row, and tells which kind it is."""
    problem = questions.problems.get(row.number)
    result = finished[row.number] if problem is None else {"error": problem}
    content = row.content if isinstance(row.content, Mapping) else {}
    named = {name: content.get(name) for name in ("id", "video", "question")}
    named["id"] = row.number if named["id"] is None else named["id"]
    file.write(json.dumps({**named, **result}) + "\n")
    return "error" if "error" in result else "answer"
