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
from ..training.attention import AttentionChoice, noting_attention
from ..training.collator import VideoQACollator
from ..training.dataset import SkippedRecord, VideoQADataset
from ..training.distillation import EVERYTHING, evaluating
from ..training.features import encode_videos
from .labelled import LabelledQuestion, read_questions, sighting_tokens

SHARE = 0.1  # of the visual tokens that a layer or a head may keep
EQUAL = 0.01  # recalls that are taken for the same
LAYERS, HEADS = 4, 20  # so many of the best are summed at most

K = TypeVar("K", int, tuple[int, int])  # a layer, or a layer and a head


@dataclass(frozen=True)
class Recall:
    """
    Means over questions.

    Args:
        tokens: share of a question's needle tokens that are kept.
        mass: share of the attention to all visual tokens that goes to the needles'. Layers that look everywhere lower
            it, and blur what a selector learns from the sum.
    """

    tokens: float
    mass: float


@dataclass(frozen=True)
class HeadRecalls:
    """What is found by each layer (the mean over its heads), and by each single (layer, head)."""

    layers: dict[int, Recall]
    heads: dict[tuple[int, int], Recall]


@dataclass(frozen=True)
class Calibration:
    """
    Args:
        measured: over the questions about half of the videos, while the model answers.
        choices: for attention distillation, what the sum over each finds in the other videos.
        readings: for `selection="lm_attention"`, what each finds in the other videos; every one reads a single layer.
            The first is the one that a model reads without calibration.
        questions: how many were measured, and how many checked.
    """

    measured: HeadRecalls
    choices: dict[AttentionChoice, Recall]
    readings: dict[AttentionChoice, Recall]
    questions: tuple[int, int]

    @property
    def best_reading(self) -> AttentionChoice:
        """The one with the highest recall of tokens; of equals the shallowest, then the one with the most mass."""
        most = max(recall.tokens for recall in self.readings.values())
        equal = [choice for choice, recall in self.readings.items() if recall.tokens >= most - EQUAL]
        return min(equal, key=lambda choice: (_layer(choice), -self.readings[choice].mass))

    @property
    def best(self) -> AttentionChoice:
        """The choice with the highest recall of tokens; of equals (to 1%) the one with the most mass on the needles."""
        return max(self.choices, key=lambda choice: (round(self.choices[choice].tokens, 2), self.choices[choice].mass))

    def attention_fields(self) -> dict[str, int | list[int] | None]:
        """What the best reading is in `qtsplus_config`."""
        layer = _layer(self.best_reading)
        return {"attention_layer": layer, "attention_heads": self.best_reading.of_layer(layer)}

    def fields(self) -> dict[str, Any]:
        """What the best choice is in a recipe's `training` section; nothing where all layers are best."""
        named = {"relevance_layers": self.best.layers, "relevance_heads": self.best.heads}
        return {name: np.array(value).tolist() for name, value in named.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        measured, checked = self.questions
        return {
            "questions": {"measured": measured, "checked": checked},
            "training": self.fields(),
            "qtsplus_config": self.attention_fields(),
            "choices": [{**asdict(choice), **asdict(recall)} for choice, recall in self.choices.items()],
            "readings": [{**asdict(choice), **asdict(recall)} for choice, recall in self.readings.items()],
            "layers": [{"layer": layer, **asdict(recall)} for layer, recall in self.measured.layers.items()],
            "heads": [
                {"layer": layer, "head": head, **asdict(recall)}
                for (layer, head), recall in self.measured.heads.items()
            ],
        }


def read_labelled(path: Path) -> list[LabelledQuestion]:
    """
    The questions of a JSONL file that have a video and `evidence`; see [`read_questions`].

    Raises:
        ValueError: as [`read_questions`], or no such question.
    """
    labelled = [question for question in read_questions(path) if question.needles]
    if not labelled:
        raise ValueError(
            f"{path} holds no question about a video with evidence; expected records that say as `evidence` when and "
            "where their answers can be seen."
        )
    return labelled


def calibrate(model: Any, processor: Any, questions: Sequence[LabelledQuestion], progress: bool = True) -> Calibration:
    """
    Measures every layer and head on one half of the videos, and the sums over the best of them on the other half. The
    model reads all visual tokens of a question and its true answer; the tenth that gets most attention counts as kept.

    Args:
        model, processor: a QTSplus model; its selector takes no part.

    Raises:
        ValueError: fewer than two videos that can be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        named = list(dict.fromkeys((str(one.record.video), one.record.fps) for one in questions))
        features = encode_videos(model, processor, named, folder)
        unreadable = list(dict.fromkeys(video for video, fps in named if not features.file(video, fps).exists()))
        left_out = f" Left out, for they cannot be read: {', '.join(unreadable)}." if unreadable else ""
        videos = [video for video in dict.fromkeys(video for video, _ in named) if video not in unreadable]
        if len(videos) < 2:
            raise ValueError(f"{len(videos)} of the videos can be read; expected two or more, to check with.{left_out}")
        if unreadable:
            Console(stderr=True).print(left_out.strip(), markup=False)
        halves = [[one for one in questions if str(one.record.video) in videos[part::2]] for part in (0, 1)]
        first, second = (
            (VideoQADataset([one.record for one in half], processor, None, None, features), half) for half in halves
        )
        measured = measure_heads(model, *first, "answer", progress)
        sums = [
            AttentionChoice(),
            AttentionChoice(layers=best_of(measured.layers, LAYERS)),
            AttentionChoice(heads=best_of(measured.heads, HEADS)),
        ]
        choices = measure_choices(model, *second, sums, "answer", progress)
        single = _readings(measure_heads(model, *first, "prompt", progress), model.config.text_config)
        readings = measure_choices(model, *second, single, "prompt", progress)
    return Calibration(measured, choices, readings, (len(halves[0]), len(halves[1])))


def _readings(measured: HeadRecalls, text_config: Any) -> list[AttentionChoice]:
    """The default layer and the best ones, each with all its heads and with its best ones."""
    default = attention_layer(text_config)
    best = best_of({layer: measured.layers[layer] for layer in full_attention_layers(text_config)}, LAYERS)
    choices = []
    for layer in dict.fromkeys((default, *best)):
        heads = best_of({pair: recall for pair, recall in measured.heads.items() if pair[0] == layer}, HEADS)
        choices += [AttentionChoice(layers=(layer,), positions="prompt")]
        choices += [AttentionChoice(heads=heads, positions="prompt")]
    return choices


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
    model: Any, dataset: VideoQADataset, questions: Sequence[LabelledQuestion], positions: str, progress: bool
) -> HeadRecalls:
    """The needle recall of every layer and every head; `dataset` is of the questions' records, in order."""
    layers: dict[int, list[Recall]] = {}
    heads: dict[tuple[int, int], list[Recall]] = {}
    for attention, shown in _attention_by_head(model, dataset, questions, positions, progress):
        for layer, weights in attention.items():
            whole, *single = _recalls(torch.cat([weights.mean(0, keepdim=True), weights]), shown)
            layers.setdefault(layer, []).append(whole)
            for head, recall in enumerate(single):
                heads.setdefault((layer, head), []).append(recall)
    return HeadRecalls(_means(layers), _means(heads))


def measure_choices(
    model: Any,
    dataset: VideoQADataset,
    questions: Sequence[LabelledQuestion],
    choices: Sequence[AttentionChoice],
    positions: str,
    progress: bool,
) -> dict[AttentionChoice, Recall]:
    """The needle recall of the attention summed over each choice; see [`measure_heads`]."""
    recalls: dict[AttentionChoice, list[Recall]] = {}
    for attention, shown in _attention_by_head(model, dataset, questions, positions, progress):
        for choice in choices:
            layers = choice.chosen_layers
            names = attention if layers is None else layers
            parts = [attention[layer][choice.of_layer(layer) or slice(None)] for layer in names]
            recalls.setdefault(choice, []).extend(_recalls(torch.cat(parts).sum(0, keepdim=True), shown))
    return _means(recalls)


@torch.no_grad()
def _attention_by_head(
    model: Any, dataset: VideoQADataset, questions: Sequence[LabelledQuestion], positions: str, progress: bool
) -> Iterator[tuple[dict[int, torch.Tensor], np.ndarray]]:
    """Of every question the attention `[heads, M]` of each layer, and its needles' tokens `[k]`."""
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
        yield row.by_head or {}, np.unique(np.concatenate(needles))


def _recalls(scores: torch.Tensor, shown: np.ndarray) -> list[Recall]:
    """What the tokens with the highest `scores` `[K, M]` find of those `[k]` that show the answer, for each row."""
    num_tokens = scores.shape[1]
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    kept.scatter_(1, scores.topk(kept_count(SHARE, num_tokens, num_tokens)).indices.cpu(), True)
    scores = scores.cpu()
    tokens = kept[:, shown].float().mean(1).tolist()
    mass = (scores[:, shown].sum(1) / scores.sum(1).clamp(min=torch.finfo(scores.dtype).tiny)).tolist()
    return [Recall(*values) for values in zip(tokens, mass, strict=True)]


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
