"""An answer about videos: the prompt of its question, and what it is made of."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
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
    NAMES,
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
from .choice import Choice
from .evidence import Interval, evidence_intervals
from .recall import Remembered, narrowed

Videos = Mapping[str, EncodedVideo]  # by name, in the order in which the model sees them

MAX_NEW_TOKENS = 128  # of an answer, where nobody says
_ROLES = ("user", "assistant")
_PROMPT_INPUTS = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "mm_encoder_outputs")


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
    largest_gap: float = 0.0  # the longest time between two frames of a video that were looked at, in seconds
    unheard: bool = False  # whether a video has sound, and the question had no subtitles in its place

    @property
    def keep_map(self) -> torch.Tensor:
        """`[T, H, W]`, the keep map of the only video; `ValueError` if there are several."""
        if len(self.keep_maps) != 1:
            raise ValueError(f"The answer is about {len(self.keep_maps)} videos: take one of `keep_maps`.")
        return next(iter(self.keep_maps.values()))

    def as_dict(self) -> dict[str, object]:
        """What `qtsplus ask --json` prints: all fields but the keep maps; `seen` only of a calibrated model."""
        fields = dict(vars(self))
        del fields["keep_maps"]
        if self.seen is None:
            del fields["seen"]
            del fields["seen_threshold"]
        fields["evidence"] = []
        for interval in self.evidence:
            entry = {
                "video": interval.name,
                "start": interval.start,
                "end": interval.end,
                "weight": interval.weight,
                "box": list(interval.box),
                "pixels": None,
            }
            if interval.pixels is not None:
                entry["pixels"] = list(interval.pixels)
            fields["evidence"].append(entry)
        return fields


@torch.no_grad()
def answer_questions(
    model: Any,
    processor: Any,
    videos: Videos | Sequence[Videos],
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
    _check_texts(turns, queries)
    rows = _videos_of_each(videos, len(questions))
    check_subtitles(subtitles, [video for row in rows for video in row.values()])
    check_budget(selection or model.config.qtsplus_config.selection, [retention], 1, max_visual_tokens)
    _check_streams(rows)
    conversation = Conversation(
        model=model,
        processor=processor,
        rows=rows,
        questions=questions,
        queries=queries,
        turns=turns,
        choice=Choice(retention, max_visual_tokens, selection),
        generation=generation_options(model, generation, max_new_tokens),
        subtitles=subtitles,
    )
    prompts = _lay_out(conversation)
    compact = _shorten(model, prompts)
    if subtitles:
        captions = _captions(conversation, prompts, compact.qtsplus, subtitles)
        prompts = _lay_out(conversation, captions)
        compact = _shorten(model, prompts)
    output = model.generate_from(compact, **conversation.generation)
    timings = conversation.clock.timings()
    texts = processor.tokenizer.batch_decode(output.sequences[:, prompts.length :], skip_special_tokens=True)
    return [_answer(conversation, prompts, compact.qtsplus, row, text, timings) for row, text in enumerate(texts)]


def _check_texts(turns: Sequence[str], queries: Sequence[str]) -> None:
    if not isinstance(turns, (list, tuple)) or len(turns) % 2:
        raise ValueError(f"turns={turns!r}; expected a list of questions and their answers, in turn.")
    if not isinstance(queries, (list, tuple)):
        raise ValueError(f"queries={queries!r}; expected a list of texts, one for each question.")
    for text in turns:
        check_text("turn", text)
    for text in queries:
        check_text("query", text)


def _videos_of_each(videos: Videos | Sequence[Videos], questions: int) -> Sequence[Videos]:
    """The videos of each question; `ValueError` where a question has none."""
    rows = [videos] * questions if isinstance(videos, Mapping) else videos
    if len(rows) != questions:
        raise ValueError(f"Got videos for {len(rows)} of {questions} questions; expected some for each.")
    if not all(rows):
        raise ValueError("There is no video to ask about; add one.")
    return rows


def _check_streams(rows: Sequence[Videos]) -> None:
    for row in rows:
        remembered = _remembered(row)
        if remembered and len(rows) > 1:
            raise ValueError(f"Got {len(rows)} questions to a stream; expected one, which has positions of its own.")
        if remembered and len(remembered) < len(row):
            raise ValueError("What a stream remembers stands beside no other videos: ask about it alone, by its name.")


def _remembered(videos: Videos) -> list[Remembered]:
    """What is asked of a stream, which stands beside no other videos."""
    return [video for video in videos.values() if isinstance(video, Remembered)]


@dataclass(frozen=True)
class Conversation:
    """What is asked in one batch, and how: the arguments of [`answer_questions`], which has checked them."""

    model: Any
    processor: Any
    rows: Sequence[Videos]  # the videos of each question
    questions: Sequence[str]
    queries: Sequence[str]
    turns: Sequence[str]
    choice: Choice
    generation: dict[str, Any]  # as [`generation_options`] gives them
    subtitles: int | None

    @property
    def clock(self) -> "TokenClock":
        return self.generation["streamer"]


@dataclass(frozen=True)
class Prompts:
    """The prompts of a batch of questions."""

    length: int  # of the longest, in ids
    layout: Layout
    visual: VisualInputs
    selection: SelectionInputs
    places: torch.Tensor | None  # `[k]` ascending, which tokens of the whole grids are there; all of them if `None`
    warnings: list[str] = field(default_factory=list)

    def place(self, indices: torch.Tensor) -> torch.Tensor:
        """The indices, among the tokens of the whole grids, of tokens that are there."""
        indices = indices.cpu()
        if self.places is None:
            return indices
        return self.places[indices]


def _lay_out(conversation: Conversation, captions: Sequence[str] = ()) -> Prompts:
    """The prompts, without the oldest turns if the model has no positions for them; `ValueError` if still not."""
    model = conversation.model
    turns = conversation.turns
    positions = model.config.get_text_config().max_position_embeddings
    new_tokens = conversation.generation["max_new_tokens"]
    left_out = 0
    while True:
        prompts = _prompts(conversation, turns[left_out:], captions)
        excess = positions_needed(model, prompts.layout, prompts.selection, new_tokens) - positions
        if excess <= 0:
            break
        if left_out == len(turns):
            text = max(len(row.columns) - len(row.candidates) for row in prompts.layout.rows)
            raise ValueError(
                f"The prompt takes {excess + positions} positions, and the model has {positions}: {text} are for text, "
                f"{new_tokens} for the answer (max_new_tokens), and the rest for the videos. Ask in fewer words, for a "
                "shorter answer, or about fewer frames."
            )
        while excess > 0 and left_out < len(turns):
            for turn in turns[left_out : left_out + 2]:
                # A text has at most a token for each byte, and little stands around it.
                excess -= len(turn.encode()) + 32
            left_out += 2
    if left_out:
        prompts.warnings.append(
            f"The model has {positions} positions. Left out of the conversation, the oldest questions: {left_out // 2}."
        )
    return prompts


def _prompts(conversation: Conversation, turns: Sequence[str], captions: Sequence[str]) -> Prompts:
    model = conversation.model
    inputs = prompt_inputs(
        conversation.processor,
        conversation.rows,
        conversation.questions,
        turns,
        model.device,
        captions,
        conversation.queries,
    )
    conversation.clock.start()
    visual, selection = take_inputs(inputs | vars(conversation.choice))
    input_ids = inputs["input_ids"]
    layout = lay_out(model.model, visual, input_ids, inputs["attention_mask"])
    places = None
    remembered = _remembered(conversation.rows[0])  # of the only question
    if remembered:
        layout, places = narrowed(model, layout, remembered, conversation.generation["max_new_tokens"])
    return Prompts(input_ids.shape[1], layout, visual, selection, places)


def positions_needed(model: Any, layout: Layout, selection: SelectionInputs, new_tokens: int) -> int:
    """How many positions a batch's longest prompt takes with its answer, if as many visual tokens stay as may."""
    config = model.config.qtsplus_config
    longest = 0
    for row in layout.rows:
        if config.position_ids == "sequential":
            visual_tokens = len(row.candidates)
            text_tokens = len(row.columns) - visual_tokens
            needed = text_tokens + _most_kept(config, selection, visual_tokens) + new_tokens
        else:
            positions = row.language_positions
            end_of_answer = int(positions[:, -1].max()) + new_tokens
            needed = max(int(positions.max()), end_of_answer) + 1
        longest = max(longest, needed)
    return longest


def _most_kept(config: QTSplusConfig, selection: SelectionInputs, count: int) -> int:
    """How many of `count` visual tokens may stay."""
    if (selection.selection or config.selection) == "all":
        return count
    fraction = selection.retention or config.rho_max
    if isinstance(fraction, Sequence):
        fraction = max(fraction)
    most = min(config.n_max, selection.max_visual_tokens or count)
    return kept_count(float(fraction), count, most)


def _shorten(model: Any, prompts: Prompts) -> CompactPrompt:
    """What the language model reads."""
    backbone = model.model
    layout = prompts.layout
    if prompts.places is None:
        features = encode_visual(backbone, prompts.visual, layout.grids)
    else:
        features = {IMAGE: [], VIDEO: list(prompts.visual.video_features or ())}
    selected, chosen = choose(backbone, layout, features, prompts.selection, sample_gate=False)
    return splice(backbone, layout, features, selected, chosen, pad_left=True)


def _captions(conversation: Conversation, prompts: Prompts, chosen: QTSplusOutput, most: int) -> list[str]:
    """The subtitles in front of each question."""
    captions = []
    for indices, videos in zip(chosen.kept_indices or (), conversation.rows, strict=True):
        captions.append(near(prompts.place(indices), videos, conversation.processor, most))
    return captions


def _answer(
    conversation: Conversation,
    prompts: Prompts,
    chosen: QTSplusOutput,
    row: int,
    text: str,
    timings: dict[str, float],
) -> Answer:
    videos = conversation.rows[row]
    config = conversation.model.config.qtsplus_config
    merge_size = conversation.processor.video_processor.merge_size
    assert chosen.kept_indices is not None and chosen.rho is not None
    kept = prompts.place(chosen.kept_indices[row])
    relevance = None
    if chosen.relevance:  # which some methods do not compute
        relevance = chosen.relevance[row]
        if prompts.places is not None and len(relevance):
            grids = conversation.model.model.merged_grid(_grids(videos))
            whole = torch.zeros(sum(map(prod, grids)))
            relevance = whole.index_copy(0, prompts.places, relevance.float().cpu())
    shown = shown_by(videos, kept, relevance, merge_size, config)
    shown["warnings"] += prompts.warnings
    seen, seen_threshold = calibrated_seen(chosen, row, config)
    return Answer(
        answer=text.strip(),
        video=next(iter(videos.values())).video if len(videos) == 1 else ", ".join(videos),
        rho=float(chosen.rho[row]),
        timings=timings,
        unheard=any(_is_unheard(video, conversation.subtitles) for video in videos.values()),
        seen=seen,
        seen_threshold=seen_threshold,
        **shown,
    )


def _is_unheard(video: EncodedVideo, subtitles: int | None) -> bool:
    """Whether a video has sound, and the question had no subtitles in its place."""
    has_subtitles = subtitles and video.subtitles
    return video.about.sound and not has_subtitles


def _grids(videos: Videos) -> torch.Tensor:
    """`[N, 3]`, in patches."""
    return torch.cat([video.video_grid_thw for video in videos.values()])


def shown_by(
    videos: Videos, kept: torch.Tensor, relevance: torch.Tensor | None, merge_size: int, config: QTSplusConfig
) -> dict[str, Any]:
    """The fields of an [`Answer`] that follow from which of the videos' tokens were kept; as [`evidence_intervals`]."""
    names = list(videos)
    encoded = list(videos.values())
    grids = _grids(videos)
    seconds = [video.seconds_per_step for video in encoded]
    evidence = []
    for interval in evidence_intervals(kept, relevance, grids, seconds, merge_size, config.evidence_share):
        evidence.append(placed(interval, names[interval.video], encoded[interval.video]))
    maps = keep_maps(kept, grids, merge_size)
    visual_tokens = sum(keep_map.numel() for keep_map in maps)
    length = sum(video.length for video in encoded)
    remembered = _remembered(videos)
    if remembered:  # cameras on one clock
        visual_tokens = sum(len(video.features) for video in remembered)
        length = max(video.length for video in remembered)
    warnings = []
    for video in encoded:
        warnings += video.about.warnings
    return {
        "frames": sum(video.frames for video in encoded),
        "seconds_of_video": length,
        "largest_gap": max(video.about.largest_gap for video in encoded),
        "visual_tokens": visual_tokens,
        "kept_tokens": len(kept),
        "evidence": evidence,
        "keep_maps": dict(zip(names, maps, strict=True)),
        "warnings": warnings,
    }


def calibrated_seen(chosen: QTSplusOutput, row: int, config: QTSplusConfig) -> tuple[float | None, float | None]:
    """`seen` and its threshold of an [`Answer`]; `None` where no calibration says what it means, or nothing scored."""
    if chosen.seen is None or not config.says_seen:
        return None, None
    return float(chosen.seen[row]), config.seen_threshold


def placed(interval: Interval, name: str, video: EncodedVideo) -> Interval:
    """The same stretch on a player's clock, with its video's name and the box in pixels."""
    width = video.about.metadata.width
    height = video.about.metadata.height
    pixels = None
    if width and height:
        left, top, right, bottom = interval.box
        pixels = floor(left * width), floor(top * height), ceil(right * width), ceil(bottom * height)
    step = video.seconds_per_step
    start, end = video.span(round(interval.start / step), round(interval.end / step))
    return replace(interval, start=start, end=end, name=name, pixels=pixels)


def prompt_inputs(
    processor: Any,
    videos: Videos | Sequence[Videos],
    questions: Sequence[str],
    turns: Sequence[str] = (),
    device: torch.device | str = "cpu",
    captions: Sequence[str] = (),
    queries: Sequence[str] = (),
) -> dict[str, Any]:
    """
    The model's inputs for questions about videos, a row for each; with a text in front of each question.

    All videos stand in front of the first text. Of several, each has its name in front; only the question's own words
    then say which tokens are kept.
    """
    rows = _videos_of_each(videos, len(questions))
    messages = []
    encoded: list[EncodedVideo] = []
    for number, (question, row) in enumerate(zip(questions, rows, strict=True)):
        contents = [[_text(turn)] for turn in turns]
        contents.append([_text(question)])
        if captions and captions[number]:
            contents[-1].insert(0, _text(captions[number]))
        contents[0] = _shown(row) + contents[0]
        messages.append([{"role": role, "content": parts} for role, parts in zip(cycle(_ROLES), contents)])
        encoded += row.values()
    options: dict[str, Any] = {}
    has_names = any(len(row) > 1 for row in rows)
    # Where nothing else stands in the last turn, it is the question.
    if queries or any(captions) or (has_names and not turns):
        options["query"] = list(queries or questions)
    inputs = processor.conversation_inputs(
        messages,
        video_grid_thw=torch.cat([video.video_grid_thw for video in encoded]),
        video_metadata=[video.about.metadata for video in encoded],
        **options,
    )
    return dict(
        inputs.to(device),
        video_features=[video.features for video in encoded],
        second_per_grid_ts=[video.seconds_per_step for video in encoded],
    )


def _shown(videos: Videos) -> list[dict[str, str]]:
    """The parts of a message that show videos, each of several behind its name."""
    parts = []
    for name in videos:
        if len(videos) > 1:
            parts.append(_text(f"{name}: "))
        parts.append({"type": "video"})
    return parts


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


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
    prepared = [name for name in (*_PROMPT_INPUTS, *NAMES) if name in options]
    if prepared:
        raise ValueError(
            f"Got {', '.join(prepared)}, which are made from the question and its videos: leave them out, or call "
            "model.generate with the processor's inputs."
        )
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
    return dict(options, max_new_tokens=longest, return_dict_in_generate=True, streamer=clock)


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
