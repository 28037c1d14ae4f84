"""
Which layers and heads look at what an answer rests on: needle recall of each, over questions with their evidence.

While the model answers, for attention distillation; and from where the answer begins, for `selection="lm_attention"`.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import send_to_device
from rich.console import Console
from rich.progress import track

from ..lm_attention_qtsplus import attention_layer, full_attention_layers
from ..output import whole_file
from ..selector_qtsplus import kept_count
from ..training.attention import EVERYTHING, AttentionChoice, evaluating, noting_attention
from ..training.collator import VideoQACollator
from ..training.dataset import SkippedRecord, VideoQADataset
from ..training.features import encode_videos
from .labelled import LabelledQuestion, read_questions, sighting_tokens

SHARE = 0.1  # of the visual tokens that a layer or a head may keep

ALL_LAYERS, BEST_LAYERS, BEST_HEADS = "all layers", "best layers", "best heads"
EQUAL = 0.01  # recalls that are taken for the same

K = TypeVar("K", int, tuple[int, int])  # a layer, or a layer and a head


@dataclass(frozen=True)
class Recall:
    """
    Means over questions.

    Args:
        tokens: share of a question's needle tokens that are kept.
        needles: share of its needles of which a token is kept.
        mass: share of the attention to all visual tokens that goes to the needles'. Layers that look everywhere lower
            it, and blur what a selector learns from the sum.
    """

    tokens: float
    needles: float
    mass: float


@dataclass(frozen=True)
class HeadRecalls:
    """What so many questions find by each layer (the mean over its heads), and by each single (layer, head)."""

    questions: int
    layers: dict[int, Recall]
    heads: dict[tuple[int, int], Recall]


@dataclass(frozen=True)
class Calibration:
    """
    Args:
        measured: over the questions about half of the videos.
        choices: what they suggest, by name.
        found: what the sum over each choice finds in the other videos.
        checked: questions about those.
        readings: for `selection="lm_attention"`, what each finds in the other videos; every one reads a single layer.
        default: the one of `readings` that a model reads without calibration.
        unreadable: videos that could not be read; their questions are left out.
    """

    measured: HeadRecalls
    choices: dict[str, AttentionChoice]
    found: dict[str, Recall]
    checked: int
    readings: dict[AttentionChoice, Recall]
    default: AttentionChoice
    unreadable: tuple[str, ...] = ()

    @property
    def best_reading(self) -> AttentionChoice:
        """The one with the highest recall of tokens; of equals the shallowest, then the one with the most mass."""
        most = max(recall.tokens for recall in self.readings.values())
        equal = [choice for choice, recall in self.readings.items() if recall.tokens >= most - EQUAL]
        return min(equal, key=lambda choice: (_layer(choice), -self.readings[choice].mass))

    def attention_fields(self) -> dict[str, int | list[int] | None]:
        """What the best reading is in `qtsplus_config`."""
        choice = self.best_reading
        return {"attention_layer": _layer(choice), "attention_heads": choice.of_layer(_layer(choice))}

    @property
    def best(self) -> str:
        """The choice with the highest recall of tokens; of equals (to 1%) the one with the most mass on the needles."""
        return max(self.choices, key=lambda name: (round(self.found[name].tokens, 2), self.found[name].mass))

    def fields(self) -> dict[str, Any]:
        """What the best choice is in a recipe's `training` section."""
        choice = self.choices[self.best]
        return {
            "relevance_layers": None if choice.layers is None else list(choice.layers),
            "relevance_heads": None if choice.heads is None else [list(pair) for pair in choice.heads],
        }

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "share": SHARE,
            "questions": {"measured": self.measured.questions, "checked": self.checked},
            "unreadable": self.unreadable,
            "best": self.best,
            "choices": [
                {"choice": name, **asdict(self.choices[name]), **asdict(recall)} for name, recall in self.found.items()
            ],
            "layers": [{"layer": layer, **asdict(recall)} for layer, recall in self.measured.layers.items()],
            "heads": [
                {"layer": layer, "head": head, **asdict(recall)}
                for (layer, head), recall in self.measured.heads.items()
            ],
            "readings": [
                {"layer": _layer(choice), "heads": choice.of_layer(_layer(choice)), **asdict(recall)}
                for choice, recall in self.readings.items()
            ],
            "best_reading": {
                **self.attention_fields(),
                **asdict(self.readings[self.best_reading]),
                "default": {"layer": _layer(self.default), **asdict(self.readings[self.default])},
            },
        }


def read_labelled(path: Path, skip_kinds: Sequence[str] = ()) -> list[LabelledQuestion]:
    """
    The questions of a JSONL file that have a video and `evidence`, without those of some kinds; see [`read_questions`].

    Raises:
        ValueError: as [`read_questions`], no such question, or none of a kind that is to be left out.
    """
    questions = read_questions(path)
    kinds = sorted({question.record.kind for question in questions})
    if unknown := sorted(set(skip_kinds) - set(kinds)):
        raise ValueError(f"Cannot leave out the kind {unknown[0]!r}; {path} has the kinds {', '.join(kinds)}.")
    labelled = [question for question in questions if question.needles and question.record.kind not in skip_kinds]
    if not labelled:
        raise ValueError(
            f"{path} holds no question about a video with evidence; expected records that say as `evidence` when and "
            "where their answers can be seen."
        )
    return labelled


def calibrate(
    model: Any,
    processor: Any,
    questions: Sequence[LabelledQuestion],
    *,
    positions: str = "answer",
    layers: int = 4,
    heads: int = 20,
    processor_kwargs: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Calibration:
    """
    Measures every layer and head on one half of the videos, and the sums over the best of them on the other half. The
    model reads all visual tokens of a question and its true answer; the tenth that gets most attention counts as kept.

    Args:
        model, processor: a QTSplus model; its selector takes no part.
        positions: as in [`AttentionChoice`].
        layers, heads: how many of the best are summed.
        processor_kwargs: for every call of the processor, such as `{"fps": 1}`.

    Raises:
        ValueError: fewer than two videos that can be read.
    """
    text = model.config.text_config
    with tempfile.TemporaryDirectory() as folder:
        named = list(dict.fromkeys((str(one.record.video), one.record.fps) for one in questions))
        features = encode_videos(model, processor, named, folder, processor_kwargs)
        unreadable = tuple(dict.fromkeys(video for video, fps in named if not features.file(video, fps).exists()))
        videos = [video for video in dict.fromkeys(video for video, _ in named) if video not in unreadable]
        if len(videos) < 2:
            raise ValueError(
                f"{len(videos)} of {len(videos) + len(unreadable)} videos can be read; expected at least two, to "
                f"measure with and to check with.{' Not readable: ' + ', '.join(unreadable) if unreadable else ''}"
            )
        if unreadable:
            Console(stderr=True).print(f"Left out, for they cannot be read: {', '.join(unreadable)}", markup=False)
        halves = [[one for one in questions if str(one.record.video) in videos[part::2]] for part in (0, 1)]
        first, second = (
            (VideoQADataset([one.record for one in half], processor, None, processor_kwargs, features), half)
            for half in halves
        )
        measured = measure_heads(model, *first, positions, progress)
        choices = {
            ALL_LAYERS: AttentionChoice(positions=positions),
            BEST_LAYERS: AttentionChoice(layers=best_of(measured.layers, layers), positions=positions),
            BEST_HEADS: AttentionChoice(heads=best_of(measured.heads, heads), positions=positions),
        }
        recalls = measure_choices(model, *second, list(choices.values()), positions, progress)
        default = AttentionChoice(layers=(attention_layer(text),), positions="prompt")
        readings = _readings(measure_heads(model, *first, "prompt", progress), text, default, layers, heads)
        found_by_reading = measure_choices(model, *second, readings, "prompt", progress)
    found = {name: recalls[choice] for name, choice in choices.items()}
    return Calibration(measured, choices, found, len(halves[1]), found_by_reading, default, unreadable)


def _readings(
    measured: HeadRecalls, text_config: Any, default: AttentionChoice, layers: int, heads: int
) -> list[AttentionChoice]:
    """The default layer and the best ones, each with all its heads and with its best ones."""
    full = {layer: measured.layers[layer] for layer in full_attention_layers(text_config)}
    choices = [default]
    for layer in sorted({*(default.layers or ()), *best_of(full, layers)}):
        best = best_of({pair: recall for pair, recall in measured.heads.items() if pair[0] == layer}, heads)
        choices += [AttentionChoice(layers=(layer,), positions="prompt")]
        choices += [AttentionChoice(heads=best, positions="prompt")]
    return list(dict.fromkeys(choices))


def write_attention(folder: Path, calibration: Calibration) -> Path | None:
    """Writes the best reading into a model's config.json; `None` where there is no folder with a QTSplus model."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "qtsplus_config" not in config:
        return None
    config["qtsplus_config"] |= calibration.attention_fields()
    with whole_file(path) as file:
        file.write(json.dumps(config, indent=2) + "\n")
    return path


def measure_heads(
    model: Any,
    dataset: VideoQADataset,
    questions: Sequence[LabelledQuestion],
    positions: str = "answer",
    progress: bool = True,
) -> HeadRecalls:
    """The needle recall of every layer and every head; `dataset` is of the questions' records, in order."""
    layers: dict[int, list[Recall]] = {}
    heads: dict[tuple[int, int], list[Recall]] = {}
    for attention, needles in _attention_by_head(model, dataset, questions, positions, progress):
        for layer, weights in attention.items():
            whole, *single = _recalls(torch.cat([weights.mean(0, keepdim=True), weights]), needles)
            layers.setdefault(layer, []).append(whole)
            for head, recall in enumerate(single):
                heads.setdefault((layer, head), []).append(recall)
    return HeadRecalls(len(questions), _means(layers), _means(heads))


def measure_choices(
    model: Any,
    dataset: VideoQADataset,
    questions: Sequence[LabelledQuestion],
    choices: Sequence[AttentionChoice],
    positions: str = "answer",
    progress: bool = True,
) -> dict[AttentionChoice, Recall]:
    """The needle recall of the attention summed over each choice; see [`measure_heads`]."""
    recalls: dict[AttentionChoice, list[Recall]] = {}
    for attention, needles in _attention_by_head(model, dataset, questions, positions, progress):
        for choice in choices:
            layers = choice.chosen_layers
            names = attention if layers is None else layers
            parts = [attention[layer][choice.of_layer(layer) or slice(None)] for layer in names]
            recalls.setdefault(choice, []).extend(_recalls(torch.cat(parts).sum(0, keepdim=True), needles))
    return _means(recalls)


@torch.no_grad()
def _attention_by_head(
    model: Any, dataset: VideoQADataset, questions: Sequence[LabelledQuestion], positions: str, progress: bool
) -> Iterator[tuple[dict[int, torch.Tensor], list[np.ndarray]]]:
    """Of every question the attention `[heads, M]` of each layer, and its needles' tokens."""
    collate, choice = VideoQACollator(dataset.processor), AttentionChoice(positions=positions)
    bar = track(questions, "Reading with all tokens", console=Console(stderr=True), disable=not progress)
    for index, question in enumerate(bar):
        example = dataset[index]
        assert not isinstance(example, SkippedRecord), example.reason
        (grid,) = model.model.merged_grid(example["video_grid_thw"])
        seconds = float(example["second_per_grid_ts"][0])
        needles = [sighting_tokens(needle, grid, seconds) for needle in question.needles]
        if not all(map(len, needles)):
            raise ValueError(f"The evidence of {question.record.question!r} lies outside of {question.record.video}.")
        batch = collate([example])
        inputs = {name: send_to_device(batch[name], model.device) for name in batch.keys() - {"skipped", "source_ids"}}
        labels = inputs.pop("labels")
        with evaluating(model), noting_attention(model, inputs, labels, choice, by_head=True) as (row,):
            model(**{**inputs, **EVERYTHING}, use_cache=False, logits_to_keep=1)
        yield row.by_head or {}, needles


def _recalls(scores: torch.Tensor, needles: Sequence[np.ndarray]) -> list[Recall]:
    """What the tokens with the highest `scores` `[K, M]` find, for each row of them."""
    num_tokens = scores.shape[1]
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    kept.scatter_(1, scores.topk(kept_count(SHARE, num_tokens, num_tokens)).indices.cpu(), True)
    by_needle = [kept[:, torch.from_numpy(needle)] for needle in needles]
    shown = torch.from_numpy(np.unique(np.concatenate(list(needles))))
    wanted, scores = kept[:, shown], scores.cpu()
    tokens = wanted.float().mean(1).tolist()
    hit = torch.stack([found.any(1).float() for found in by_needle]).mean(0).tolist()
    mass = (scores[:, shown].sum(1) / scores.sum(1).clamp(min=torch.finfo(scores.dtype).tiny)).tolist()
    return [Recall(*values) for values in zip(tokens, hit, mass, strict=True)]


def _means(recalls: Mapping[Any, list[Recall]]) -> dict[Any, Recall]:
    return {
        key: Recall(*(float(np.mean(values)) for values in zip(*map(astuple, row), strict=True)))
        for key, row in recalls.items()
    }


def _layer(choice: AttentionChoice) -> int:
    """The one layer of a reading."""
    (layer,) = choice.chosen_layers or ()
    return layer


def best_of(recalls: Mapping[K, Recall], count: int) -> tuple[K, ...]:
    """Those with the highest recall of tokens, at least half of the best one's; at most half of all; ascending."""
    order = sorted(recalls, key=lambda key: -recalls[key].tokens)
    most = [key for key in order if recalls[key].tokens >= recalls[order[0]].tokens / 2]
    return tuple(sorted(most[: min(count, max(1, len(recalls) // 2))]))
