"""Questions about videos, and the prompts in which the model reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from ..common.validation import show
from ..model.question_qtsplus import check_text
from ..video.encoded import EncodedVideo
from .choice import Choice
from .recall import Remembered

Videos = Mapping[str, EncodedVideo]  # by name, in the order in which the model sees them

_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Question:
    """
    One of many questions about a video.

    Args:
        text: the question itself.
        query: what to select tokens by, where that is not the question itself.
        turns: what was asked and answered before, in turn.
        choice: how the visual tokens are chosen.
    """

    text: str
    query: str | None = None
    turns: tuple[str, ...] = ()
    choice: Choice = Choice()


@dataclass(frozen=True)
class Batch:
    """
    What the prompts of questions are made of that are answered together.

    Args:
        videos: what all questions are about, at least one; their tokens compete for one budget.
        questions: a text for each prompt.
        queries: for each question the text to select tokens by, where that is not the question itself.
        turns: what was asked and answered before, in turn, in front of each question.
        captions: for each question a text in front of it, such as subtitles.
    """

    videos: Videos
    questions: Sequence[str]
    queries: Sequence[str] = ()
    turns: Sequence[str] = ()
    captions: Sequence[str] = ()

    @property
    def remembered(self) -> list[Remembered]:
        """Those of the videos that a stream remembers: all of them, or none."""
        return [video for video in self.videos.values() if isinstance(video, Remembered)]

    def check(self, model, processor) -> None:
        """A `ValueError` for questions that cannot be asked."""
        for question in self.questions:
            check_question(model, processor, question)
        if not isinstance(self.turns, list | tuple) or len(self.turns) % 2:
            raise ValueError(f"turns={self.turns!r}; expected a list of questions and their answers, in turn.")
        counts = (0, len(self.questions))
        if not isinstance(self.queries, list | tuple) or len(self.queries) not in counts:
            raise ValueError(f"queries={self.queries!r}; expected a list of texts, one for each question.")
        for turn in self.turns:
            check_text("turn", turn)
        for query in self.queries:
            check_text("query", query)
        if not self.videos:
            raise ValueError("There is no video to ask about; add one.")
        if not self.remembered:
            return
        if len(self.remembered) < len(self.videos):
            raise ValueError("What a stream remembers stands beside no other videos: ask about it alone, by its name.")
        if len(self.questions) > 1:
            raise ValueError(f"Got {len(self.questions)} questions to a stream; expected one at a time.")

    def conversations(self) -> list[list[dict]]:
        """The messages of each prompt, with all videos in front of the first text."""
        last_turns = [[question] for question in self.questions]
        for texts, caption in zip(last_turns, self.captions, strict=False):
            if caption:
                texts.insert(0, caption)
        return [conversation(list(self.videos), self.turns, texts) for texts in last_turns]


def conversation(videos: Sequence[str], turns: Sequence[str], texts: Sequence[str]) -> list[dict]:
    """
    The messages of a prompt: the videos, each of several behind its name, in front of the first text; turns; and the
    last turn, in one or several texts.
    """
    shown = []
    for name in videos:
        if len(videos) > 1:
            shown.append(_text(f"{name}: "))
        shown.append({"type": "video"})
    contents = [[_text(turn)] for turn in turns]
    contents.append([_text(text) for text in texts])
    contents[0] = shown + contents[0]
    return [{"role": role, "content": content} for role, content in zip(cycle(_ROLES), contents, strict=False)]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def prompt_inputs(
    processor,
    batch: Batch,
    device: torch.device | str = "cpu",
) -> dict:
    """The model's inputs for a batch, a row for each question. Only a question's own words choose tokens."""
    videos = list(batch.videos.values()) * len(batch.questions)
    query = None
    has_names = len(batch.videos) > 1 and not batch.turns
    if batch.queries or any(batch.captions) or has_names:  # else the last turn holds the question alone
        query = list(batch.queries or batch.questions)
    inputs = processor.conversation_inputs(
        batch.conversations(),
        video_grid_thw=torch.cat([video.video_grid_thw for video in videos]),
        video_metadata=[video.about.metadata for video in videos],
        query=query,
    )
    return dict(
        inputs.to(device),
        video_features=[video.features for video in videos],
        second_per_grid_ts=[video.seconds_per_step for video in videos],
    )


def check_question(
    model,
    processor,
    question: str,
) -> None:
    """A `ValueError` for an empty question, and for one that is longer than the model's positions."""
    if not check_text("question", question).strip():
        raise ValueError("The question is empty; expected some text.")
    most = model.config.get_text_config().max_position_embeddings
    tokens = len(processor.prompt_ids(question))
    if tokens >= most:
        raise ValueError(f"The question has {tokens} tokens; expected fewer than the model's {most} positions.")


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """A `ValueError` for what is not a list of names of some of the known videos, each once."""
    chosen = [name for name in known if isinstance(names, list | tuple) and name in names]
    if not chosen or len(chosen) < len(names):
        raise ValueError(
            f"Got the names {show(names)}; expected a list of some of the videos {show(known)}, each once."
        )


def check_name(name: str) -> str:
    """What a video or a camera may be called, since it may stand in the prompt."""
    if not check_text("name", name).strip():
        raise ValueError("The name is empty; expected some text.")
    return name
