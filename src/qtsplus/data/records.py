"""The records of a set: captions, single-choice items, free answers, and the questions that a model is trained on."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from string import ascii_lowercase
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    model_validator,
)
from pydantic.dataclasses import dataclass

from ..common.validation import check_inside, show, validated

if TYPE_CHECKING:
    from ..model.video_qtsplus import AboutVideo

ROUNDING = 1.0  # evidence may end this many seconds after its video, since annotated times are often rounded
SOURCES = ("mcq", "vqa", "caption")

# A `Choice` has these options, and its prompt ends with this instruction.
LETTERS = "ABCD"
Letter = Literal["A", "B", "C", "D"]
INSTRUCTION = "Answer with the letter."


def _check_filled(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; expected some text")
    return text


# Tokenizers take valid Unicode only. Pydantic checks that for texts with a limit of length, even of 0.
String = Annotated[str, Field(min_length=0)]
Text = Annotated[String, AfterValidator(_check_filled)]
RowId = Annotated[String, Field(coerce_numbers_to_str=True)]  # the rows of a table may have numbers as ids
VisionId = Annotated[Text, AfterValidator(check_inside)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Second = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # a time as a player shows it
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class VisionRecord(BaseModel):
    """The fields that captions, choices and free answers share; other keys of a row are ignored."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    vision_id: VisionId  # a file, with or without its suffix, or a folder of frames; under the media root
    id: RowId | None = None
    fps: Positive | None = None  # of a folder, the rate of its frames; of a file, frames to look at per second

    def row(self) -> dict:
        """The record as a line of a file, without the fields that are `None`."""
        return self.model_dump(exclude_none=True)


class Caption(VisionRecord):
    """What a video shows, in words."""

    caption: Text


class Choice(VisionRecord):
    """A single-choice question about a video; a line of QTS-VSCQ1 and QTS-VSCQ2."""

    question: Text  # without the options
    options: dict[Letter, Text]  # four different texts
    answer: Letter
    type: String | None = None
    difficulty: String | None = None
    rationale: String | None = None  # why the answer is right
    evidence: String | None = None  # words of the caption that show the answer; not times, see [`parse_needles`]

    @model_validator(mode="after")
    def _check_options(self) -> "Choice":
        if len(self.options) != len(LETTERS):
            raise ValueError(f"options has {', '.join(self.options) or 'none'}; expected A, B, C and D")
        right_letter(self.answer, self.texts())
        return self

    def prompt(self) -> str:
        """The question, each option on a line of its own, and the instruction."""
        lines = [self.question]
        for letter in get_args(Letter):
            lines.append(f"{letter}. {self.options[letter]}")
        lines.append(INSTRUCTION)
        return "\n".join(lines)

    def texts(self) -> list[str]:
        """The options in the order of their letters."""
        return [self.options[letter] for letter in get_args(Letter)]


class FreeAnswer(VisionRecord):
    """A question about a video with a free answer; a line of QTS-VQA."""

    question: Text
    answer: Text = Field(validation_alias=AliasChoices("answer", "prediction"))  # the reference says "prediction"
    # Both are those of the [`Choice`] that the question comes from.
    type: String | None = None
    difficulty: String | None = None


@dataclass(frozen=True)
class VideoRecord:
    """
    One question about one video as the model reads it: what `qtsplus train` and `qtsplus eval` work on. A `ValueError`
    for a value of another type or out of range, and for an empty text.
    """

    video: Text | None  # a file, an address or a folder of frames; `None` for text only
    question: Text  # the user's text, with the options where there are any
    answer: String  # what the assistant says; the only part that is supervised, with the token that ends it
    query: Text | None = None  # the text to select by, such as the question without its options
    kind: String = ""  # free label of the question's kind
    source: Literal["mcq", "vqa", "caption"] = "vqa"  # the loss that it counts to
    options: tuple[Text, ...] | None = None  # for evaluation; `answer` is the text or the letter of one of them
    # The (question, answer) turns before this one, about the same video. They are supervised too, so many questions
    # about a video cost one pass over it.
    earlier: tuple[tuple[String, String], ...] = ()
    fps: Positive | None = None  # of a folder, the rate of its frames; of a file, frames to look at per second
    id: RowId | None = None

    def __post_init__(self) -> None:
        if self.options:
            right_letter(self.answer, self.options)

    @property
    def turns(self) -> tuple[str, ...]:
        """The earlier turns as one flat sequence: question, answer, question, answer, ..."""
        return tuple(chain.from_iterable(self.earlier))

    def row(self) -> dict:
        """The record as a line of a file, without its empty fields; `video` and `answer` are always in it."""
        stated = {name: value for name, value in asdict(self).items() if value not in (None, "", ())}
        return {"video": None, "answer": ""} | stated


def options_by_letter(options: Sequence[str]) -> dict[str, str]:
    """
    The options, in the form in which they are compared, by their letter in lower case. A `ValueError` for fewer than
    2 or more than 26 options, and for two that are equal in this form.
    """
    texts = {letter: _option_text(letter, option) for letter, option in zip(ascii_lowercase, options, strict=False)}
    if not 1 < len(set(texts.values())) == len(options):
        raise ValueError(f"options is {show(list(options))}; expected 2 to 26 different texts")
    return texts


def right_letter(answer: str, options: Sequence[str]) -> str:
    """
    The option that an answer names by its letter, see [`lone_letter`], or by its text; returned as its letter in lower
    case. A `ValueError` for an answer that is neither the letter nor the text of an option.
    """
    by_letter = options_by_letter(options)
    alone = lone_letter(answer)
    if alone in by_letter:
        return alone
    for letter, option in by_letter.items():
        if _option_text(letter, answer) == option:
            return letter
    raise ValueError(f"answer is {show(answer)}; expected the letter or the text of one of the options")


def lone_letter(answer: str) -> str:
    """The letter, in lower case, of an answer that is only a letter, such as "B", "b." and "(B)"; else empty."""
    letter = re.fullmatch(r"\(?([A-Za-z])[).:]*", answer.strip())
    return letter[1].lower() if letter else ""


def _option_text(letter: str, option: str) -> str:
    """An option in the form in which options are compared: "B. A  Rope." with the letter "b" is "a rope"."""
    return re.sub(rf"^\W?{letter}[.):\]] ", "", " ".join(option.casefold().split())).rstrip(".")


Record = Caption | Choice | FreeAnswer | VideoRecord


def parse_record(row: object) -> Record:
    """
    A row as a record. Without `vision_id` it is a [`VideoRecord`]; else a [`Caption`] if it has `caption`, a [`Choice`]
    if it has `options`, and otherwise a [`FreeAnswer`]. A `ValueError` of one line for a row that is not such a record.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected a JSON object, got a {type(row).__name__}.")
    return validated(_kind_of(row), row)


def _kind_of(row: Mapping) -> type[Record]:
    if "vision_id" not in row:
        return VideoRecord
    if "caption" in row:
        return Caption
    if "options" in row:
        return Choice
    return FreeAnswer


def to_video_record(record: Record, video: str | None = None) -> VideoRecord:
    """
    The record as the model reads it. `video` is the path or address of its video, by default the name in the record.
    A `ValueError` for a caption, which asks nothing.
    """
    if isinstance(record, VideoRecord):
        return replace(record, video=video or record.video)
    if isinstance(record, Caption):
        raise ValueError("it is a caption, which asks nothing; make questions of captions first.")
    made = VideoRecord(
        video=video or record.vision_id,
        question=record.question,
        answer=record.answer,
        kind=record.type or "",
        fps=record.fps,
        id=record.id,
    )
    if isinstance(record, Choice):
        return replace(
            made,
            question=record.prompt(),
            query=record.question,
            source="mcq",
            options=tuple(record.texts()),
        )
    return made


@dataclass(frozen=True)
class Sighting:
    """
    When (in seconds) and where (in shares of the frame) something can be seen. A `ValueError` for an empty box, and for
    an end before the start.
    """

    start: Second
    end: Second
    # Left, top, right and bottom; by default the whole frame, for evidence of which only the time is known.
    box: tuple[Share, Share, Share, Share] = (0.0, 0.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        left, top, right, bottom = self.box
        if left >= right or top >= bottom:
            raise ValueError(f"The box {list(self.box)} is empty; expected left, top, right and bottom.")
        if self.start > self.end:
            raise ValueError(f"It ends at {self.end:g} s, before its start at {self.start:g} s.")


def parse_needles(row: Mapping, name: str) -> list[list[Sighting]]:
    """
    The `evidence` of a row, empty if it has none. Each needle is a thing that must be seen, as a list of its sightings:
    any of them shows it. A `ValueError`, in which the evidence is called `name`, for another form.
    """
    evidence = row.get("evidence") or []
    where = f"{name} is not a list of needles, each a list of sightings: "
    return validated(list[list[Sighting]], evidence, where)


def check_shown(name: str, sightings: Iterable[Sighting], about: "AboutVideo") -> None:
    """Raises `ValueError`, in which the evidence is called `name`, if a sighting is outside of its video."""
    end = about.start + about.length
    for sighting in sightings:
        if sighting.start >= end or not about.start <= sighting.end <= end + ROUNDING:
            raise ValueError(
                f"{name} is from {sighting.start:g} to {sighting.end:g} s; expected times of the video, which a player "
                f"shows from {about.start:g} to {end:g} s."
            )
