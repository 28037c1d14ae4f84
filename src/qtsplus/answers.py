"""An answer about videos: the prompt of its question, and what it is made of."""

import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from .evidence import Interval, evidence_intervals, keep_maps
from .prompt_qtsplus import pad_rows
from .two_passes import SecondPass
from .videos import EncodedVideo

MAX_NEW_TOKENS = 128  # of an answer, where nobody says


@dataclass(frozen=True)
class Answer:
    """What a model answered about one or more videos, and what the answer rests on."""

    answer: str  # the text
    video: str  # the path that was asked about; of several videos their names, with commas
    frames: int  # that the model saw
    seconds_of_video: float
    visual_tokens: int  # M, the videos' tokens before the selection
    kept_tokens: int  # n, those that the language model read
    rho: float  # the fraction that the selection aimed at
    evidence: list[Interval]  # stretches that show what was asked for, the surest first, on a player's clock
    # Seconds of reading and encoding the video (`encode`, unless that was before), of a `second_pass`, and from calling
    # `generate` to the `first_token` and to the end (`generate`); questions of one batch share them.
    timings: dict[str, float]
    keep_maps: dict[str, torch.Tensor]  # by the video's name, bool [T, H, W], the kept tokens in its grid of tokens
    # How sure it is that the videos show what was asked for: the part of the relevance, 0 to 1, that their tokens took
    # from the null token; `None` from a model without one.
    seen: float | None = None
    warnings: list[str] = field(default_factory=list)  # as in [`EncodedVideo`]

    @property
    def keep_map(self) -> torch.Tensor:
        """`[T, H, W]`, the keep map of the only video; `ValueError` if there are several."""
        if len(self.keep_maps) != 1:
            raise ValueError(f"The answer is about {len(self.keep_maps)} videos: take one of `keep_maps`.")
        return next(iter(self.keep_maps.values()))

    def as_dict(self) -> dict[str, Any]:
        """What `qtsplus ask --json` prints: all fields but the keep maps."""
        fields = {name: value for name, value in vars(self).items() if name != "keep_maps"}
        evidence = []
        for one in self.evidence:
            place = {"box": list(one.box), "pixels": None if one.pixels is None else list(one.pixels)}
            evidence.append({"video": one.name, "start": one.start, "end": one.end, "weight": one.weight, **place})
        return {**fields, "evidence": evidence}


def make_answer(
    model: Any,
    processor: Any,
    videos: Mapping[str, EncodedVideo],
    ids: torch.Tensor,
    chosen: Any,
    timings: dict[str, float],
    row: int = 0,
    second: SecondPass | None = None,
) -> Answer:
    """An answer from the ids that the model wrote, and a row of what was kept of the videos, or of a second pass."""
    kept, rho = chosen.kept_indices[row], float(chosen.rho[row])
    relevance = chosen.relevance[row] if chosen.relevance else None  # none if the method computed none
    if second is not None:
        (kept, relevance), rho = second.of_the_whole(kept, relevance), second.rho
    names, encoded = list(videos), list(videos.values())
    grids = torch.cat([video.video_grid_thw for video in encoded])
    seconds = [float(video.second_per_grid_ts[0]) for video in encoded]
    merge_size = processor.video_processor.merge_size
    maps = dict(zip(names, keep_maps(kept, grids, merge_size), strict=True))
    strong_share = model.config.qtsplus_config.evidence_share
    intervals = evidence_intervals(kept, relevance, grids, seconds, merge_size, strong_share)
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
        seen=None if chosen.seen is None else float(chosen.seen[row]),
        warnings=[warning for video in encoded for warning in video.warnings],
    )


def placed(interval: Interval, name: str, video: EncodedVideo) -> Interval:
    """The same stretch on a player's clock, with its video's name and the box in pixels."""
    width, height = video.metadata.width, video.metadata.height
    pixels = None
    if width and height:
        left, top, right, bottom = interval.box
        pixels = floor(left * width), floor(top * height), ceil(right * width), ceil(bottom * height)
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
    The model's inputs for questions about the same videos, a row for each.

    All videos stand in front of the first text. Of several, each has its name in front; only the question's own words
    then say which tokens are kept.
    """
    seen: list[dict[str, Any]] = []
    for name in videos:
        seen += [{"type": "text", "text": f"{name}: "}] * (len(videos) > 1) + [{"type": "video"}]
    encoded = list(videos.values())

    def inputs_of(questions: Sequence[str], seen: list[dict[str, Any]], shown: list[EncodedVideo]) -> Any:
        rows, shown = [], shown * len(questions)
        for question in questions:
            texts = [[{"type": "text", "text": text}] for text in (*turns, question)]
            texts[0] = seen + texts[0]
            rows.append([{"role": ("user", "assistant")[n % 2], "content": parts} for n, parts in enumerate(texts)])
        grids, metadata = torch.cat([video.video_grid_thw for video in shown]), [video.metadata for video in shown]
        # Where nothing else stands in the last turn, it is the question.
        query = {"query": list(questions)} if len(videos) > 1 and not turns else {}
        return processor.conversation_inputs(rows, video_grid_thw=grids, video_metadata=metadata, **query)

    inputs = inputs_of(questions[:1], seen, encoded)
    if len(questions) > 1:
        inputs = _behind(processor, inputs, inputs_of(questions, seen[-1:], [_first_step(processor, encoded[-1])]))
    encoded = encoded * len(questions)
    seconds = [float(video.second_per_grid_ts[0]) for video in encoded]
    more = {"video_features": [video.features for video in encoded], "second_per_grid_ts": seconds}
    return {**inputs.to(device), **more}


def _first_step(processor: Any, video: EncodedVideo) -> EncodedVideo:
    """As a prompt sees it, of one token where frames may have any size."""
    grid, metadata = video.video_grid_thw.clone(), copy(video.metadata)
    metadata.frames_indices = metadata.frames_indices[: ceil(len(metadata.frames_indices) / int(grid[0, 0]))]
    grid[0, 0] = 1
    if processor.native_resolution:
        grid[0, 1:] = processor.video_processor.merge_size
    return replace(video, video_grid_thw=grid, metadata=metadata)


def _behind(processor: Any, first: Any, rows: Any) -> Any:
    """
    The inputs of rows about the same videos, all of which stand in front.

    Making ids of a long video's placeholders takes as long as the rest of a small model's answer: it is done for the
    first row, and what is behind them is taken from the rows as they are with one step of the last video.
    """
    (front,), (query_front,), placeholder = first["input_ids"], first["query_mask"], processor.placeholder_ids[1]
    before = slice(int((front == placeholder).nonzero()[-1]) + 1)
    whole, query_masks = [], []
    for ids, mask, query in zip(rows["input_ids"], rows["attention_mask"].bool(), rows["query_mask"], strict=True):
        behind = slice(int((ids[mask] == placeholder).nonzero()[-1]) + 1, None)
        whole.append(torch.cat([front[before], ids[mask][behind]]))
        query_masks.append(torch.cat([query_front[before], query[mask][behind]]))
    left = processor.tokenizer.padding_side == "left"
    rows["input_ids"] = pad_rows(whole, processor.tokenizer.pad_token_id, left=left)
    rows["attention_mask"] = pad_rows([torch.ones_like(ids) for ids in whole], 0, left=left)
    rows["query_mask"] = pad_rows(query_masks, 0, left=left)
    rows["video_grid_thw"] = first["video_grid_thw"].repeat(len(whole), 1)
    return rows


def check_question(model: Any, processor: Any, question: str) -> None:
    if not check_text("question", question).strip():
        raise ValueError("The question is empty; expected some text.")
    most = model.config.get_text_config().max_position_embeddings
    if 4 * len(question.encode()) < most:  # no token is less than a byte, of which normalising makes three at most
        return
    tokens = len(processor.tokenizer(question, add_special_tokens=False)["input_ids"])
    if tokens >= most:
        raise ValueError(f"The question has {tokens} tokens; expected fewer than the model's {most} positions.")


def check_name(name: str) -> str:
    """What a video or a camera may be called, since it may stand in the prompt."""
    if not check_text("name", name).strip():
        raise ValueError("The name is empty; expected some text.")
    return name


def check_text(what: str, text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"The {what} is {text!r}; expected a text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The {what} {text!r} holds half a character (a lone surrogate); expected Unicode.") from error
    return text


def generation_options(model: Any, options: Mapping[str, Any], max_new_tokens: int | None) -> dict[str, Any]:
    """Those of `generate` for one answer to each question; a `ValueError` for several, and for beams."""
    given = options.get("generation_config")
    for name in ("num_return_sequences", "num_beams"):
        value = options.get(name) or getattr(given or model.generation_config, name, None) or 1
        if value != 1:
            raise ValueError(f"{name}={value}: a question has one answer, written in one go; call `generate`.")
    longest = max_new_tokens or getattr(given, "max_new_tokens", None) or MAX_NEW_TOKENS
    clock = Clock(options.get("streamer"))
    return {**options, "max_new_tokens": longest, "return_dict_in_generate": True, "streamer": clock}


class Clock(BaseStreamer):
    """Notes when the first new token comes, and hands on what does; `generate` puts the prompt before it."""

    def __init__(self, streamer: BaseStreamer | None = None) -> None:
        self.streamer = streamer
        self.puts = 0
        self.started = self.first_token = float("nan")

    def start(self) -> "Clock":
        self.started = time.perf_counter()
        return self

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_token = time.perf_counter()
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    def timings(self) -> dict[str, float]:
        """Seconds to the first token, and until now."""
        return {"first_token": self.first_token - self.started, "generate": time.perf_counter() - self.started}
