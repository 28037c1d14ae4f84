"""Asks the questions of a file, video by video: each row is answered once, however often a run is killed."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..common.files import check_output, first_line, whole_file, working_in
from ..common.journals import STORED, Journal, Line, Schema
from ..common.tensors import digest_of
from ..common.validation import explain, show
from ..data.formats import Row, iter_rows, media_folder
from ..data.media import find_media, media_state
from ..data.records import Fraction, Positive, Second, String, Text
from ..hub import loading
from ..model.sampling_qtsplus import Sampling
from ..video.encoded import with_bar
from .answers import Answer
from .choice import Choice
from .question import Question
from .session import answer_file


class QuestionRow(BaseModel):
    """What a row says; other columns are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    video: Text
    question: Text
    id: String | int | None = None
    fps: Positive | None = None
    start: Second | None = None
    end: Positive | None = None
    retention: Fraction | None = None
    max_visual_tokens: Annotated[int, Field(ge=1)] | None = None


class Answered(BaseModel):
    """What a model answered: fields of [`Answer`]."""

    model_config = STORED

    answer: String
    kept_tokens: int
    visual_tokens: int
    evidence: list[dict[String, object]]
    warnings: list[str]
    unheard: bool


# By the digest of a row's content.
_ENTRIES = Schema(line=Line[str, Answered], format=4)


@dataclass(frozen=True)
class Task:
    """A row that can be asked, and the place of its video."""

    question: QuestionRow
    place: str
    key: str  # under which its answer is kept


@dataclass(frozen=True)
class Questions:
    """The rows of a file; by their numbers, those that can be asked, and of the others the reason."""

    rows: list[Row]
    tasks: dict[int, Task]
    problems: dict[int, str]

    @property
    def unused(self) -> list[str]:
        """Names that stand in rows and say nothing here."""
        contents = [row.content for row in self.rows if isinstance(row.content, Mapping)]
        return sorted({str(name) for content in contents for name in content} - QuestionRow.model_fields.keys())


def read_questions(path: Path, media_root: Path | None) -> Questions:
    """Reads JSONL, JSON, CSV or Parquet; relative videos lie beside the file, or under the media root."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected a file of questions, such as JSONL, CSV or Parquet.")
    root = media_folder(path, media_root)
    is_csv = path.suffix.lower() == ".csv"
    rows = _read_csv(path) if is_csv else list(iter_rows(path))
    questions = Questions(rows, tasks={}, problems={})
    first_rows: dict[str, int] = {}
    state_of = cache(media_state)
    for row in rows:
        name = str(_named(row)["id"])
        first = first_rows.setdefault(name, row.number)
        if first != row.number:
            raise ValueError(
                f"Rows {first} and {row.number} of {path} have the same id, {name!r}; expected another one for each. A "
                "row without an id has its number."
            )
        try:
            if row.problem is not None and (is_csv or row.content is None):
                raise ValueError(row.problem)
            if is_csv:
                question = QuestionRow.model_validate_strings(row.content)
            else:
                question = QuestionRow.model_validate(row.content)
            place = find_media(question.video, root)
            # A row that moved or has another id has the same key, and a video that was changed has another.
            key = digest_of({}, [question.model_dump(exclude={"id"}), state_of(place)])
            questions.tasks[row.number] = Task(question, place, key)
        except ValidationError as error:
            questions.problems[row.number] = explain(error, row.content)
        except ValueError as error:
            questions.problems[row.number] = str(error)
    if not questions.tasks:
        problem = next(iter(questions.problems.values()), "")
        raise ValueError(f"{path} holds no row with a video and a question. {problem}")
    return questions


def _read_csv(path: Path) -> list[Row]:
    """The rows of a table whose first line names its columns; empty cells and empty rows are left out."""
    content = path.read_bytes()
    try:
        reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        table = list(reader)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV in UTF-8: {error}.") from error
    names = list(filter(None, reader.fieldnames or ()))
    if len(set(names)) < max(len(names), 2):
        raise ValueError(f"{path} has the columns {', '.join(names)}; expected each name once and commas between.")
    rows = []
    for number, cells in enumerate(table, start=1):
        filled = {name: cell for name, cell in cells.items() if cell}
        problem = None
        if None in filled:
            problem = f"row {number} has more cells than the first line has names: {show(filled.pop(None))}."
        if filled or problem:
            rows.append(Row(number, filled, problem))
    return rows


@dataclass(frozen=True)
class Asker:
    """A model and how it is asked where a row does not say, as for [`loading.load`] and [`answer_file`]."""

    model: str
    revision: str | None
    device: str | None
    dtype: str
    fps: float | None
    choice: Choice = Choice()
    max_new_tokens: int | None = None
    questions: str = ""  # the file, of which the answers go on

    def settings(self) -> dict[str, Any]:
        """All that decides an answer, with a digest of the model's files and of those of a method of one's own."""
        method_file, _, _ = str(self.choice.selection).rpartition(":")
        files = digest_of({}, [media_state(self.model), media_state(method_file)])
        settings = dict(vars(self), **vars(self.choice), files=files)
        del settings["device"]
        del settings["choice"]
        return settings

    def answers(self, waiting: Sequence[list[Task]]) -> Iterator[tuple[Task, Answer | BaseException]]:
        """
        Each task with its answer, or with what is wrong with the video or with the question.

        Args:
            waiting: the tasks of each video, which is encoded once.
        """
        if not waiting:
            return
        model, processor = loading.load(self.model, self.device, self.dtype, revision=self.revision)
        for tasks in with_bar(waiting, "Asking"):
            row = tasks[0].question
            results = answer_file(
                model,
                processor,
                tasks[0].place,
                Sampling(fps=row.fps or self.fps, start=row.start, end=row.end),
                [self._question(task.question) for task in tasks],
                name=row.video,
                max_new_tokens=self.max_new_tokens,
            )
            for number, result in results:
                yield tasks[number], result

    def _question(self, row: QuestionRow) -> Question:
        choice = replace(
            self.choice,
            retention=row.retention or self.choice.retention,
            max_visual_tokens=row.max_visual_tokens or self.choice.max_visual_tokens,
        )
        return Question(row.question, choice=choice)


def run_batch(questions: Questions, out: Path, asker: Asker) -> Counter[str]:
    """
    Asks what is not answered yet, and again what failed, and writes all rows in the order of the file. Answers stand in
    the journal in the folder `<out>.run`. Gives how many rows have an `answer` and an `error`.
    """
    folder = Path(f"{out}.run")
    check_output(out, overwrite=folder.is_dir())
    with working_in(folder):
        journal = Journal(folder / "journal.jsonl", asker.settings(), _ENTRIES)
        failed = {}
        for task, result in asker.answers(_waiting(questions, journal)):
            if isinstance(result, Answer):
                fields = result.as_dict()
                journal.add(task.key, {name: fields[name] for name in Answered.model_fields})
            else:
                failed[task.key] = {"error": first_line(result)}
        counts = Counter[str]()
        with whole_file(out) as file:
            for row in questions.rows:
                if row.number in questions.tasks:
                    key = questions.tasks[row.number].key
                    outcome = failed.get(key) or journal.done[key].model_dump()
                else:
                    outcome = {"error": questions.problems[row.number]}
                file.write(json.dumps(_named(row) | outcome) + "\n")
                counts["error" if "error" in outcome else "answer"] += 1
    return counts


def _waiting(questions: Questions, journal: Journal) -> list[list[Task]]:
    """By video, which is read in one way, the tasks that have no answer yet; of rows that ask the same, the first."""
    known = set(journal.done)
    videos: dict[tuple, list[Task]] = {}
    for task in questions.tasks.values():
        if task.key in known:
            continue
        known.add(task.key)
        row = task.question
        videos.setdefault((row.video, row.fps, row.start, row.end), []).append(task)
    return list(videos.values())


def _named(row: Row) -> dict[str, object]:
    """The id, video and question of a row as they are in the file, also where they are not valid."""
    content = row.content if isinstance(row.content, Mapping) else {}
    named: dict[str, object] = {"id": row.number, "video": None, "question": None}
    for name, absent in named.items():
        value = content.get(name, absent)
        named[name] = value if isinstance(value, str | int | None) else show(value)
    return named
