"""Records as tables: Parquet with the columns of Hugging Face datasets, which is optional."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from .records import Choice, Record, VideoRecord

ROWS_AT_ONCE = 1000


def read(path: Path) -> Iterator[dict[str, Any]]:
    """
    The rows of a table, batch by batch.

    Raises:
        ValueError: no Parquet file.
        ImportError: datasets is not installed.
    """
    _datasets()
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as table:
            for batch in table.iter_batches(ROWS_AT_ONCE):
                yield from map(_without_nulls, batch.to_pylist())
    except ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error


def write(file: IO[bytes], records: Iterable[Record]) -> int:
    """
    Writes a table of one kind of record, batch by batch, and gives how many there were.

    Raises:
        ValueError: no record, or records of different kinds.
        ImportError: datasets is not installed.
    """
    datasets = _datasets()
    from pyarrow import Table
    from pyarrow.parquet import ParquetWriter

    records = iter(records)
    first = next(records, None)
    if first is None:
        raise ValueError("There is no record to write; a table needs one to know its columns.")
    kind = type(first)
    schema = datasets.Features(_columns(datasets, kind)).arrow_schema
    rows, count = (_row(record, kind) for record in chain([first], records)), 0
    with ParquetWriter(file, schema) as writer:
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_table(Table.from_pylist(batch, schema))
            count += len(batch)
    return count


def _row(record: Record, kind: type) -> dict[str, Any]:
    if type(record) is not kind:
        raise ValueError(
            f"A table holds one kind of record, here {kind.__name__}; got a {type(record).__name__}. Write a table for "
            "each kind, or JSONL, which may mix them."
        )
    return record.row()


def _columns(datasets: Any, kind: Any) -> dict[str, Any]:
    text = datasets.Value("string")
    special = {"fps": datasets.Value("float64"), "earlier": datasets.List(datasets.List(text))}
    if kind in (Choice, VideoRecord):
        special["options"] = {letter: text for letter in "ABCD"} if kind is Choice else datasets.List(text)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else kind.model_fields
    return {name: special.get(name, text) for name in names}


def _without_nulls(value: Any) -> Any:
    """A row as JSONL has it: a null says nothing, but as `video`, where it says that there is none."""
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None or name == "video"}


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "Parquet needs the package datasets, on Python 3.11 or newer: pip install 'qtsplus[parquet]'. JSONL needs "
            "nothing more."
        ) from error
    return datasets


__all__ = ["read", "write"]
