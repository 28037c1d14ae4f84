"""Asks the questions of a file, video by video: each row is answered once, however often a run is killed."""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import track

from ..common.files import check_output, whole_file, working_in
from ..common.journals import STORED, Journal, Line, Schema
from ..common.validation import explain, show
from ..data.formats import Row, iter_rows, media_folder
from ..data.media import find_media, media_state
from ..data.records import Rate, String, Text
from ..hub import loading
from ..video.encoded import EncodedVideo
from ..video.sampling import Sampling
from .answers import Answer
from .choice import Choice
from .question import Question
from .session import answer_file


class QuestionRow(BaseModel):
    """What a row says; other columns are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    video: Text
    question: Text
    id: String | int | None = None
    fps: Rate | None = None
    start: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    end: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    retention: Annotated[float, Field(gt=0, le=1)] | None = None
    max_visual_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(fps=self.fps, start=self.start, end=self.end)


class Answered(BaseModel):
    """What a model answered: fields of [`Answer`]."""

    model_config = STORED

    answer: String
    kept_tokens: int
    visual_tokens: int
    evidence: list[dict[String, str | int | float | list[int] | list[float] | None]] = []
    warnings: list[str]
    unheard: bool = False


class Failed(BaseModel):
    """Why a question has no answer."""

    model_config = STORED

    error: String


# By the digest of a row's content.
_ENTRIES = Schema(line=Line[str, Answered | Failed], format=3)


@dataclass(frozen=True)
class Task:
    """A row that can be asked, by its number from 1, and the place of its video."""

    number: int
    question: QuestionRow
    place: str


@dataclass(frozen=True)
class Questions:
    """The rows of a file, and those of them that can be asked; of the others the reason, by number."""

    rows: list[Row]
    tasks: list[Task]
    problems: dict[int, str]

    @property
    def unused(self) -> list[str]:
        """Names that stand in rows and say nothing here."""
        names: set[str] = set()
        for row in self.rows:
            if isinstance(row.content, Mapping):
                names.update(map(str, row.content))
        return sorted(names - QuestionRow.model_fields.keys())

    def videos(self) -> list[list[Task]]:
        """The tasks of each video, read in one way."""
        videos: dict[tuple[str, Sampling], list[Task]] = {}
        for task in self.tasks:
            video = (task.place, task.question.sampling)
            videos.setdefault(video, []).append(task)
        return list(videos.values())


def read_questions(path: Path, media_root: Path | None = None) -> Questions:
    """Reads JSONL, JSON, CSV or Parquet; relative videos lie beside the file, or under the media root."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a file of questions, such as JSONL, CSV or Parquet.")
    root = media_folder(path, media_root)
    rows = _read_csv(path) if path.suffix.lower() == ".csv" else iter_rows(path)
    questions = Questions(list(rows), tasks=[], problems={})
    for row in questions.rows:
        try:
            question = _question(row.content, row.problem)
            questions.tasks.append(Task(row.number, question, find_media(question.video, root)))
        except ValidationError as error:
            questions.problems[row.number] = explain(error, row.content)
        except ValueError as error:
            questions.problems[row.number] = str(error)
    if not questions.tasks:
        first = next(iter(questions.problems.values()), "")
        raise ValueError(f"{path} holds no row with a video and a question. {first}")
    return questions


def _read_csv(path: Path) -> Iterator[Row]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            csv.field_size_limit(2**31 - 1)  # no less than of JSONL
            table = csv.DictReader(file, strict=True)
            names = list(table.fieldnames or ())
            known = Counter(name for name in names if name in QuestionRow.model_fields)
            has_both = "video" in known and "question" in known
            if not has_both or max(known.values()) > 1:
                raise ValueError(f"The columns of {path} are {show(names)}; expected video,question and others once.")
            for number, cells in enumerate(table, start=1):
                filled = {name: cell for name, cell in cells.items() if cell}
                if filled:
                    yield Row(number, filled)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}.") from error


def _question(content, problem: str | None) -> QuestionRow:
    if content is None:
        raise ValueError(problem)
    if not isinstance(content, Mapping):
        raise ValueError(f"it is {show(content)}; expected an object.")
    if None in content:
        raise ValueError("it has more cells than the first line has names.")
    if all(isinstance(cell, str) for cell in content.values()):  # as in CSV
        return QuestionRow.model_validate_strings(content)
    return QuestionRow.model_validate(content)


@dataclass(frozen=True)
class Asker:
    """
    A model and how it is asked where a row does not say, as for [`loading.load`] and `session.ask`.

    Called with the tasks of one video, it encodes the video once, and gives by the numbers of the rows the fields of an
    answer, or `error`: what is wrong with the video or with a question.
    """

    model: str
    revision: str | None = None
    device: str | None = None
    dtype: str = "auto"
    fps: float | None = None
    choice: Choice = Choice()
    max_new_tokens: int | None = 128

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        return loading.load(self.model, self.device, self.dtype, revision=self.revision)

    def settings(self) -> dict[str, Any]:
        """All that decides an answer, with a digest of the model's files and of those of a method of one's own."""
        method_file = str(self.choice.selection or "").rpartition(":")[0]
        states = [media_state(self.model), media_state(method_file)]
        settings = {
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            "fps": self.fps,
            "max_new_tokens": self.max_new_tokens,
            "files": _digest(states, 16),
        }
        return settings | vars(self.choice)

    def __call__(self, tasks: list[Task]) -> Iterator[tuple[int, dict[str, object]]]:
        model, processor = self.loaded
        sampling = tasks[0].question.sampling
        if sampling.fps is None:
            sampling = replace(sampling, fps=self.fps)
        place = tasks[0].place
        results = answer_file(
            model, processor, place, sampling, tasks, self._question, max_new_tokens=self.max_new_tokens
        )
        for task, result in results:
            if isinstance(result, Answer):
                fields = result.as_dict()
                yield task.number, {name: fields[name] for name in Answered.model_fields}
            else:
                yield task.number, {"error": " ".join(str(result).split()) or type(result).__name__}

    def _question(self, video: EncodedVideo, task: Task) -> Question:
        row = task.question
        choice = replace(
            self.choice,
            retention=row.retention or self.choice.retention,
            max_visual_tokens=row.max_visual_tokens or self.choice.max_visual_tokens,
        )
        return Question({row.video: replace(video, video=row.video)}, row.question, choice=choice)


def _digest(content: object, length: int) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:length]


def run_batch(questions: Questions, out: Path, asker: Asker) -> Counter[str]:
    """
    Asks what is not answered yet, and again what failed, and writes all rows in the order of the file. What is finished
    stands in the journal in the folder `<out>.run`. Gives how many rows have an `answer` and an `error`.
    """
    folder = Path(f"{out}.run")
    check_output(out, overwrite=folder.is_dir())
    with working_in(folder):
        journal = Journal(folder / "journal.jsonl", asker.settings(), _ENTRIES)
        keys = _keys(questions.tasks)
        waiting = _waiting(questions, journal, keys)
        console = Console(stderr=True)
        for tasks in track(waiting, "Asking", console=console, disable=not console.is_terminal):
            for number, result in asker(tasks):
                journal.add(keys[number], result)
        counts = Counter[str]()
        with whole_file(out) as file:
            for row in questions.rows:
                if row.number in keys:
                    entry = journal.done[keys[row.number]]
                else:
                    entry = Failed(error=questions.problems[row.number])
                line = _named(row) | entry.model_dump(exclude_unset=True)
                file.write(json.dumps(line) + "\n")
                counts["error" if isinstance(entry, Failed) else "answer"] += 1
    return counts


def _waiting(questions: Questions, journal: Journal, keys: dict[int, str]) -> list[list[Task]]:
    """The tasks of each video that have no answer yet; of rows that ask the same, the first."""
    known = set()
    for key, entry in journal.done.items():
        if not isinstance(entry, Failed):
            known.add(key)
    numbers = set()
    for number, key in keys.items():
        if key not in known:
            known.add(key)
            numbers.add(number)
    waiting = []
    for video in questions.videos():
        tasks = [task for task in video if task.number in numbers]
        if tasks:
            waiting.append(tasks)
    return waiting


def _keys(tasks: list[Task]) -> dict[int, str]:
    """
    By number, under what the answer is kept: a digest of what is asked and of the video's file. A row that moved or has
    another id has the same one, and a video that was changed under its name another.
    """
    state_of = cache(media_state)
    keys = {}
    for task in tasks:
        question = task.question.model_dump(exclude={"id"})
        keys[task.number] = _digest([question, state_of(task.place)], 32)
    return keys


def _named(row: Row) -> dict[str, str | int | None]:
    """The id, video and question of a row as they are in the file, also where they are not valid."""
    content = row.content if isinstance(row.content, Mapping) else {}
    named: dict[str, str | int | None] = {}
    for name in ("id", "video", "question"):
        value = content.get(name)
        is_plain = value is None or type(value) in (str, int)
        named[name] = value if is_plain else show(value)
    if named["id"] is None:
        named["id"] = row.number
    return named
