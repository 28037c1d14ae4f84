"""Sets on disk: records as JSONL, JSON, Parquet, or LLaVA-Video conversations.

Readers stream, so that memory does not grow with the file. Only a JSON array is read whole.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from ..common.files import printable
from ..common.validation import validated
from .media import AnyPath, find_media
from .records import Record, VideoRecord, parse_record, to_video_record

ROWS_AT_ONCE = 1000  # rows of a table that are read together

_PLACEHOLDER = re.compile(r"^<(?:image|video)>\n?|\n?<(?:image|video)>$|<(?:image|video)>")
_Turn = TypedDict("_Turn", {"from": str, "value": str})  # one turn of a LLaVA-Video conversation


@dataclass(frozen=True)
class Row:
    """One row of a set: a record, or the problem with it."""

    number: int  # from 1: a line of JSONL, an item of a JSON array, a row of a table
    content: Any = None  # as it is in the file, without nulls; `None` if it cannot be read
    problem: str | None = None  # why it cannot be read, or is not a record
    record: Record | None = None

    @property
    def id(self) -> str | None:
        """The record's own id, or its video, as far as they can be read."""
        if isinstance(self.content, Mapping):
            for key in ("id", "vision_id", "video"):
                name = self.content.get(key)
                if name is not None:
                    return printable(str(name))
        return None


def iter_rows(path: AnyPath) -> Iterator[Row]:
    """
    Every row of a set in order, good or bad; blank lines are skipped. A set is JSONL, a JSON array (.json) or a table
    (.parquet). Its rows are records of this package or of the paper's authors, or LLaVA-Video conversations.

    Raises:
        ValueError: for a missing file, an unreadable table, or a broken JSON array.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no file {str(path)!r}; expected a set of records, such as JSONL or Parquet.")
    items: Iterable | None = None
    if path.suffix.lower() == ".parquet":
        items = _read_table(path)
    elif path.suffix.lower() == ".json":
        items = _read_array(path)
    if items is None:
        yield from _iter_lines(path)
    else:
        for number, content in enumerate(items, start=1):
            yield _parse(number, content)


def _parse(number: int, content: object) -> Row:
    try:
        content = _without_nulls(content)
        if isinstance(content, Mapping) and "conversations" in content:
            record = _from_llava(content)
        else:
            record = parse_record(content)
        return Row(number, content, record=record)
    except (ValueError, RecursionError) as error:
        return Row(number, content, str(error))


def read_records(
    path: AnyPath,
    media_root: AnyPath | None = None,
) -> list[VideoRecord]:
    """
    The questions that `qtsplus train` and `qtsplus eval` read from a file, with the paths of their videos. Raises
    `ValueError` at the first row that is not a question with an answer.
    """
    root = media_folder(path, media_root)
    records = []
    for row in iter_rows(path):
        try:
            if row.record is None:
                raise ValueError(row.problem)
            records.append(to_video_record(row.record, locate(row, root)))
        except ValueError as error:
            raise ValueError(f"Row {row.number} of {path} is not a record: {error}") from None
    return records


def media_folder(path: AnyPath, media_root: AnyPath | None) -> Path:
    """The folder with the videos of a set: the media root, or the file's folder. Raises `ValueError` if missing."""
    if media_root is None:
        return Path(path).parent
    if not Path(media_root).is_dir():
        raise ValueError(f"There is no folder {str(media_root)!r}; expected the folder with the videos (media root).")
    return Path(media_root)


def locate(row: Row, root: Path) -> str | None:
    """Where the video of a row should be, see [`find_media`]; `None` for text only."""
    record = row.record
    if record is None:
        return None
    name = record.video if isinstance(record, VideoRecord) else record.vision_id
    if name is None:
        return None
    return find_media(name, root, row.content.get("data_source"))


def _iter_lines(path: Path) -> Iterator[Row]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                content = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                yield Row(number, problem=f"it is not JSON that can be read: {error}.")
            else:
                yield _parse(number, content)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a `ValueError` where a key comes twice, of which Python would take the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"of the keys {', '.join(content)} one is there twice")
    return content


def _read_array(path: Path) -> list | None:
    """The items of a JSON array, which is read whole; `None` if the file begins otherwise."""
    with open(path, encoding="utf-8-sig") as file:
        try:
            if not file.read(2**16).lstrip().startswith("["):
                return None
            file.seek(0)
            return json.load(file, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a JSON array of records: {error}.") from None


def _read_table(path: Path) -> Iterator[dict]:
    """The rows of a Parquet file, batch by batch."""
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError("Parquet needs the package pyarrow: pip install -e '.[parquet]' in a clone.") from error
    try:
        with ParquetFile(path) as table:
            for batch in table.iter_batches(ROWS_AT_ONCE):
                for row in range(len(batch)):
                    yield {name: batch[name][row].as_py() for name in batch.schema.names}
    # KeyError: two columns with the same name. ValueError, OverflowError: a time that Python does not have.
    except (ArrowInvalid, KeyError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error


def _without_nulls(value):
    """
    A row without its nulls, which tables and `datasets` write where a key is missing, except for `video`, where null
    says that there is no video. Decimals of a table become numbers.
    """
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None or name == "video"}


def _from_llava(row: Mapping) -> Record:
    if "image" in row:
        raise ValueError("it is about an image; expected a conversation about a video, or about none.")
    turns = validated(list[_Turn], row["conversations"], "conversations.")
    speakers = [turn["from"] for turn in turns]
    if not turns or speakers != ["human", "gpt"] * (len(turns) // 2):
        raise ValueError(
            f"conversations has turns of {speakers}; expected human and gpt in turn. Leave out rows with turns of a "
            "system or a tool, or write a tool's response into the `question` of a record with a `query`."
        )
    questions = [_PLACEHOLDER.sub("", turn["value"]) for turn in turns[::2]]
    answers = [turn["value"] for turn in turns[1::2]]
    *earlier, (question, answer) = zip(questions, answers, strict=True)
    fields = {"id": row.get("id"), "video": row.get("video"), "earlier": earlier}
    return parse_record(dict(fields, question=question, answer=answer))
