"""
Which layers and heads look at what an answer rests on: needle recall of each, over questions with their evidence.

While the model answers, for attention distillation; and from where the answer begins, for `selection="lm_attention"`.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from rich.console import Console
from rich.progress import track

from ..lm_attention_qtsplus import attention_layer, full_attention_layers
from ..selector_qtsplus import kept_count
from ..training.attention import AttentionChoice, noting_attention
from ..training.collator import VideoQACollator
from ..training.dataset import SkippedRecord, VideoQADataset
from ..training.distillation import EVERYTHING, evaluating
from ..training.features import encode_videos
from .labelled import LabelledQuestion, read_questions, sighting_tokens

SHARE = 0.1  # of the visual tokens that a layer or a head may keep

ALL_LAYERS, BEST_LAYERS, BEST_HEADS = "all layers", "best layers", "best heads"
EQUAL = 0.01  # recalls that are taken for the same


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
    """
    What is found by each layer (the mean over its heads) and by each head alone.

    Args:
        questions: how many were asked.
        layers, heads: by layer, and by (layer, head).
    """

    questions: int
    layers: dict[int, Recall]
    heads: dict[tuple[int, int], Recall]

    def best_layers(self, count: int) -> tuple[int, ...]:
        """Those with the highest recall of tokens, at least half of the best one's; at most half of all; ascending."""
        return tuple(sorted(_best(self.layers)[: min(count, max(1, len(self.layers) // 2))]))

    def best_heads(self, count: int) -> tuple[tuple[int, int], ...]:
        """As for layers."""
        return tuple(sorted(_best(self.heads)[: min(count, max(1, len(self.heads) // 2))]))


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
    """

    measured: HeadRecalls
    choices: dict[str, AttentionChoice]
    found: dict[str, Recall]
    checked: int
    readings: dict[AttentionChoice, Recall]
    default: AttentionChoice

    @property
    def best_reading(self) -> AttentionChoice:
        """The one with the highest recall of tokens; of equals the shallowest, then the one with the most mass."""
        most = max(recall.tokens for recall in self.readings.values())
        equal = [choice for choice, recall in self.readings.items() if recall.tokens >= most - EQUAL]
        return min(equal, key=lambda choice: (_layer(choice), -self.readings[choice].mass))

    def attention_fields(self) -> dict[str, Any]:
        """What the best reading is in `qtsplus_config`, with its figures."""
        choice = self.best_reading
        heads = choice.of_layer(_layer(choice))
        return {
            "attention_layer": _layer(choice),
            "attention_heads": heads,
            "attention_found": {
                "share": SHARE,
                "questions": self.checked,
                **_rounded(self.readings[choice]),
                "default_layer": _layer(self.default),
                "default": _rounded(self.readings[self.default]),
            },
        }

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
        heads = [{"layer": layer, "head": head, **asdict(got)} for (layer, head), got in self.measured.heads.items()]
        choices = [
            {"choice": name, **_described(self.choices[name]), **asdict(recall)} for name, recall in self.found.items()
        ]
        return {
            "share": SHARE,
            "questions": {"measured": self.measured.questions, "checked": self.checked},
            "best": self.best,
            "choices": choices,
            "layers": [{"layer": layer, **asdict(got)} for layer, got in self.measured.layers.items()],
            "heads": heads,
            "readings": [
                {"layer": _layer(choice), "heads": choice.of_layer(_layer(choice)), **asdict(recall)}
                for choice, recall in self.readings.items()
            ],
            "best_reading": self.attention_fields(),
        }


def read_labelled(path: Path, skip_kinds: Sequence[str] = ()) -> list[LabelledQuestion]:
    """
    The questions of a JSONL file of records that have a video and `evidence`, see [`read_questions`].

    Args:
        skip_kinds: kinds that are left out.

    Raises:
        ValueError: a line that is no record, evidence of another form, or no such question.
    """
    found = [
        question for question in read_questions(path) if question.needles and question.record.kind not in skip_kinds
    ]
    if not found:
        raise ValueError(
            f"{path} holds no question about a video with evidence; expected records that say as `evidence` when and "
            "where their answers can be seen."
        )
    return found


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
    Measures every layer and head on one half of the videos, and the sums over the best of them on the other half.

    The model reads all visual tokens of a question and its true answer; the tokens that get most attention, a tenth of
    them, count as kept.

    Args:
        model, processor: a QTSplus model; its selector takes no part.
        positions: as in [`AttentionChoice`].
        layers, heads: how many of the best are summed.
        processor_kwargs: for every call of the processor, such as `{"fps": 1}`.

    Raises:
        ValueError: questions about fewer than two videos, or a video that cannot be read.
    """
    videos = list(dict.fromkeys(str(question.record.video) for question in questions))
    if len(videos) < 2:
        raise ValueError("The questions are about one video; expected at least two, to measure with and to check with.")
    halves = [[q for q in questions if str(q.record.video) in set(videos[part::2])] for part in (0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        named = list(dict.fromkeys((str(q.record.video), q.record.fps) for q in questions))
        features = encode_videos(model, processor, named, folder, processor_kwargs)
        datasets = [
            VideoQADataset([q.record for q in half], processor, None, processor_kwargs, features) for half in halves
        ]
        measured = measure_heads(model, datasets[0], halves[0], positions, progress)
        choices = {
            ALL_LAYERS: AttentionChoice(positions=positions),
            BEST_LAYERS: AttentionChoice(layers=measured.best_layers(layers), positions=positions),
            BEST_HEADS: AttentionChoice(heads=measured.best_heads(heads), positions=positions),
        }
        found = measure_choices(model, datasets[1], halves[1], choices, positions, progress)
        text = model.config.text_config
        default = AttentionChoice(layers=(attention_layer(text),), positions="prompt")
        readings = {
            str(number): choice
            for number, choice in enumerate(
                _readings(
                    measure_heads(model, datasets[0], halves[0], "prompt", progress), text, default, layers, heads
                )
            )
        }
        read = measure_choices(model, datasets[1], halves[1], readings, "prompt", progress)
    by_choice = {choice: read[number] for number, choice in readings.items()}
    return Calibration(measured, choices, found, len(halves[1]), by_choice, default)


def _readings(
    measured: HeadRecalls, text_config: Any, default: AttentionChoice, layers: int, heads: int
) -> list[AttentionChoice]:
    """The default layer and the best ones, each with all its heads and with its best ones."""
    full = {layer: measured.layers[layer] for layer in full_attention_layers(text_config)}
    chosen = {*(default.layers or ()), *HeadRecalls(0, full, {}).best_layers(layers)}
    found = [default]
    for layer in sorted(chosen):
        own = {pair: recall for pair, recall in measured.heads.items() if pair[0] == layer}
        best = HeadRecalls(0, {}, own).best_heads(heads)
        found += [AttentionChoice(layers=(layer,), positions="prompt"), AttentionChoice(heads=best, positions="prompt")]
    return list(dict.fromkeys(found))


def write_attention(folder: Path, found: Calibration) -> Path | None:
    """
    Writes the best reading into the configuration of a model's folder.

    Returns:
        the file; `None` where there is no folder with a QTSplus model.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "qtsplus_config" not in config:
        return None
    config["qtsplus_config"] |= found.attention_fields()
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def measure_heads(
    model: Any,
    dataset: VideoQADataset,
    questions: Sequence[LabelledQuestion],
    positions: str = "answer",
    progress: bool = True,
) -> HeadRecalls:
    """
    The needle recall of every layer and every head.

    Args:
        dataset: of the questions' records, in order.
    """
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
    choices: Mapping[str, AttentionChoice],
    positions: str = "answer",
    progress: bool = True,
) -> dict[str, Recall]:
    """The needle recall of the attention summed over each choice, by its name; see [`measure_heads`]."""
    found: dict[str, list[Recall]] = {}
    for attention, needles in _attention_by_head(model, dataset, questions, positions, progress):
        for name, choice in choices.items():
            chosen = choice.layers if choice.heads is None else sorted({layer for layer, _ in choice.heads})
            parts = [
                attention[layer] if choice.heads is None else attention[layer][choice.of_layer(layer)]
                for layer in (attention if chosen is None else chosen)
            ]
            found.setdefault(name, []).extend(_recalls(torch.cat(parts).sum(0, keepdim=True), needles))
    return _means(found)


@torch.no_grad()
def _attention_by_head(
    model: Any, dataset: VideoQADataset, questions: Sequence[LabelledQuestion], positions: str, progress: bool
) -> Iterator[tuple[dict[int, torch.Tensor], list[np.ndarray]]]:
    """Of every question the attention `[heads, M]` of each layer, and its needles' tokens."""
    collate, choice = VideoQACollator(dataset.processor), AttentionChoice(positions=positions)
    bar = track(questions, "Reading with all tokens", console=Console(stderr=True), disable=not progress)
    for index, question in enumerate(bar):
        example = dataset[index]
        if isinstance(example, SkippedRecord):
            raise ValueError(f"{example.name} cannot be used: {example.reason}")
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
    (layer,) = choice.layers or () if choice.heads is None else {layer for layer, _ in choice.heads}
    return layer


def _described(choice: AttentionChoice) -> dict[str, Any]:
    return {"layers": choice.layers, "heads": choice.heads, "positions": choice.positions}


def _rounded(recall: Recall) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(recall).items()}


def _best(recalls: Mapping[Any, Recall]) -> list[Any]:
    """Highest recall of tokens first, without those that find less than half of what the first one finds."""
    order = sorted(recalls, key=lambda key: -recalls[key].tokens)
    return [key for key in order if recalls[key].tokens >= recalls[order[0]].tokens / 2]


__all__ = [
    "Calibration",
    "HeadRecalls",
    "Recall",
    "calibrate",
    "measure_choices",
    "measure_heads",
    "read_labelled",
    "write_attention",
]
