"""TinyWorld's records with their dense supervision, as examples and batches."""

import os
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from qtsplus.common.validation import explain
from qtsplus.data.formats import iter_rows, media_folder, read_records
from qtsplus.data.records import VideoRecord
from qtsplus.training.dataset import VideoQACollator, VideoQADataset

from .naming import load_token_words
from .rivals import About, names_shown
from .targets import AttentionTargets

Index = Annotated[int, Strict(), Field(ge=0)]
_DENSE = ("token_words", "needles", "looks")


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class TinyWorldRecord(VideoRecord):
    """
    A [`VideoRecord`] with what its video shows.

    Args:
        token_words: a safetensors file that names what each visual token shows, see `NamedTokens`.
        needles: of each answer in turn, the visual tokens of that file's grid that it rests on; may be empty.
        looks: of each answer in turn, for its first words in turn the visual tokens that show them; without any, its
            first word has the needles.

    Raises:
        ValueError: as [`VideoRecord`], or needles of more or fewer answers.
    """

    token_words: str | None = None
    needles: tuple[tuple[Index, ...], ...] = ()
    looks: tuple[tuple[tuple[Index, ...], ...], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "TinyWorldRecord":
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
    root, records = media_folder(path, media_root), []
    for plain, row in zip(read_records(path, media_root), iter_rows(path), strict=True):
        dense = {name: row.content[name] for name in _DENSE if name in row.content}
        if dense.get("token_words") is not None:
            dense["token_words"] = str(root / dense["token_words"])
        try:
            record = TinyWorldRecord(**vars(plain), **dense)
        except ValidationError as error:
            raise ValueError(f"Row {row.number} of {path} is not a record: {explain(error, row.content)}") from None
        records.append(record)
    return records


class TinyWorldDataset(VideoQADataset):
    """
    As [`VideoQADataset`].

    `dense`, when set, gives examples the `token_words` of their record, a [`TokenWords`], and as `needles` the tokens
    `[k]` of each answer's first words, where it has them; `about`, when set, an [`About`] where the record has
    `token_words`; `targets`, when set, the `attention` `[M]` that is kept of a record.
    """

    dense = False
    about = False
    targets: AttentionTargets | None = None

    @staticmethod
    def read(path: str | os.PathLike, media_root: str | os.PathLike | None = None) -> Sequence[VideoRecord]:
        """See [`read_tinyworld`]."""
        return read_tinyworld(path, media_root)

    def example(self, record: VideoRecord) -> dict[str, Any]:
        """As for [`VideoQADataset`], with the dense supervision."""
        example = super().example(record)
        if "skipped" in example:
            return example
        if self.targets is not None and record.video is not None:
            example |= self.targets.load(record, example)
        if not isinstance(record, TinyWorldRecord):
            return example
        if self.about and record.token_words is not None and record.video is not None:
            example["about"] = About(record.question, str(record.video), names_shown(record.token_words))
        if not self.dense:
            return example
        if record.token_words is not None:
            example["token_words"] = load_token_words(record.token_words, self.processor.tokenizer)
        if record.needles:
            looks = record.looks or tuple((needles,) for needles in record.needles)
            example["needles"] = [[torch.tensor(word, dtype=torch.int64) for word in answer] for answer in looks]
        return example


class TinyWorldCollator(VideoQACollator):
    """As [`VideoQACollator`], with the dense supervision."""

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """
        Returns:
            as [`VideoQACollator`]; and a list of the rows' `token_words` if any row has them (`None` for the others),
            of their `needles` if any row has some (none for the others), of what each is `about` if any row says it
            (`None` for the others), and of their `attention` `[M]` if any row has a target (empty for the others).
        """
        batch = super().__call__(examples)
        rows = [example for example in examples if "skipped" not in example]
        if any("token_words" in row for row in rows):
            batch["token_words"] = [row.get("token_words") for row in rows]
        if any("needles" in row for row in rows):
            batch["needles"] = [row.get("needles", ()) for row in rows]
        if any("about" in row for row in rows):
            batch["about"] = [row.get("about") for row in rows]
        if any("attention" in row for row in rows):
            batch["attention"] = [row.get("attention", torch.zeros(0)) for row in rows]
        return batch
