"""Asks the questions of a file, video by video: each row is answered once, however often a run is killed."""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
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
from ..video.encoded import FAILURES
from . import session

BUDGET = ("retention", "max_visual_tokens")
BASIS = ("kept_tokens", "visual_tokens", "evidence", "warnings", "unheard")  # of an answer, what stands beside its text


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


class Answered(BaseModel):
    """What a model answered: fields of [`session.Answer`]."""

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
        names = {str(name) for row in self.rows if isinstance(row.content, Mapping) for name in row.content}
        return sorted(names - QuestionRow.model_fields.keys())

    def videos(self) -> list[list[Task]]:
        """The tasks of each video, read in one way."""
        videos: dict[tuple[Any, ...], list[Task]] = {}
        for task in self.tasks:
            one = task.question
            videos.setdefault((task.place, one.fps, one.start, one.end), []).append(task)
        return list(videos.values())


def read_questions(path: Path, media_root: Path | None = None) -> Questions:
    """Reads JSONL, JSON, CSV or Parquet; relative videos lie beside the file, or under the media root."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a file of questions, such as JSONL, CSV or Parquet.")
    root = media_folder(path, media_root)
    questions = Questions(list(_read_csv(path) if path.suffix.lower() == ".csv" else iter_rows(path)), [], {})
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
            known = [name for name in names if name in QuestionRow.model_fields]
            if len({*known}) < len(known) or not {"video", "question"} <= {*known}:
                raise ValueError(f"The columns of {path} are {show(names)}; expected video,question and others once.")
            for number, cells in enumerate(table, start=1):
                if any(cells.values()):
                    yield Row(number, {name: cell for name, cell in cells.items() if cell not in (None, "")})
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}.") from error


def _question(content: Any, problem: str | None) -> QuestionRow:
    if not isinstance(content, Mapping):
        raise ValueError(problem if content is None else f"it is {show(content)}; expected an object.")
    if None in content:
        raise ValueError("it has more cells than the first line has names.")
    texts_alone = all(isinstance(cell, str) for cell in content.values())  # as in CSV
    return QuestionRow.model_validate_strings(content) if texts_alone else QuestionRow.model_validate(content)


@dataclass(frozen=True)
class Asker:
    """
    A model and how it is asked where a row does not say, as for [`loading.load`] and [`session.ask`].

    Called with the tasks of one video, it encodes the video once, and gives by the numbers of the rows the fields of an
    answer, or `error`: what is wrong with the video or with a question.
    """

    model: str
    revision: str | None = None
    device: str | None = None
    dtype: str = "auto"
    fps: float | None = None
    retention: float | None = None
    max_visual_tokens: int | None = None
    selection: str | None = None
    max_new_tokens: int | None = 128

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        return loading.load(self.model, self.device, self.dtype, revision=self.revision)

    def settings(self) -> dict[str, Any]:
        """All that decides an answer, with a digest of the model's files and of those of a method of one's own."""
        own = [media_state(self.model), media_state((self.selection or "").rpartition(":")[0])]
        said = {name: value for name, value in vars(self).items() if name not in ("device", "loaded")}
        return {**said, "files": hashlib.sha256(json.dumps(own).encode()).hexdigest()[:16]}

    def __call__(self, tasks: list[Task]) -> Iterator[tuple[int, dict[str, Any]]]:
        (model, processor), first = self.loaded, tasks[0].question
        reading: dict[str, Any] = {"fps": first.fps or self.fps, "start": first.start, "end": first.end}
        try:
            video = session.encode(model, processor, tasks[0].place, **reading)
        except FAILURES as error:
            yield from ((task.number, failure(error)) for task in tasks)
            return
        choice: dict[str, Any] = {"selection": self.selection, "max_new_tokens": self.max_new_tokens}
        for task in tasks:
            stated = {name: getattr(task.question, name) or getattr(self, name) for name in BUDGET}
            try:
                named = replace(video, video=task.question.video)
                fields = session.ask(model, processor, named, task.question.question, **choice, **stated).as_dict()
            except FAILURES as error:
                yield task.number, failure(error)
            else:
                yield task.number, {name: fields[name] for name in ("answer", *BASIS)}


def failure(error: BaseException) -> dict[str, str]:
    return {"error": " ".join(str(error).split()) or type(error).__name__}


def run_batch(questions: Questions, out: Path, asker: Asker) -> Counter[str]:
    """
    Asks what is not answered yet, and again what failed, and writes all rows in the order of the file. What is finished
    stands in the journal in the folder `<out>.run`. Gives how many rows have an `answer` and an `error`.
    """
    folder = Path(f"{out}.run")
    check_output(out, overwrite=folder.is_dir())
    with working_in(folder):
        journal = Journal(folder / "journal.jsonl", asker.settings(), _ENTRIES)
        done = {key for key, entry in journal.done.items() if not isinstance(entry, Failed)}
        keys = _keys(questions.tasks)
        first = {key: number for number, key in reversed(keys.items()) if key not in done}  # of rows that ask the same
        numbers = set(first.values())
        videos = ([task for task in video if task.number in numbers] for video in questions.videos())
        waiting, console = [tasks for tasks in videos if tasks], Console(stderr=True)
        for tasks in track(waiting, "Asking", console=console, disable=not console.is_terminal):
            for number, result in asker(tasks):
                journal.add(keys[number], result)
        counts = Counter[str]()
        with whole_file(out) as file:
            for row in questions.rows:
                key = keys.get(row.number)
                entry = Failed(error=questions.problems[row.number]) if key is None else journal.done[key]
                file.write(json.dumps({**_named(row), **entry.model_dump(exclude_unset=True)}) + "\n")
                counts["error" if isinstance(entry, Failed) else "answer"] += 1
    return counts


def _keys(tasks: list[Task]) -> dict[int, str]:
    """
    By number, under what the answer is kept: a digest of what is asked and of the video's file. A row that moved or has
    another id has the same one, and a video that was changed under its name another.
    """
    states = {place: media_state(place) for place in {task.place for task in tasks}}
    asked = {task.number: [task.question.model_dump(exclude={"id"}), states[task.place]] for task in tasks}
    return {number: hashlib.sha256(json.dumps(one).encode()).hexdigest()[:32] for number, one in asked.items()}


def _named(row: Row) -> dict[str, Any]:
    """What a row of the file is called, also one that can be no row."""
    content = row.content if isinstance(row.content, Mapping) else {}
    named = {name: content.get(name) for name in ("id", "video", "question")}
    named = {name: one if one is None or type(one) in (str, int) else show(one) for name, one in named.items()}
    return {**named, "id": row.number if named["id"] is None else named["id"]}
