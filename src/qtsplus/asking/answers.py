"""An answer about videos: the prompt of its question, and what it is made of."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import ceil, floor, prod
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from ..common.validation import check_count
from ..model.configuration_qtsplus import QTSplusConfig
from ..model.encoding_qtsplus import encode_visual
from ..model.layout_qtsplus import lay_out
from ..model.methods_qtsplus import Method, check_budget
from ..model.mixin_qtsplus import choose
from ..model.prompt_qtsplus import (
    IMAGE,
    VIDEO,
    CompactPrompt,
    Layout,
    SelectionInputs,
    VisualInputs,
    splice,
    take_inputs,
)
from ..model.selector_qtsplus import QTSplusOutput, kept_count
from ..video.encoded import EncodedVideo
from ..video.grids import keep_maps
from ..video.subtitles import check_subtitles, near
from .evidence import Interval, evidence_intervals
from .recall import Remembered, narrowed

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
    # Seconds of reading and encoding the video (`encode`, unless that was before), and from calling `generate` to the
    # `first_token` and to the end (`generate`); questions of one batch share them.
    timings: dict[str, float]
    keep_maps: dict[str, torch.Tensor]  # by the video's name, bool [T, H, W], the kept tokens in its grid of tokens
    # The part of the relevance, 0 to 1, that the videos' tokens took from the null token, and from which part on the
    # videos show what was asked for, as a calibration found; both `None` from a model without one.
    seen: float | None = None
    seen_threshold: float | None = None
    warnings: list[str] = field(default_factory=list)  # as in [`EncodedVideo`]
    unheard: bool = False  # whether a video has sound, and the question had no subtitles in its place

    @property
    def keep_map(self) -> torch.Tensor:
        """`[T, H, W]`, the keep map of the only video; `ValueError` if there are several."""
        if len(self.keep_maps) != 1:
            raise ValueError(f"The answer is about {len(self.keep_maps)} videos: take one of `keep_maps`.")
        return next(iter(self.keep_maps.values()))

    def as_dict(self) -> dict[str, Any]:
        """What `qtsplus ask --json` prints: all fields but the keep maps; `seen` only of a calibrated model."""
        fields = {name: value for name, value in vars(self).items() if name != "keep_maps"}
        if self.seen is None:
            del fields["seen"], fields["seen_threshold"]
        evidence = []
        for one in self.evidence:
            place = {"box": list(one.box), "pixels": None if one.pixels is None else list(one.pixels)}
            evidence.append({"video": one.name, "start": one.start, "end": one.end, "weight": one.weight, **place})
        return {**fields, "evidence": evidence}


@torch.no_grad()
def answer_questions(
    model: Any,
    processor: Any,
    videos: Mapping[str, EncodedVideo] | Sequence[Mapping[str, EncodedVideo]],
    questions: Sequence[str],
    *,
    queries: Sequence[str] = (),
    turns: Sequence[str] = (),
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: str | Method | None = None,
    max_new_tokens: int | None = None,
    subtitles: int | None = None,
    **generation: Any,
) -> list[Answer]:
    """
    Answers questions about videos, whose tokens compete for one budget, in one batch.

    Args:
        videos: by name; the names stand in the prompt where there are several. Or those of each question, in a list.
        questions: each a row of the batch, with a budget of its own.
        queries: what to select by, for each question, where that is not the question itself.
        turns: what was asked and answered before, in turn, in one conversation with each of the questions. The oldest
            go for which the model has no positions, and a warning of the answer says so.
        retention: fraction of the visual tokens to keep, in (0, 1]; predicted from the question when absent.
        max_visual_tokens: most visual tokens to keep; with `retention`, the smaller of both counts.
        selection: another way to choose them than the model's own: a name such as `"uniform"`, or a function from
            `Candidates` and a count to indices (`methods_qtsplus.py`).
        max_new_tokens: longest answer; what a `generation_config` says, or 128, when absent.
        subtitles: most tokens of the subtitles that stand in front of each question, those nearest in time to what was
            kept first; of videos that were encoded with their subtitles.
        generation: as for `generate`.

    Raises:
        ValueError: no video; subtitles, and no video was encoded with some; a prompt for which the model has no
            positions; and as [`ask`].
    """
    for question in questions:
        check_question(model, processor, question)
    if not isinstance(turns, (list, tuple)) or len(turns) % 2:
        raise ValueError(f"turns={turns!r}; expected a list of questions and their answers, in turn.")
    if not isinstance(queries, (list, tuple)):
        raise ValueError(f"queries={queries!r}; expected a list of texts, one for each question.")
    for what, text in [*(("turn", text) for text in turns), *(("query", text) for text in queries)]:
        check_text(what, text)
    rows = [videos] * len(questions) if isinstance(videos, Mapping) else videos
    if len(rows) != len(questions):
        raise ValueError(f"Got videos for {len(rows)} of {len(questions)} questions; expected some for each.")
    if not all(rows):
        raise ValueError("There is no video to ask about; add one.")
    check_subtitles(subtitles, [video for own in rows for video in own.values()])
    choice: dict[str, Any] = {"retention": retention, "max_visual_tokens": max_visual_tokens, "selection": selection}
    check_budget(selection or model.config.qtsplus_config.selection, [retention], 1, max_visual_tokens)
    if len(questions) > 1 and any(map(_remembered, rows)):
        raise ValueError(f"Got {len(questions)} questions to a stream; expected one, which has positions of its own.")
    if any(0 < len(_remembered(own)) < len(own) for own in rows):
        raise ValueError("What a stream remembers stands beside no other videos: ask about it alone, by its name.")
    options = generation_options(model, generation, max_new_tokens)
    conversation = (model, processor, rows, questions, queries, turns, choice, options)
    prompts = _lay_out(*conversation)
    compact = _shorten(model, prompts)
    if subtitles:
        places = [prompts.place(indices) for indices in compact.qtsplus.kept_indices or ()]
        captions = [near(indices, own, processor, subtitles) for indices, own in zip(places, rows, strict=True)]
        prompts = _lay_out(*conversation, captions)
        compact = _shorten(model, prompts)
    output = model.generate_from(compact, **options)
    timings, new_ids = options["streamer"].timings(), output.sequences[:, prompts.inputs["input_ids"].shape[1] :]
    chosen: Any = compact.qtsplus
    answers = []
    for row, (ids, own) in enumerate(zip(new_ids, rows, strict=True)):
        relevance = chosen.relevance[row] if chosen.relevance else None  # none if the method computed none
        if prompts.places is not None and relevance is not None and len(relevance):
            grids = model.model.merged_grid(torch.cat([video.video_grid_thw for video in own.values()]))
            relevance = torch.zeros(sum(map(prod, grids))).index_copy(0, prompts.places, relevance.float().cpu())
        kept, merge_size = prompts.place(chosen.kept_indices[row]), processor.video_processor.merge_size
        shown = shown_by(own, kept, relevance, merge_size, model.config.qtsplus_config)
        seen, seen_threshold = calibrated_seen(chosen, row, model.config.qtsplus_config)
        answer = Answer(
            answer=processor.tokenizer.decode(ids, skip_special_tokens=True).strip(),
            video=next(iter(own.values())).video if len(own) == 1 else ", ".join(own),
            rho=float(chosen.rho[row]),
            timings=timings,
            unheard=any(video.sound and not (subtitles and video.subtitles) for video in own.values()),
            seen=seen,
            seen_threshold=seen_threshold,
            **{**shown, "warnings": shown["warnings"] + prompts.warnings},
        )
        answers.append(answer)
    return answers


@dataclass(frozen=True)
class _Prompts:
    """The prompts of some questions, for which the model has positions."""

    inputs: dict[str, Any]
    layout: Layout
    visual: VisualInputs
    selection: SelectionInputs
    places: torch.Tensor | None  # `[k]` ascending, which tokens of the whole grids are there; all of them if `None`
    warnings: list[str]

    def place(self, indices: torch.Tensor) -> torch.Tensor:
        """Of tokens that are there, the indices among those of the whole grids."""
        return indices.cpu() if self.places is None else self.places[indices.cpu()]


def _lay_out(
    model: Any,
    processor: Any,
    rows: Sequence[Mapping[str, EncodedVideo]],
    questions: Sequence[str],
    queries: Sequence[str],
    turns: Sequence[str],
    choice: Mapping[str, Any],
    options: Mapping[str, Any],
    captions: Sequence[str] = (),
) -> _Prompts:
    """The prompts, without the oldest turns if the model has no positions for them; `ValueError` if still not."""
    most, new_tokens, left_out = model.config.get_text_config().max_position_embeddings, options["max_new_tokens"], 0
    while True:
        inputs = prompt_inputs(processor, rows, questions, turns[left_out:], model.device, captions, queries)
        options["streamer"].start()
        visual, selection = take_inputs({**inputs, **choice})
        layout, places = lay_out(model.model, visual, inputs["input_ids"], inputs["attention_mask"]), None
        if remembered := _remembered(rows[0]):  # the only question
            layout, places = narrowed(model, layout, remembered, new_tokens)
        excess = positions_needed(model, layout, selection, new_tokens) - most
        if excess <= 0:
            break
        if left_out == len(turns):
            text = max(len(row.columns) - len(row.candidates) for row in layout.rows)
            raise ValueError(
                f"The prompt takes {excess + most} positions, and the model has {most}: {text} are for text, "
                f"{new_tokens} for the answer (max_new_tokens), and the rest for the videos. Ask in fewer words, for a "
                "shorter answer, or about fewer frames."
            )
        while excess > 0 and left_out < len(turns):  # a text has at most a token a byte, and little stands around it
            excess -= sum(len(text.encode()) + 32 for text in turns[left_out : left_out + 2])
            left_out += 2
    gone = f"The model has {most} positions. Left out of the conversation, the oldest questions: {left_out // 2}."
    return _Prompts(inputs, layout, visual, selection, places, [gone] * (left_out > 0))


def positions_needed(model: Any, layout: Layout, selection: SelectionInputs, new_tokens: int) -> int:
    """How many positions a batch's longest prompt takes with its answer, of the visual tokens all that may stay."""
    config, needed = model.config.qtsplus_config, []
    for row in layout.rows:
        position = row.language_positions
        if config.position_ids == "sequential":
            count = len(row.candidates)
            most = min(config.n_max, selection.max_visual_tokens or count)
            fixed = selection.retention or config.rho_max
            kept = kept_count(float(max(fixed) if isinstance(fixed, Sequence) else fixed), count, most)
            kept = count if (selection.selection or config.selection) == "all" else kept
            needed.append(len(row.columns) - count + kept + new_tokens)
        else:
            needed.append(int(max(position.max(), position[:, -1].max() + new_tokens)) + 1)
    return max(needed)


def _shorten(model: Any, prompts: _Prompts) -> CompactPrompt:
    """What the language model reads."""
    layout, features = prompts.layout, {IMAGE: [], VIDEO: list(prompts.visual.video_features or ())}
    if prompts.places is None:
        features = encode_visual(model.model, prompts.visual, layout.grids)
    selected, chosen = choose(model.model, layout, features, prompts.selection, sample_gate=False)
    return splice(model.model, layout, features, selected, chosen, pad_left=True)


def shown_by(
    videos: Mapping[str, EncodedVideo], kept: torch.Tensor, relevance: torch.Tensor | None, merge_size: int, config: Any
) -> dict[str, Any]:
    """The fields of an [`Answer`] that follow from which of the videos' tokens were kept; as [`evidence_intervals`]."""
    names, encoded = list(videos), list(videos.values())
    grids = torch.cat([video.video_grid_thw for video in encoded])
    seconds = [float(video.second_per_grid_ts[0]) for video in encoded]
    maps = dict(zip(names, keep_maps(kept, grids, merge_size), strict=True))
    intervals = evidence_intervals(kept, relevance, grids, seconds, merge_size, config.evidence_share)
    lengths, remembered = [video.length for video in encoded], _remembered(videos)  # which is on one clock
    return {
        "frames": sum(video.frames for video in encoded),
        "seconds_of_video": max(lengths) if remembered else sum(lengths),
        "visual_tokens": sum(len(one.features) for one in remembered) or sum(one.numel() for one in maps.values()),
        "kept_tokens": len(kept),
        "evidence": [placed(one, names[one.video], encoded[one.video]) for one in intervals],
        "keep_maps": maps,
        "warnings": [warning for video in encoded for warning in video.warnings],
    }


def calibrated_seen(chosen: QTSplusOutput, row: int, config: QTSplusConfig) -> tuple[float | None, float | None]:
    """`seen` and its threshold of an [`Answer`]; `None` where no calibration says what it means, or nothing scored."""
    if chosen.seen is None or not config.says_seen:
        return None, None
    return float(chosen.seen[row]), config.seen_threshold


def _remembered(videos: Mapping[str, EncodedVideo]) -> list[Remembered]:
    """What is asked of a stream, which stands beside no other videos."""
    return [video for video in videos.values() if isinstance(video, Remembered)]


def placed(interval: Interval, name: str, video: EncodedVideo) -> Interval:
    """The same stretch on a player's clock, with its video's name and the box in pixels."""
    width, height = video.metadata.width, video.metadata.height
    pixels = None
    if width and height:
        left, top, right, bottom = interval.box
        pixels = floor(left * width), floor(top * height), ceil(right * width), ceil(bottom * height)
    step = float(video.second_per_grid_ts[0])
    start, end = video.span(round(interval.start / step), round(interval.end / step))
    return replace(interval, start=start, end=end, name=name, pixels=pixels)


def prompt_inputs(
    processor: Any,
    videos: Mapping[str, EncodedVideo] | Sequence[Mapping[str, EncodedVideo]],
    questions: Sequence[str],
    turns: Sequence[str] = (),
    device: Any = "cpu",
    captions: Sequence[str] = (),
    queries: Sequence[str] = (),
) -> dict[str, Any]:
    """
    The model's inputs for questions about videos, a row for each; with a text in front of each question.

    All videos stand in front of the first text. Of several, each has its name in front; only the question's own words
    then say which tokens are kept.
    """
    rows, several, encoded = [], False, list[EncodedVideo]()
    of_each = [videos] * len(questions) if isinstance(videos, Mapping) else videos
    for question, caption, own in zip_longest(questions, captions, of_each):
        seen, several = list[dict[str, Any]](), several or len(own) > 1
        for name, video in own.items():
            seen += [{"type": "text", "text": f"{name}: "}] * (len(own) > 1) + [{"type": "video"}]
            encoded.append(video)
        texts = [[{"type": "text", "text": text}] for text in (*turns, question)]
        texts[-1] = [{"type": "text", "text": caption}] * bool(caption) + texts[-1]
        texts[0] = seen + texts[0]
        rows.append([{"role": ("user", "assistant")[n % 2], "content": parts} for n, parts in enumerate(texts)])
    grids, metadata = torch.cat([video.video_grid_thw for video in encoded]), [video.metadata for video in encoded]
    # Where nothing else stands in the last turn, it is the question.
    apart = queries or any(captions) or (several and not turns)
    query = {"query": list(queries or questions)} if apart else {}
    inputs = processor.conversation_inputs(rows, video_grid_thw=grids, video_metadata=metadata, **query)
    seconds = [float(video.second_per_grid_ts[0]) for video in encoded]
    more = {"video_features": [video.features for video in encoded], "second_per_grid_ts": seconds}
    return {**inputs.to(device), **more}


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
    if not isinstance(given, GenerationConfig | None):
        raise ValueError(f"generation_config={given!r}; expected a GenerationConfig.")
    for name in ("num_return_sequences", "num_beams"):
        value = options.get(name) or getattr(given or model.generation_config, name, None) or 1
        if value != 1:
            raise ValueError(f"{name}={value}: a question has one answer, written in one go; call `generate`.")
    if max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens, "tokens")
    longest = max_new_tokens or getattr(given, "max_new_tokens", None) or MAX_NEW_TOKENS
    clock = TokenClock(options.get("streamer"))
    return {**options, "max_new_tokens": longest, "return_dict_in_generate": True, "streamer": clock}


class TokenClock(BaseStreamer):
    """Notes when the first new token comes, and hands on what does; `generate` puts the prompt before it."""

    def __init__(self, streamer: BaseStreamer | None = None) -> None:
        self.streamer = streamer
        self.puts = 0
        self.started = self.first_token = float("nan")

    def start(self) -> "TokenClock":
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
