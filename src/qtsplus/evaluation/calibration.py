"""
Which layers and heads look at what an answer rests on: needle recall of each, over questions with their evidence.

While the model answers and while it reads the question, for attention distillation; and from where the answer begins,
for `selection="lm_attention"`.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from rich.console import Console
from rich.progress import track

from ..common.files import listed
from ..common.folders import read_json, update_json
from ..model.lm_attention_qtsplus import attention_layer, full_attention_layers
from ..training.attention import EVERYTHING, AttentionChoice, evaluating, noting_attention
from ..training.dataset import SkippedRecord, VideoQACollator, VideoQADataset
from ..training.features import encode_files
from .labelled import LabelledQuestion, labelled_questions, sighting_tokens

EQUAL = 0.01  # recalls that are taken for the same
MOST = {"layers": 4, "heads": 20}  # of the best that are summed


class Recall(NamedTuple):
    """Means over questions."""

    # The share of a question's needle tokens among as many with the most attention: a tenth may hold all that is shown.
    tokens: float
    # The share of the attention to all visual tokens that goes to the needles'. Layers that look everywhere lower it,
    # and blur what a selector learns from the sum.
    mass: float


@dataclass(frozen=True)
class Calibration:
    """What [`calibrate`] has found."""

    # For attention distillation, what the sum over each finds in the half of the videos that did not choose it.
    choices: dict[AttentionChoice, Recall]
    # For `selection="lm_attention"`, what each single layer finds there; first that which a model reads without this.
    readings: dict[AttentionChoice, Recall]
    questions: tuple[int, int]  # how many were measured, and how many checked

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
        fields = {name: np.array(value).tolist() for name, value in named.items() if value is not None}
        return fields | ({} if self.best.positions == "answer" else {"relevance_positions": self.best.positions})


def read_labelled(path: Path) -> list[LabelledQuestion]:
    """The [`labelled_questions`] of a JSONL file that have `evidence`; a `ValueError` if there are none."""
    labelled = [question for question in labelled_questions(path) if question.needles]
    if not labelled:
        raise ValueError(
            f"{path} holds no question about a video with evidence; expected records that say as `evidence` when and "
            "where their answers can be seen."
        )
    return labelled


def calibrate(model: Any, processor: Any, questions: Sequence[LabelledQuestion], progress: bool = True) -> Calibration:
    """
    Measures every layer and head on one half of the videos, and the sums over the best of them on the other half;
    a `ValueError` for fewer than two videos that can be read. The model, whose selector takes no part, reads all visual
    tokens of a question and its true answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        named = list(dict.fromkeys((str(one.record.video), one.record.fps) for one in questions))
        features = encode_files(model, processor, named, folder)
        unreadable = list(dict.fromkeys(video for video, fps in named if not features.file(video, fps).exists()))
        left_out = f" Left out, for they cannot be read: {listed(unreadable)}." if unreadable else ""
        videos = [video for video in dict.fromkeys(video for video, _ in named) if video not in unreadable]
        if len(videos) < 2:
            raise ValueError(f"{len(videos)} of the videos can be read; expected two or more, to check with.{left_out}")
        if unreadable:
            Console(stderr=True).print(left_out.strip(), markup=False)
        halves = [[one for one in questions if str(one.record.video) in videos[part::2]] for part in (0, 1)]
        first, second = (
            (VideoQADataset([one.record for one in half], processor, None, None, features), half) for half in halves
        )
        choices: dict[AttentionChoice, Recall] = {}
        for positions in ("answer", "question", "both"):
            found = measure_recalls(model, *first, positions, progress)
            sums = [AttentionChoice(positions=positions), best_sum(found, "layers"), best_sum(found, "heads")]
            choices |= measure_recalls(model, *second, positions, progress, sums)
        single = _readings(measure_recalls(model, *first, "prompt", progress), model.config.text_config)
        readings = measure_recalls(model, *second, "prompt", progress, single)
    return Calibration(choices, readings, (len(halves[0]), len(halves[1])))


def _readings(measured: Mapping[AttentionChoice, Recall], text_config: Any) -> list[AttentionChoice]:
    """The default layer and the best ones, each with all its heads and with its best ones."""
    layers = full_attention_layers(text_config)
    full = {choice: recall for choice, recall in measured.items() if _layer(choice) in layers}
    choices = []
    for layer in dict.fromkeys((attention_layer(text_config), *(best_sum(full, "layers").layers or ()))):
        choices.append(AttentionChoice(layers=(layer,), positions="prompt"))
        choices.append(best_sum({choice: full[choice] for choice in full if _layer(choice) == layer}, "heads"))
    return choices


def write_attention(folder: Path, calibration: Calibration) -> Path | None:
    """Writes the best reading into a model's config.json; `None` where there is no folder with a QTSplus model."""
    path = folder / "config.json"
    selector = read_json(path).get("qtsplus_config") if path.is_file() else None
    if selector is None:
        return None
    update_json(path, qtsplus_config=selector | calibration.attention_fields())
    return path


def measure_recalls(
    model: Any,
    dataset: VideoQADataset,
    questions: Sequence[LabelledQuestion],
    positions: str,
    progress: bool,
    choices: Sequence[AttentionChoice] = (),
) -> dict[AttentionChoice, Recall]:
    """
    The needle recall of the attention summed over each choice; without any, of every single layer and head. The dataset
    is that of the questions' records, in order.
    """
    recalls: dict[AttentionChoice, list[Recall]] = {}
    for attention, shown in _attention_by_head(model, dataset, questions, positions, progress):
        heads = [(layer, head) for layer, weights in attention.items() for head in range(len(weights))]
        single = [AttentionChoice(layers=(layer,), positions=positions) for layer in attention]
        single += [AttentionChoice(heads=(pair,), positions=positions) for pair in heads]
        for choice in choices or single:
            layers = choice.chosen_layers
            names = attention if layers is None else layers
            parts = [attention[layer][choice.of_layer(layer) or slice(None)] for layer in names]
            recalls.setdefault(choice, []).append(_recall(torch.cat(parts).sum(0), shown))
    return {choice: Recall(*np.mean(row, axis=0).tolist()) for choice, row in recalls.items()}


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


def _recall(scores: torch.Tensor, shown: np.ndarray) -> Recall:
    """What the tokens with the highest `scores` `[M]` find of those `[k]` that show the answer."""
    kept = scores.topk(len(shown)).indices.cpu().numpy()
    mass = scores[torch.from_numpy(shown).to(scores.device)].sum() / scores.sum().clamp(min=1e-30)
    return Recall(float(np.isin(shown, kept).mean()), float(mass))


def _layer(choice: AttentionChoice) -> int:
    """The one layer of a choice."""
    (layer,) = choice.chosen_layers or ()
    return layer


def best_sum(recalls: Mapping[AttentionChoice, Recall], kind: str) -> AttentionChoice:
    """
    The sum of the best of the single "layers" or "heads": those with the highest recall of tokens, at least half of the
    best one's; at most half of all.
    """
    order = sorted((choice for choice in recalls if getattr(choice, kind)), key=lambda choice: -recalls[choice].tokens)
    good = [choice for choice in order if recalls[choice].tokens >= recalls[order[0]].tokens / 2]
    best = good[: min(MOST[kind], max(1, len(order) // 2))]
    places: Any = tuple(sorted(place for choice in best for place in getattr(choice, kind)))
    return replace(best[0], **{kind: places})
