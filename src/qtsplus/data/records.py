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

ROUNDED = 1.0  # seconds by which evidence may end after its video
LETTERS = "ABCD"
SOURCES = ("mcq", "vqa", "caption")

Letter = Literal["A", "B", "C", "D"]

INSTRUCTION = "Answer with the letter."


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; expected some text")
    return text


String = Annotated[str, Field(min_length=0)]  # a field with a limit takes valid Unicode alone, as tokenizers do
Text = Annotated[String, AfterValidator(_filled)]
RowId = Annotated[String, Field(coerce_numbers_to_str=True)]  # tables number their rows
VisionId = Annotated[Text, AfterValidator(check_inside)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Second = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # on a player's clock
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class VisionRecord(BaseModel):
    """What captions, choices and answers share; further keys of a row are ignored."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    vision_id: VisionId  # a file or a folder of frames under the media root, with its suffix or without
    id: RowId | None = None
    fps: Positive | None = None  # of a folder, the rate of its frames; of a file, frames to look at per second

    def row(self) -> dict:
        """The record as a line of a file has it, without what it does not say."""
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
    evidence: String | None = None  # the words of the caption that show it

    @model_validator(mode="after")
    def _check_options(self) -> "Choice":
        if len(self.options) != len(LETTERS):
            raise ValueError(f"options has {', '.join(self.options) or 'none'}; expected A, B, C and D")
        right_letter(self.answer, self.texts())
        return self

    def prompt(self) -> str:
        """The question with its options, a line each, and how to answer."""
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
    answer: Text = Field(validation_alias=AliasChoices("answer", "prediction"))  # as the reference calls it
    type: String | None = None  # of the [`Choice`] that the question comes from
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
    source: Literal["mcq", "vqa", "caption"] = "vqa"  # whose loss it counts to
    options: tuple[Text, ...] | None = None  # for evaluation; `answer` is the text or the letter of one of them
    # Turns of the conversation before this one, supervised too: many questions about a video cost one pass over it.
    earlier: tuple[tuple[String, String], ...] = ()
    fps: Positive | None = None  # of a file, frames to look at per second; of a folder, the rate of its frames
    id: RowId | None = None

    def __post_init__(self) -> None:
        if self.options:
            right_letter(self.answer, self.options)

    @property
    def turns(self) -> tuple[str, ...]:
        """The earlier questions and answers, in turn."""
        return tuple(chain.from_iterable(self.earlier))

    def row(self) -> dict:
        """The record as a line of a file has it, without what it does not say; `video` stays where there is none."""
        stated = {name: value for name, value in asdict(self).items() if value not in (None, "", ())}
        return {"video": None, "answer": ""} | stated


def options_by_letter(options: Sequence[str]) -> dict[str, str]:
    """The options as they are compared, by lower-case letter; a `ValueError` where two are equal or letters run out."""
    texts = {letter: _option_text(letter, option) for letter, option in zip(ascii_lowercase, options, strict=False)}
    if not 1 < len(set(texts.values())) == len(options):
        raise ValueError(f"options is {show(list(options))}; expected 2 to 26 different texts")
    return texts


def right_letter(answer: str, options: Sequence[str]) -> str:
    """
    The lower-case letter of the option that an answer is: by its letter, see [`lone_letter`], or by its text. A
    `ValueError` for an answer that is none of them.
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
    """The lower-case letter of an answer that is nothing else, such as "B", "b." and "(B)"; else empty."""
    letter = re.fullmatch(r"\(?([A-Za-z])[).:]*", answer.strip())
    return letter[1].lower() if letter else ""


def _option_text(letter: str, option: str) -> str:
    """An option as it is compared: "B. A  Rope." with the letter "b" is "a rope"."""
    return re.sub(rf"^\W?{letter}[.):\]] ", "", " ".join(option.casefold().split())).rstrip(".")


Record = Caption | Choice | FreeAnswer | VideoRecord


def parse_record(row: object) -> Record:
    """
    A row as the record that its keys name: `caption`, else `options` by letter, else `vision_id` or `video`; a
    `ValueError` of one line for keys or values that no record has.
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
    """The record as the model reads it, with the place of its media; a caption asks nothing: a `ValueError`."""
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
    """Something seen; a `ValueError` for an empty box, and for an end before the start."""

    start: Second
    end: Second
    # Left, top, right and bottom in shares of the frame; the whole frame where only the time is known.
    box: tuple[Share, Share, Share, Share] = (0.0, 0.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        left, top, right, bottom = self.box
        if left >= right or top >= bottom:
            raise ValueError(f"The box {list(self.box)} is empty; expected left, top, right and bottom.")
        if self.start > self.end:
            raise ValueError(f"It ends at {self.end:g} s, before its start at {self.start:g} s.")


def parse_needles(row: Mapping, name: str) -> list[list[Sighting]]:
    """The `evidence` of a row, none if it has none; a `ValueError`, with its `name`, for evidence of another form."""
    evidence = row.get("evidence") or []
    where = f"{name} is not a list of needles, each a list of sightings: "
    return validated(list[list[Sighting]], evidence, where)


def check_shown(name: str, sightings: Iterable[Sighting], about: "AboutVideo") -> None:
    """Raises `ValueError` for evidence, with its `name`, that is outside of its video."""
    end = about.start + about.length
    for seen in sightings:
        if seen.start >= end or not about.start <= seen.end <= end + ROUNDED:
            raise ValueError(
                f"{name} is from {seen.start:g} to {seen.end:g} s; expected times of the video, which a player shows "
                f"from {about.start:g} to {end:g} s."
            )
