"""Answers to questions about videos: the prompts, the choice of their visual tokens, the texts, and their evidence."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..model.encoding_qtsplus import encode_visual
from ..model.fields_qtsplus import QTSplusConfig
from ..model.layout_qtsplus import lay_out
from ..model.methods_qtsplus import MethodOrName, check_budget
from ..model.mixin_qtsplus import choose
from ..model.prompt_qtsplus import (
    IMAGE,
    VIDEO,
    CompactPrompt,
    Layout,
    splice,
    take_inputs,
)
from ..model.selector_qtsplus import QTSplusOutput
from ..video.forecast import trained_seconds_below
from ..video.grids import keep_maps
from ..video.subtitles import check_subtitles, near
from .choice import Choice
from .evidence import Interval, evidence_intervals, placed
from .generation import generation_options
from .question import Batch, Videos, prompt_inputs
from .recall import remembered_layout


@dataclass(frozen=True)
class Answer:
    """What a model answered about one or more videos, and what the answer rests on."""

    answer: str  # the text
    video: str  # the path of the video; with several videos, their names, joined by commas
    frames: int  # how many the model saw
    seconds_of_video: float
    visual_tokens: int  # M, the videos' tokens before the selection
    kept_tokens: int  # n, those that the language model read
    rho: float  # the fraction that the selection aimed at
    evidence: list[Interval]  # stretches that show what was asked for, the most relevant first
    # Seconds. Questions of one batch share them.
    # - `encode`: reading and encoding the video; absent if that was done before
    # - `first_token`: from the start of the selection to the first token
    # - `generate`: from the start of the selection to the last token
    timings: dict[str, float]
    keep_maps: dict[str, Tensor]  # by the video's name, bool `[T, H, W]`: True where a token of its grid was kept
    # `seen` is the part of the relevance, 0 to 1, that goes to the tokens of the videos. The rest goes to the null
    # token, which means "none of them" (`QTSplusOutput`). If `seen` is at least `seen_threshold` of the configuration,
    # the videos show what was asked for: see `shown`. Both are `None` if the model was not calibrated.
    seen: float | None = None
    seen_threshold: float | None = None
    warnings: list[str] = field(default_factory=list)  # as in `AboutVideo`
    largest_gap: float = 0.0  # the longest time from a frame that was looked at to the next, or to the end, in seconds
    # If a video here is longer than all in training: the seconds of the longest in training. Otherwise `None`.
    trained_seconds: float | None = None
    unheard: bool = False  # whether a video has sound, and the prompt has no subtitles in its place
    # Whether the selection scored tokens. If not, a weight in `evidence` is a share of the kept tokens.
    scored: bool = True

    @property
    def shown(self) -> bool | None:
        """Whether the videos probably show what was asked for; `None` if the model was not calibrated."""
        if self.seen is None or self.seen_threshold is None:
            return None
        return self.seen >= self.seen_threshold

    @property
    def keep_map(self) -> Tensor:
        """`[T, H, W]`, the keep map of the only video; `ValueError` if there are several."""
        if len(self.keep_maps) != 1:
            raise ValueError(f"The answer is about {len(self.keep_maps)} videos: take one of `keep_maps`.")
        return next(iter(self.keep_maps.values()))

    def as_dict(self) -> dict[str, object]:
        """What `qtsplus ask --json` prints: without `keep_maps` and `scored`, and without `seen` if it is `None`."""
        fields = dict(vars(self))
        del fields["keep_maps"]
        del fields["scored"]
        if self.seen is None:
            del fields["seen"]
            del fields["seen_threshold"]
        fields["evidence"] = [interval.as_dict() for interval in self.evidence]
        return fields


@torch.no_grad()
def answer_questions(
    model,
    processor,
    videos: Videos,
    questions: Sequence[str],
    /,
    *,
    queries: Sequence[str] = (),
    turns: Sequence[str] = (),
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    selection: MethodOrName | None = None,
    max_new_tokens: int | None = None,
    subtitles: int | None = None,
    **generation,
) -> list[Answer]:
    """
    Answers questions about videos in one batch. The tokens of all videos compete for one budget.

    Args:
        videos: by name. If there are several, the prompt states their names.
        questions: each is a row of the batch, with a budget of its own.
        queries: for each question, another text by which its tokens are selected; by default the question itself.
        turns: earlier questions and their answers, alternating, which precede each of the questions. If the model has
            too few positions, the oldest are left out, and a warning in the answer says so.
        retention: fraction of the visual tokens to keep, in (0, 1]; predicted from the question when absent.
        max_visual_tokens: the most visual tokens to keep, even if `retention` asks for more.
        selection: the method, if not the model's own: a name such as `"uniform"`, or a function that takes `Candidates`
            and a count and returns indices (`methods_qtsplus.py`).
        max_new_tokens: the longest answer. By default the `generation_config` of the call decides, then that of the
            model; without either it is 128. `max_length`, which counts the prompt, is refused.
        subtitles: the most subtitle tokens in front of each question. Lines nearest in time to kept tokens are taken
            first. The videos must have been encoded with their subtitles.
        generation: as for `generate`.

    Raises:
        ValueError: there is no video; a question is empty or too long; an option is out of its range or not known;
            `subtitles` are wanted and no video was encoded with any; a prompt takes more positions than the model has.
    """
    batch = Batch(videos, questions, queries, turns)
    batch.check(model, processor)
    check_subtitles(subtitles, videos.values())
    # All rows of the batch have the same retention.
    check_budget(selection or model.config.qtsplus_config.selection, [retention], max_visual_tokens)
    call = _Call(
        model=model,
        processor=processor,
        choice=Choice(retention, max_visual_tokens, selection),
        generation=generation_options(model, generation, max_new_tokens),
    )
    prompts = call.prompts_within_positions(batch)
    if subtitles:  # the first prompts only found the kept tokens; the second ones get the subtitles near these
        kept = map(prompts.kept, range(len(questions)))
        captions = [near(row.indices, videos, processor, subtitles) for row in kept]
        prompts = call.prompts_within_positions(replace(batch, captions=captions))
    output = model.generate_from(prompts.compact, **call.generation)
    timings = call.generation["streamer"].timings()
    new_ids = output.sequences[:, prompts.length :]
    texts = processor.tokenizer.batch_decode(new_ids, skip_special_tokens=True)
    answers = []
    for row, text in enumerate(texts):
        answer = replace(_answer(call, batch, prompts, row), answer=text.strip(), timings=timings)
        if subtitles:  # they replace sound, so that a video is unheard only if it has sound but no subtitles
            unheard = [video for video in videos.values() if video.about.sound and not video.subtitles]
            answer = replace(answer, unheard=bool(unheard))
        answers.append(answer)
    return answers


@dataclass(frozen=True)
class Kept:
    """
    The selection's result for one question.

    Args:
        indices: `[n]`, the kept tokens, among the M tokens of all videos.
        relevance: `[M]`; `None` from a method that does not score.
        rho: the fraction that the selection aimed at.
        seen: as in an [`Answer`].
    """

    indices: Tensor
    relevance: Tensor | None
    rho: float
    seen: float | None

    @classmethod
    def of(cls, chosen: QTSplusOutput, row: int) -> "Kept":
        assert chosen.kept_indices is not None and chosen.rho is not None
        return cls(
            indices=chosen.kept_indices[row],
            relevance=chosen.relevance[row] if chosen.relevance else None,  # one tensor per row
            rho=float(chosen.rho[row]),
            seen=None if chosen.seen is None else float(chosen.seen[row]),
        )


@dataclass(frozen=True)
class _Prompts:
    """The prompts of a batch of questions, with the visual tokens that were kept."""

    length: int  # ids of the longest prompt before tokens are dropped
    layout: Layout
    compact: CompactPrompt
    # For a stream: `[k]`, ascending indices, in the full grids, of the tokens that it remembers. Otherwise `None`.
    places: Tensor | None
    warnings: list[str] = field(default_factory=list)

    def kept(self, row: int) -> Kept:
        """The selection's result for a question, with indices and relevance over the full grids of the videos."""
        kept = Kept.of(self.compact.qtsplus, row)
        if self.places is None:
            return kept
        relevance = kept.relevance
        if relevance is not None and len(relevance):
            relevance = relevance.float().cpu()
            whole = relevance.new_zeros(sum(map(prod, self.layout.grids[VIDEO])))
            relevance = whole.index_copy(0, self.places, relevance)
        return replace(kept, indices=self.places[kept.indices], relevance=relevance)


@dataclass(frozen=True)
class _Call:
    """A call of [`answer_questions`]: the model, its processor, and the options, which were checked."""

    model: Any
    processor: Any
    choice: Choice
    generation: dict[str, Any]  # of [`generation_options`], whose `streamer` is the `TokenClock` of the call

    def prompts_within_positions(self, batch: Batch) -> _Prompts:
        """
        The prompts of a batch, encoded and with their tokens chosen. If they take more positions than the model has,
        the oldest turns are left out.

        Raises:
            ValueError: the prompts take too many positions even without turns.
        """
        positions = self.model.config.get_text_config().max_position_embeddings
        new_tokens = self.generation["max_new_tokens"]
        left_out = 0
        while True:
            prompts = self._prompts(replace(batch, turns=batch.turns[left_out:]))
            needed = int(prompts.compact.next_position.max()) + new_tokens
            if needed <= positions:
                break
            if left_out == len(batch.turns):
                row = prompts.layout.rows[int(prompts.compact.next_position.argmax())]
                # `columns` has a place for each token of the prompt, `candidates` for each of its video tokens.
                text = len(row.columns) - len(row.candidates)
                raise ValueError(
                    f"The prompt takes {needed} positions, and the model has {positions}: {text} are for text, "
                    f"{new_tokens} for the answer (max_new_tokens), and the rest for the videos. Ask in fewer words, "
                    "for a shorter answer, or about fewer frames."
                )
            left_out = _turns_to_leave_out(batch.turns, left_out, needed - positions)
        if left_out:
            prompts.warnings.append(
                f"The model has {positions} positions, so the oldest questions of the conversation were left out: "
                f"{left_out // 2}."
            )
        return prompts

    def _prompts(self, batch: Batch) -> _Prompts:
        """The prompts of a batch, however many positions they take."""
        backbone = self.model.model
        inputs = prompt_inputs(self.processor, batch, self.model.device)
        self.generation["streamer"].start()
        visual, selection = take_inputs(inputs | vars(self.choice))  # like keyword arguments of `forward`
        input_ids = inputs["input_ids"]
        layout = lay_out(backbone, visual, input_ids, inputs["attention_mask"])
        places = None
        if batch.remembered:  # a stream has encoded its tokens, which do not fill its grids
            new_tokens = self.generation["max_new_tokens"]
            layout, places = remembered_layout(self.model, layout, batch.remembered, new_tokens)
            features = {IMAGE: [], VIDEO: list(visual.video_features or ())}
        else:
            features = encode_visual(backbone, visual, layout.grids)
        selected, chosen = choose(backbone, layout, features, selection, sample_gate=False)
        compact = splice(backbone, layout, features, selected, chosen, pad_left=True)
        return _Prompts(input_ids.shape[1], layout, compact, places)


def _turns_to_leave_out(turns: Sequence[str], left_out: int, excess: int) -> int:
    """
    A lower bound of how many of the oldest turns have to be left out in total. The tokens of a turn are overestimated,
    so that this may be too few; the caller then tries again.

    Args:
        left_out: the number of turns that were left out so far.
        excess: by how many positions the prompt without these turns is too long.
    """
    while excess > 0 and left_out < len(turns):
        for turn in turns[left_out : left_out + 2]:
            # A text has at most one token per byte, and the chat template adds only a few.
            excess -= len(turn.encode()) + 32
        left_out += 2
    return left_out


def _answer(
    call: _Call,
    batch: Batch,
    prompts: _Prompts,
    row: int,
) -> Answer:
    """An answer without its text."""
    config = call.model.config.qtsplus_config
    merge_size = call.processor.video_processor.merge_size
    answer = shown_by(batch.videos, prompts.kept(row), merge_size, config)
    if batch.remembered:  # cameras share a clock, so their seconds are not added
        answer = replace(
            answer,
            visual_tokens=sum(len(video.features) for video in batch.remembered),
            seconds_of_video=max(video.length for video in batch.remembered),
        )
    return replace(answer, warnings=answer.warnings + prompts.warnings)


def shown_by(
    videos: Videos,
    kept: Kept,
    merge_size: int,
    config: QTSplusConfig,
) -> Answer:
    """An answer without its text and its timings: what the kept tokens show of the videos."""
    names = list(videos)
    encoded = list(videos.values())
    grids = torch.cat([video.video_grid_thw for video in encoded])
    seconds = [video.seconds_per_step for video in encoded]
    intervals = evidence_intervals(
        kept.indices,
        kept.relevance,
        grids,
        seconds,
        merge_size,
        config.evidence_share,
    )
    evidence = [placed(interval, names[interval.video], encoded[interval.video]) for interval in intervals]
    maps = keep_maps(kept.indices, grids, merge_size)
    answer = Answer(
        answer="",
        video=encoded[0].video if len(encoded) == 1 else ", ".join(names),
        frames=sum(video.frames for video in encoded),
        seconds_of_video=sum(video.length for video in encoded),
        visual_tokens=sum(keep_map.numel() for keep_map in maps),
        kept_tokens=len(kept.indices),
        rho=kept.rho,
        evidence=evidence,
        timings={},
        keep_maps=dict(zip(names, maps, strict=True)),
        warnings=[warning for video in encoded for warning in video.about.warnings],
        largest_gap=max(video.about.largest_gap for video in encoded),
        trained_seconds=trained_seconds_below(max(video.length for video in encoded), config),
        unheard=any(video.about.sound for video in encoded),
        scored=kept.relevance is not None and len(kept.relevance) > 0,
    )
    # A method that does not score gives no `seen`. Without a good calibration the number would mean nothing.
    if kept.seen is None or not config.says_seen:
        return answer
    return replace(answer, seen=kept.seen, seen_threshold=config.seen_threshold)
