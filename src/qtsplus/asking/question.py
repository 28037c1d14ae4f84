"""A question about videos, and the prompt in which the model reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from ..video.encoded import EncodedVideo
from .choice import Choice
from .recall import Remembered

Videos = Mapping[str, EncodedVideo]  # by name, in the order in which the model sees them

_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Question:
    """
    What a prompt is made of. The questions of one batch have the same `turns` and the same `choice`.

    Args:
        videos: those that it is about, at least one; their tokens compete for one budget.
        text: the question itself.
        query: what to select by, where that is not the question itself.
        turns: what was asked and answered before, in turn.
        choice: how the visual tokens are chosen.
        caption: a text in front of the question, such as subtitles.
    """

    videos: Videos
    text: str
    query: str | None = None
    turns: Sequence[str] = ()
    choice: Choice = Choice()
    caption: str = ""

    @property
    def remembered(self) -> list[Remembered]:
        """Those of the videos that a stream remembers: all of them, or none."""
        return [video for video in self.videos.values() if isinstance(video, Remembered)]

    def check(self, model, processor) -> None:
        """A `ValueError` for a question that cannot be asked."""
        check_question(model, processor, self.text)
        if not isinstance(self.turns, (list, tuple)) or len(self.turns) % 2:
            raise ValueError(f"turns={self.turns!r}; expected a list of questions and their answers, in turn.")
        for turn in self.turns:
            check_text("turn", turn)
        if self.query is not None:
            check_text("query", self.query)
        if not self.videos:
            raise ValueError("There is no video to ask about; add one.")
        if self.remembered and len(self.remembered) < len(self.videos):
            raise ValueError("What a stream remembers stands beside no other videos: ask about it alone, by its name.")

    def messages(self) -> list[dict]:
        """The conversation, with all videos in front of its first text."""
        contents = [[_text(turn)] for turn in self.turns]
        own_turn = [_text(self.text)]
        if self.caption:
            own_turn.insert(0, _text(self.caption))
        contents.append(own_turn)
        contents[0] = self._shown() + contents[0]
        messages = []
        for role, content in zip(cycle(_ROLES), contents, strict=False):
            messages.append({"role": role, "content": content})
        return messages

    def _shown(self) -> list[dict[str, str]]:
        """The parts of a message that show the videos, each of several behind its name."""
        parts = []
        for name in self.videos:
            if len(self.videos) > 1:
                parts.append(_text(f"{name}: "))
            parts.append({"type": "video"})
        return parts

    @property
    def needs_query(self) -> bool:
        """Whether something else stands in the last turn, or decides instead of it."""
        has_names = len(self.videos) > 1 and not self.turns
        return self.query is not None or bool(self.caption) or has_names


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def prompt_inputs(processor, questions: Sequence[Question], device: torch.device | str = "cpu") -> dict:
    """The model's inputs for questions about videos, a row for each. Only a question's own words choose tokens."""
    videos: list[EncodedVideo] = []
    for question in questions:
        videos += question.videos.values()
    options = {}
    if any(question.needs_query for question in questions):
        options["query"] = [question.text if question.query is None else question.query for question in questions]
    inputs = processor.conversation_inputs(
        [question.messages() for question in questions],
        video_grid_thw=torch.cat([video.video_grid_thw for video in videos]),
        video_metadata=[video.about.metadata for video in videos],
        **options,
    )
    return dict(
        inputs.to(device),
        video_features=[video.features for video in videos],
        second_per_grid_ts=[video.seconds_per_step for video in videos],
    )


def check_question(model, processor, question: str) -> None:
    """A `ValueError` for an empty question, and for one that is longer than the model's positions."""
    if not check_text("question", question).strip():
        raise ValueError("The question is empty; expected some text.")
    most = model.config.get_text_config().max_position_embeddings
    if 4 * len(question.encode()) < most:  # a token is at least a byte, of which normalising makes three at most
        return
    tokens = len(processor.tokenizer(question, add_special_tokens=False)["input_ids"])
    if tokens >= most:
        raise ValueError(f"The question has {tokens} tokens; expected fewer than the model's {most} positions.")


def check_name(name: str) -> str:
    """What a video or a camera may be called, since it may stand in the prompt."""
    if not check_text("name", name).strip():
        raise ValueError("The name is empty; expected some text.")
    return name


def check_text(what: str, text: str) -> str:
    """The text; a `ValueError` for other values, and for text that has no bytes."""
    if not isinstance(text, str):
        raise ValueError(f"The {what} is {text!r}; expected a text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The {what} {text!r} holds half a character (a lone surrogate); expected Unicode.") from error
    return text
