"""Asks a model about videos that are encoded once, any number of times, and says what each answer rests on."""

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers.generation.streamers import BaseStreamer

from .decoding_qtsplus import is_address
from .evidence import Interval, evidence_intervals, keep_maps
from .hub.folder import read_json, whole_folder
from .loading import load
from .methods_qtsplus import Method
from .selector_qtsplus import QTSplusOutput
from .storage import fingerprint, load_video, save_video
from .two_passes import TwoPasses, second_pass, second_prompt
from .videos import EncodedVideo, encode

__all__ = ["Answer", "EncodedVideo", "TwoPasses", "VideoSession", "answer_questions", "ask", "encode", "load"]

_SAVED = "session.json"


@dataclass(frozen=True)
class Answer:
    """
    What a model answered about one or more videos, and what the answer rests on.

    Args:
        answer: the text.
        video: the path that was asked about; of several videos their names, with commas.
        frames: frames that the model saw.
        seconds_of_video: length of the videos.
        visual_tokens: M, the videos' tokens before the selection.
        kept_tokens: n, those that the language model read.
        rho: the fraction that the selection aimed at.
        evidence: stretches of a video that show what was asked for, see [`Interval`]; the surest first. Their seconds
            are those of a player.
        timings: seconds per stage. `encode` is reading and encoding the video, and missing where it was encoded before;
            `second_pass`, with two passes, is choosing regions and encoding them at full size.
            `first_token` and `generate` both count from the call of `generate`; questions of one batch share them.
        keep_maps: by the video's name, bool `[T, H, W]`, the kept tokens in its grid of tokens.
        warnings: what is wrong with the videos, as in [`EncodedVideo`].
    """

    answer: str
    video: str
    frames: int
    seconds_of_video: float
    visual_tokens: int
    kept_tokens: int
    rho: float
    evidence: list[Interval]
    timings: dict[str, float]
    keep_maps: dict[str, torch.Tensor]
    warnings: list[str] = field(default_factory=list)

    @property
    def keep_map(self) -> torch.Tensor:
        """`[T, H, W]`, the keep map of the only video; `ValueError` if there are several."""
        if len(self.keep_maps) != 1:
            raise ValueError(f"The answer is about {len(self.keep_maps)} videos: take one of `keep_maps`.")
        return next(iter(self.keep_maps.values()))

    def as_dict(self) -> dict[str, Any]:
        """What `qtsplus ask --json` prints: all fields but the keep maps."""
        fields = {name: value for name, value in vars(self).items() if name != "keep_maps"}
        evidence = [
            {
                **{"video": one.name, "start": one.start, "end": one.end, "weight": one.weight, "box": list(one.box)},
                "pixels": None if one.pixels is None else list(one.pixels),
            }
            for one in self.evidence
        ]
        return {**fields, "evidence": evidence}


def ask(
    model: Any,
    processor: Any,
    video: Any,
    question: str,
    *,
    fps: float | None = None,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: str | Method | None = None,
    two_passes: TwoPasses | None = None,
    max_new_tokens: int = 128,
) -> Answer:
    """
    Asks one question about one video.

    Args:
        model, processor: as [`load`] gives them.
        video: whatever [`encode`] takes; or what it has made of one, for another question.
        question: the text; special tokens in it, such as `<|im_end|>`, are text too.
        fps: as for [`encode`].
        retention: fraction of the visual tokens to keep, in (0, 1]; predicted from the question when absent.
        max_visual_tokens: most visual tokens to keep; with `retention`, the smaller of both counts.
        selection: another way to choose them than the model's own: a name such as `"uniform"`, or a function from
            `Candidates` and a count to indices (`methods_qtsplus.py`).
        two_passes: as for [`encode`], of a video that was not encoded before.
        max_new_tokens: longest answer.

    Raises:
        ValueError: a question that is empty or longer than the model's positions, a video that cannot be read, frames
            without `fps`, `fps` for a video that was encoded before, a retention out of its range.
    """
    check_question(model, processor, question)
    timings: dict[str, float] = {}
    if not isinstance(video, EncodedVideo):
        video = encode(model, processor, video, fps=fps, two_passes=two_passes)
        timings["encode"] = video.seconds
    elif fps is not None or two_passes is not None:
        given = f"fps={fps:g}" if fps is not None else f"two_passes={two_passes}"
        raise ValueError(f"Got {given} for a video that was encoded before; give it to `encode`.")
    choice: dict[str, Any] = {"retention": retention, "max_visual_tokens": max_visual_tokens, "selection": selection}
    videos = {video.video: video}
    (answer,) = answer_questions(model, processor, videos, [question], **choice, max_new_tokens=max_new_tokens)
    return replace(answer, timings={**timings, **answer.timings})


def answer_questions(
    model: Any,
    processor: Any,
    videos: Mapping[str, EncodedVideo],
    questions: Sequence[str],
    *,
    turns: Sequence[str] = (),
    memory: "_Memory | None" = None,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: str | Method | None = None,
    max_new_tokens: int = 128,
    **generation: Any,
) -> list[Answer]:
    """
    Answers questions about the same videos, whose tokens compete for one budget, in one batch.

    Args:
        videos: by name; the names stand in the prompt where there are several.
        questions: each a row of the batch, with a budget of its own.
        turns: what was asked and answered before, in turn, in one conversation with each of the questions.
        memory: of that conversation.
        retention, max_visual_tokens, selection, max_new_tokens: as for [`ask`].
        generation: as for `generate`.

    Raises:
        ValueError: no video; two passes over other than one video and one question; and as [`ask`].
    """
    for question in questions:
        check_question(model, processor, question)
    if not videos:
        raise ValueError("There is no video to ask about; add one.")
    choice: dict[str, Any] = {"retention": retention, "max_visual_tokens": max_visual_tokens, "selection": selection}
    options = {**generation, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    if any(video.large for video in videos.values()):
        return [_answer_twice(model, processor, videos, questions, turns, choice, options)]
    inputs = prompt_inputs(processor, videos, questions, turns, model.device)
    clock = Clock()
    options = {**options, "streamer": clock}
    if memory is None:
        output = model.generate(**inputs, **choice, **options)
        chosen = output.qtsplus
    else:
        output, chosen = memory.generate(model, inputs, choice, options)
    relevance = chosen.relevance or [None] * len(questions)  # none if the method computed none
    timings, start = clock.timings(), inputs["input_ids"].shape[1]
    rows = zip(output.sequences[:, start:], chosen.kept_indices, relevance, chosen.rho.tolist(), strict=True)
    return [make_answer(processor, videos, *row, timings) for row in rows]


@dataclass
class _Memory:
    """What the last answer of a conversation left: the key/value cache, and which tokens were kept."""

    cache: Any = None
    kept: torch.Tensor | None = None

    def generate(
        self, model: Any, inputs: dict[str, Any], choice: dict[str, Any], options: dict[str, Any]
    ) -> tuple[Any, QTSplusOutput]:
        """
        As `model.generate`, with the selection: from the cache if the question keeps the tokens that the cache was
        made of, since it then is what reading all of it again would give.
        """
        with torch.no_grad():
            prompt = model.model.compress(**inputs, **choice, sample_gate=False, pad_left=True)
        (kept,), chosen = prompt.qtsplus.kept_indices, prompt.qtsplus
        known, cache, self.kept, self.cache = self.kept, self.cache, None, None  # what is interrupted leaves no cache
        if known is not None and torch.equal(known, kept) and not model.model.recurrent:
            output = model.generate(**inputs, **choice, **options, past_key_values=cache)
        else:
            output = model.generate_from(prompt, **options)
        self.cache, self.kept = output.past_key_values, kept
        return output, chosen


def _answer_twice(
    model: Any,
    processor: Any,
    videos: Mapping[str, EncodedVideo],
    questions: Sequence[str],
    turns: Sequence[str],
    choice: dict[str, Any],
    options: dict[str, Any],
) -> Answer:
    """[`answer_questions`] with two passes over the only video."""
    if len(videos) > 1 or len(questions) > 1:
        raise ValueError("Two passes look at one video for one question; encode the videos in one pass.")
    started = time.perf_counter()
    ((name, video),) = videos.items()
    large: Any = video.large
    second = second_pass(model, large, prompt_inputs(processor, videos, questions, turns, model.device), **choice)
    timings = {"second_pass": time.perf_counter() - started}
    clock, whole = Clock(), {name: replace(video, video_grid_thw=large.chunks.video_grid_thw)}
    inputs = prompt_inputs(processor, whole, questions, turns, model.device)
    with torch.no_grad():
        prompt = second_prompt(model, inputs, [second], **{**choice, "retention": [second.retention]})
    output = model.generate_from(prompt, **options, streamer=clock)
    chosen: Any = prompt.qtsplus
    relevance = None if chosen.relevance is None else chosen.relevance[0]
    kept, relevance = second.of_the_whole(chosen.kept_indices[0], relevance)
    ids = output.sequences[0, inputs["input_ids"].shape[1] :]
    return make_answer(processor, whole, ids, kept, relevance, second.rho, {**timings, **clock.timings()})


def make_answer(
    processor: Any,
    videos: Mapping[str, EncodedVideo],
    ids: torch.Tensor,
    kept: torch.Tensor,
    relevance: torch.Tensor | None,
    rho: float,
    timings: dict[str, float],
) -> Answer:
    """An answer from the ids that the model wrote, and the selection among all tokens of the videos."""
    names, encoded = list(videos), list(videos.values())
    grids = torch.cat([video.video_grid_thw for video in encoded])
    seconds = [float(video.second_per_grid_ts[0]) for video in encoded]
    merge_size = processor.video_processor.merge_size
    maps = dict(zip(names, keep_maps(kept, grids, merge_size), strict=True))
    intervals = evidence_intervals(kept, relevance, grids, seconds, merge_size)
    return Answer(
        answer=processor.tokenizer.decode(ids, skip_special_tokens=True).strip(),
        video=encoded[0].video if len(encoded) == 1 else ", ".join(names),
        frames=sum(len(video.metadata.frames_indices) for video in encoded),
        seconds_of_video=sum(video.length for video in encoded),
        visual_tokens=sum(one.numel() for one in maps.values()),
        kept_tokens=len(kept),
        rho=rho,
        evidence=[placed(one, names[one.video], encoded[one.video]) for one in intervals],
        timings=timings,
        keep_maps=maps,
        warnings=[warning for video in encoded for warning in video.warnings],
    )


def placed(interval: Interval, name: str, video: EncodedVideo) -> Interval:
    """The same stretch on a player's clock, with its video's name and the box in pixels."""
    width, height = video.metadata.width, video.metadata.height
    pixels = None
    if width and height:
        left, top, right, bottom = interval.box
        low, high = (math.floor(left * width), math.floor(top * height)), (right * width, bottom * height)
        pixels = (*low, math.ceil(high[0]), math.ceil(high[1]))
    # The last grid step is padded where the frames are odd in number.
    start, end = video.start + interval.start, video.start + min(interval.end, video.length)
    return replace(interval, start=start, end=end, name=name, pixels=pixels)


def prompt_inputs(
    processor: Any,
    videos: Mapping[str, EncodedVideo],
    questions: Sequence[str],
    turns: Sequence[str] = (),
    device: Any = "cpu",
) -> dict[str, Any]:
    """
    The model's inputs for questions about the same videos, a row for each, as for [`answer_questions`].

    All videos stand in front of the first text. Of several, each has its name in front; only the question's own words
    then say which tokens are kept.
    """
    seen: list[dict[str, Any]] = []
    for name in videos:
        seen += [{"type": "text", "text": f"{name}: "}] * (len(videos) > 1) + [{"type": "video"}]
    rows = []
    for question in questions:
        texts = [[{"type": "text", "text": text}] for text in (*turns, question)]
        texts[0] = seen + texts[0]
        rows.append([{"role": ("user", "assistant")[n % 2], "content": parts} for n, parts in enumerate(texts)])
    encoded = list(videos.values()) * len(rows)
    grids = torch.cat([video.video_grid_thw for video in encoded])
    # Where nothing else stands in the last turn, it is the question.
    query = {"query": list(questions)} if len(videos) > 1 and not turns else {}
    metadata = [video.metadata for video in encoded]
    inputs = processor.conversation_inputs(rows, video_grid_thw=grids, video_metadata=metadata, **query).to(device)
    seconds = [float(video.second_per_grid_ts[0]) for video in encoded]
    return {**inputs, "video_features": [video.features for video in encoded], "second_per_grid_ts": seconds}


def check_question(model: Any, processor: Any, question: str) -> None:
    if not question.strip():
        raise ValueError("The question is empty; expected some text.")
    tokens = len(processor.tokenizer(question, add_special_tokens=False)["input_ids"])
    most = model.config.get_text_config().max_position_embeddings
    if tokens >= most:
        raise ValueError(f"The question has {tokens} tokens; expected fewer than the model's {most} positions.")


class Clock(BaseStreamer):
    """Notes when the first new token comes; `generate` puts the prompt before it."""

    def __init__(self) -> None:
        self.puts = 0
        self.started = time.perf_counter()
        self.first_token = float("nan")

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_token = time.perf_counter()

    def end(self) -> None:
        pass

    def timings(self) -> dict[str, float]:
        """Seconds to the first token, and until now."""
        return {"first_token": self.first_token - self.started, "generate": time.perf_counter() - self.started}


class VideoSession:
    """
    Videos that are encoded once and asked about again and again.

    All videos that a question is about compete for one budget, as in one prompt.

    Args:
        model, processor: as [`load`] gives them.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        self.videos: dict[str, EncodedVideo] = {}
        self.turns: list[str] = []  # of the conversation: a question, its answer, the next question, ...
        self._memory = _Memory()

    @property
    def names(self) -> list[str]:
        """The videos' names, in the order in which the model sees them."""
        return list(self.videos)

    def add(self, video: Any, name: str | None = None, **options: Any) -> str:
        """
        Encodes a video and adds it.

        Args:
            video: whatever [`encode`] takes, or what it has made of one.
            name: what prompts and answers call it; the file's name by default, with a number where that is taken.
            options: as for [`encode`], such as `fps`.

        Returns:
            the name.

        Raises:
            ValueError: a name that is empty or taken; options for a video that was encoded before; as [`encode`].
        """
        if name is not None and (not name.strip() or name in self.videos):
            raise ValueError(f"The name {name!r} is {'taken' if name.strip() else 'empty'}; name the video otherwise.")
        if not isinstance(video, EncodedVideo):
            video = encode(self.model, self.processor, video, **options)
        elif options:
            raise ValueError(f"Got {', '.join(options)} for a video that was encoded before; expected none.")
        if name is None:
            place = urlsplit(video.video).path if is_address(video.video) else video.video
            own = PurePath(place).name or "video"
            numbered = (f"{own} ({number})" for number in itertools.count(2))
            name = next(one for one in itertools.chain([own], numbered) if one not in self.videos)
        self.videos[name], self._memory = video, _Memory()
        return name

    def remove(self, name: str) -> None:
        """Forgets a video; `ValueError` if there is none of that name."""
        self._chosen([name])
        del self.videos[name]
        self._memory = _Memory()

    def ask(self, question: str, videos: Sequence[str] | None = None, **generation: Any) -> Answer:
        """
        Answers a question that knows nothing of those before.

        Args:
            videos: the names of those to ask about; all by default.
            generation: as for [`answer_questions`].
        """
        return self.ask_many([question], videos, **generation)[0]

    def ask_many(
        self, questions: Sequence[str], videos: Sequence[str] | None = None, *, batch_size: int = 16, **generation: Any
    ) -> list[Answer]:
        """As [`VideoSession.ask`] for each question, `batch_size` of them in one batch."""
        chosen, answers = self._chosen(videos), []
        for first in range(0, len(questions), batch_size):
            batch = questions[first : first + batch_size]
            answers += answer_questions(self.model, self.processor, chosen, batch, **generation)
        return answers

    def chat(self, question: str, **generation: Any) -> Answer:
        """
        Answers a question that knows those before and their answers.

        The model reads the whole conversation, with the visual tokens that this question's own words choose: a
        follow-up should name what it is about. The cache of the turns before serves where a question keeps the same
        tokens as the one before it, as with `selection="all"`; the answer is that of reading everything again.

        Args:
            generation: as for [`answer_questions`].
        """
        conversation: dict[str, Any] = {"turns": self.turns, "memory": self._memory}
        (answer,) = answer_questions(self.model, self.processor, self.videos, [question], **conversation, **generation)
        self.turns += [question, answer.answer]
        return answer

    def reset(self) -> None:
        """Ends the conversation; the videos stay."""
        self.turns, self._memory = [], _Memory()

    @cached_property
    def fingerprint(self) -> str:
        """What the model makes of pixels, see [`fingerprint`]."""
        return fingerprint(self.model, self.processor)

    def save(self, folder: str | Path) -> None:
        """
        Writes the videos' features, and the conversation, to a folder.

        Raises:
            FileExistsError: the folder holds files that no earlier call wrote.
            ValueError: a video for two passes.
        """
        with whole_folder(folder) as staging:
            files = {name: f"{number}.safetensors" for number, name in enumerate(self.videos)}
            for name, file in files.items():
                save_video(self.videos[name], staging / file, self.fingerprint)
            text = json.dumps({"videos": files, "turns": self.turns}, indent=2)
            (staging / _SAVED).write_text(text + "\n", encoding="utf-8")

    def load(self, folder: str | Path) -> None:
        """
        Takes the videos and the conversation that [`VideoSession.save`] wrote, in place of those that it has.

        Raises:
            ValueError: no such folder, a broken one, or one that was made with another vision tower or processor.
        """
        saved, device = read_json(Path(folder) / _SAVED), self.model.device
        if not {"videos", "turns"} <= saved.keys():
            raise ValueError(f"{folder} holds no session; expected a folder that `save` wrote.")
        self.videos = {
            name: load_video(Path(folder, file), self.fingerprint, device) for name, file in saved["videos"].items()
        }
        self.turns, self._memory = saved["turns"], _Memory()

    def _chosen(self, names: Sequence[str] | None) -> dict[str, EncodedVideo]:
        """The videos of these names, in their order; `ValueError` for one that is not there."""
        for name in names or ():
            if name not in self.videos:
                raise ValueError(f"There is no video {name!r}; expected some of {', '.join(self.names) or 'none'}.")
        return self.videos if names is None else {name: self.videos[name] for name in names}
