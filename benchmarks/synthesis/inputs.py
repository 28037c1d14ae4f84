"""What the sets are made from."""

import os
from collections.abc import Iterator

from qtsplus.data.formats import iter_rows
from qtsplus.data.records import Caption, Choice, Record, VideoRecord


def iter_records(path: str | os.PathLike) -> Iterator[Record]:
    """Every record of a set in order. Raises `ValueError` at the first row that is not a record."""
    for row in iter_rows(path):
        if row.record is None:
            raise ValueError(f"Row {row.number} of {path} is not a record: {row.problem}")
        yield row.record


def iter_captions(path: str | os.PathLike) -> Iterator[Caption]:
    """
    The captions of a set: [`Caption`] rows, the answers of questions of the kind "caption", and those of LLaVA-Video
    conversations of one turn. A `ValueError` for a row that is not a record, or where there is none.
    """
    any_caption = False
    for record in iter_records(path):
        if isinstance(record, VideoRecord):
            asks = record.kind or record.earlier or record.options or record.video is None
            if record.kind == "caption" or not asks:
                record = Caption(vision_id=str(record.video), id=record.id, fps=record.fps, caption=record.answer)
        if isinstance(record, Caption):
            any_caption = True
            yield record
    if not any_caption:
        raise ValueError(f"{path} holds no caption; expected rows with vision_id and caption.")


def iter_choices(path: str | os.PathLike) -> Iterator[Choice]:
    """The single-choice questions of a set; the first row that is none raises a `ValueError`."""
    for number, record in enumerate(iter_records(path), start=1):
        if not isinstance(record, Choice):
            raise ValueError(f"Row {number} of {path} is no single-choice question; expected what `vscq1` makes.")
        yield record
