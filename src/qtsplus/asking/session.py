"""Asks a model about videos that are encoded once, any number of times, and says what each answer rests on."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from urllib.parse import urlsplit

from huggingface_hub.utils import chunk_iterable

from ..common.files import printable
from ..hub.loading import load as load
from ..model.addresses_qtsplus import is_address
from ..model.numbers_qtsplus import require_count
from ..model.sampling_qtsplus import Sampling
from ..video.encoded import FAILURES, EncodedVideo, encode
from .answers import Answer, answer_questions
from .question import Question, check_name, check_names, check_question

MOST_TURNS = 100  # questions, with their answers, that a conversation remembers


def ask(
    model,
    processor,
    video,
    question: str,
    *,
    fps: float | None = None,
    subtitles: int | None = None,
    **options,
) -> Answer:
    """
    Asks one question about one video.

    Args:
        model, processor: as [`load`] gives them.
        video: whatever [`encode`] takes; or what it has made of one, for another question.
        question: the text; special tokens in it, such as `<|im_end|>`, are text too.
        fps: as for [`encode`], of a video that was not encoded before.
        subtitles, options: as for [`answer_questions`].

    Raises:
        ValueError: a question that is empty or longer than the model's positions, a video that cannot be read, frames
            without `fps`, `fps` for a video that was encoded before, a retention out of its range.
    """
    timings = {}
    if not isinstance(video, EncodedVideo):
        check_question(model, processor, question)
        video = encode(
            model,
            processor,
            video,
            fps=fps,
            subtitles=subtitles is not None,
        )
        timings["encode"] = video.seconds
    elif fps is not None:
        raise ValueError(f"Got {fps=} for a video that was encoded before; give it to `encode`.")
    (answer,) = answer_questions(
        model,
        processor,
        {video.video: video},
        [question],
        subtitles=subtitles,
        **options,
    )
    return replace(answer, timings=timings | answer.timings)


def answer_file(
    model,
    processor,
    place: str,
    sampling: Sampling,
    questions: Sequence[Question],
    *,
    name: str | None = None,
    batch_size: int = 1,
    **options,
) -> Iterator[tuple[int, Answer | BaseException]]:
    """
    Encodes a video once and answers questions about it, in batches of those with the same turns and the same choice.
    What cannot be read or answered ends no other question.

    Args:
        place: the video, as for [`encode`].
        name: what answers call the video.
        options: as for [`answer_questions`].

    Yields:
        the place of each question in the list, with its answer or the error in place of an answer.
    """
    try:
        video = encode(model, processor, place, **vars(sampling))
    except FAILURES as error:
        for number in range(len(questions)):
            yield number, error
        return
    groups: dict[tuple, list[int]] = {}
    for number, question in enumerate(questions):
        groups.setdefault((question.turns, question.choice), []).append(number)
    videos = {name or video.video: video}
    for (turns, choice), numbers in groups.items():
        for batch in map(list, chunk_iterable(numbers, batch_size)):
            asked = [questions[number] for number in batch]
            texts = [question.text for question in asked]
            queries = [question.query or question.text for question in asked]
            if queries == texts:
                queries = []
            results: Sequence[Answer | BaseException]
            try:
                results = answer_questions(
                    model,
                    processor,
                    videos,
                    texts,
                    queries=queries,
                    turns=turns,
                    **vars(choice),
                    **options,
                )
            except FAILURES as error:
                results = [error] * len(batch)
            yield from zip(batch, results, strict=True)


class VideoSession:
    """Videos that are encoded once and asked about again and again; those of a question compete for one budget."""

    def __init__(self, model, processor) -> None:
        self.model = model
        self.processor = processor
        self.videos: dict[str, EncodedVideo] = {}
        self.turns: list[str] = []  # of the conversation: a question, its answer, the next question, ...
        self.warnings: list[str] = []  # of every answer, as a library has them
        self._talking = threading.Lock()

    @property
    def names(self) -> list[str]:
        """The videos' names, in the order in which the model sees them."""
        return list(self.videos)

    def video(self, name: str) -> EncodedVideo:
        """A video by its name; `ValueError` if there is none of that name."""
        check_names([name], self.names)
        return self.videos[name]

    def add(self, video, name: str | None = None, **options) -> str:
        """
        Adds a video and returns its name.

        Args:
            video: whatever [`encode`] takes, or what it has made of one.
            name: what prompts and answers call it; the file's name by default, with a number where that is taken.
            options: as for [`encode`], such as `fps`.

        Raises:
            ValueError: a name that is empty or taken; options for what was encoded before; as [`encode`].
        """
        if name is not None and check_name(name) in self.videos:
            raise ValueError(f"The name {name!r} is taken; name the video otherwise.")
        if not isinstance(video, EncodedVideo):
            video = encode(self.model, self.processor, video, **options)
        elif options:
            raise ValueError(f"Got {', '.join(options)} for a video that was encoded before; expected `name` alone.")
        if name is None:
            name = self._free_name(video.video)
        self.videos[name] = video
        return name

    def _free_name(self, video: str) -> str:
        """The name of a file, with a number where that is taken."""
        path = urlsplit(video).path if is_address(video) else video
        file_name = printable(PurePath(path).name) or "video"
        name = file_name
        number = 1
        while name in self.videos:
            number += 1
            name = f"{file_name} ({number})"
        return name

    def remove(self, name: str) -> None:
        """Forgets a video; `ValueError` if there is none of that name."""
        check_names([name], self.names)
        del self.videos[name]

    def ask(
        self,
        question: str,
        videos: Sequence[str] | None = None,
        **generation,
    ) -> Answer:
        """Answers a question about all or some `videos`, by name, as [`answer_questions`] does."""
        (answer,) = self.ask_many([question], videos, **generation)
        return answer

    def ask_many(
        self,
        questions: Sequence[str],
        videos: Sequence[str] | None = None,
        *,
        batch_size: int = 16,
        **generation,
    ) -> list[Answer]:
        """As [`VideoSession.ask`] for each question, `batch_size` of them in one batch."""
        if isinstance(questions, str) or not isinstance(questions, Iterable):
            raise ValueError(f"Got {questions!r}; expected a list of questions.")
        batch_size = require_count("batch_size", batch_size)
        if videos is None:
            videos = self.names
        else:
            check_names(videos, self.names)
        chosen = {name: self.videos[name] for name in videos}
        answers = []
        for batch in map(list, chunk_iterable(questions, batch_size)):
            answers += answer_questions(
                self.model,
                self.processor,
                chosen,
                batch,
                **generation,
            )
        return answers

    def chat(self, question: str, **generation) -> Answer:
        """
        Answers a question that knows those before and their answers.

        The model reads the whole conversation, with the visual tokens that this question's own words choose: a
        follow-up should name what it is about. [`MOST_TURNS`] questions are remembered. The oldest are left out where
        the model has no positions for them; a warning of the answer says so. Threads take turns.
        """
        with self._talking:
            answer = self.ask(question, turns=self.turns, **generation)
            self.turns = [*self.turns, question, answer.answer][-2 * MOST_TURNS :]
        return answer

    def reset(self) -> None:
        """Ends the conversation; the videos stay."""
        with self._talking:
            self.turns = []
