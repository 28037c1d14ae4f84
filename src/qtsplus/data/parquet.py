"""Records as tables: Parquet with the columns of Hugging Face datasets, which is optional."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

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


def write(path: Path, records: Iterable[Record]) -> int:
    """
    Writes a table of one kind of record, batch by batch.

    Returns:
        how many were written.

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
    schema = _features(datasets, type(first)).arrow_schema
    records, count = chain([first], records), 0
    with ParquetWriter(path, schema) as writer:
        while batch := [_columns(record, type(first)) for record in islice(records, ROWS_AT_ONCE)]:
            writer.write_table(Table.from_pylist(batch, schema))
            count += len(batch)
    return count


def _columns(record: Record, kind: type) -> dict[str, Any]:
    if type(record) is not kind:
        raise ValueError(
            f"A table holds one kind of record, here {kind.__name__}; got a {type(record).__name__}. Write a table for "
            "each kind, or JSONL, which may mix them."
        )
    return record.row()


def _features(datasets: Any, kind: type) -> Any:
    text = datasets.Value("string")
    special = {
        "fps": datasets.Value("float64"),
        "earlier": datasets.List(datasets.List(text)),
    }
    if kind is Choice:
        special["options"] = {letter: text for letter in "ABCD"}
    elif kind is VideoRecord:
        special["options"] = datasets.List(text)
    names = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__")  # noqa: B009
    return datasets.Features({name: special.get(name, text) for name in names})


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
