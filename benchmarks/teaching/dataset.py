"""TinyWorld's records with their dense supervision, as examples and batches."""

import os
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from qtsplus.data.formats import iter_rows, media_folder, read_records
from qtsplus.data.records import VideoRecord, explain
from qtsplus.training.collator import VideoQACollator
from qtsplus.training.dataset import SkippedRecord, VideoQADataset

from .naming import load_token_words

Index = Annotated[int, Strict(), Field(ge=0)]


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class TinyWorldRecord(VideoRecord):
    """
    A [`VideoRecord`] with what its video shows.

    Args:
        token_words: a safetensors file that names what each visual token shows, see `NamedTokens`.
        needles: of each answer in turn, the visual tokens of that file's grid that it rests on; may be empty.

    Raises:
        ValueError: as [`VideoRecord`], or needles of more or fewer answers.
    """

    token_words: str | None = None
    needles: tuple[tuple[Index, ...], ...] = ()

    @model_validator(mode="after")
    def _check_needles(self) -> "TinyWorldRecord":
        if self.needles and len(self.needles) != len(self.earlier) + 1:
            raise ValueError(f"has needles of {len(self.needles)} answers, but {len(self.earlier) + 1} answers")
        return self


def read_tinyworld(path: str | os.PathLike, media_root: str | os.PathLike | None = None) -> list[TinyWorldRecord]:
    """
    The records of a file with their dense supervision, as far as they have any.

    Args:
        path, media_root: as for [`read_records`].

    Raises:
        ValueError: as [`read_records`], or supervision of another form.
    """
    root, found = media_folder(path, media_root), []
    for record, row in zip(read_records(path, media_root), iter_rows(path), strict=True):
        dense = {name: row.content[name] for name in ("token_words", "needles") if name in row.content}
        if dense.get("token_words") is not None:
            dense["token_words"] = str(root / dense["token_words"])
        try:
            found.append(TinyWorldRecord(**vars(record), **dense))
        except ValidationError as error:
            raise ValueError(f"Row {row.number} of {path} is not a record: {explain(error)}") from None
    return found


class TinyWorldDataset(VideoQADataset):
    """
    As [`VideoQADataset`].

    `dense`, when set, gives examples the `token_words` of their record, a [`TokenWords`], and its `needles`, `[k]` for
    each answer, where it has them.
    """

    dense = False

    @staticmethod
    def read(path: str | os.PathLike, media_root: str | os.PathLike | None = None) -> Sequence[VideoRecord]:
        """See [`read_tinyworld`]."""
        return read_tinyworld(path, media_root)

    def example(self, record: VideoRecord) -> dict[str, Any] | SkippedRecord:
        """As for [`VideoQADataset`], with the dense supervision."""
        example = super().example(record)
        if isinstance(example, SkippedRecord) or not self.dense or not isinstance(record, TinyWorldRecord):
            return example
        if record.token_words is not None:
            example["token_words"] = load_token_words(record.token_words, self.processor.tokenizer)
        if record.needles:
            example["needles"] = [torch.tensor(needles, dtype=torch.int64) for needles in record.needles]
        return example


class TinyWorldCollator(VideoQACollator):
    """As [`VideoQACollator`], with the dense supervision."""

    def __call__(self, examples: Sequence[dict[str, Any] | SkippedRecord]) -> dict[str, Any]:
        """
        Returns:
            as [`VideoQACollator`]; and a list of the rows' `token_words` if any row has them (`None` for the others),
            and of their `needles` if any row has some (none for the others).
        """
        batch = super().__call__(examples)
        rows = [example for example in examples if not isinstance(example, SkippedRecord)]
        if any("token_words" in row for row in rows):
            batch["token_words"] = [row.get("token_words") for row in rows]
        if any("needles" in row for row in rows):
            batch["needles"] = [row.get("needles", ()) for row in rows]
        return batch


__all__ = ["TinyWorldCollator", "TinyWorldDataset", "TinyWorldRecord", "read_tinyworld"]
