"""
Which layers and heads look at what an answer rests on: needle recall of each, over questions with their evidence.

While the model answers and while it reads the question, for attention distillation; and from where the answer begins,
for `selection="lm_attention"`.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ..common.files import listed
from ..common.folders import read_json, update_json
from ..model.lm_attention_qtsplus import attention_layer, full_attention_layers
from ..training.attention import EVERYTHING, AttentionChoice, evaluating, noting_attention
from ..training.dataset import SkippedRecord, VideoQACollator, VideoQADataset
from ..training.features import VideoFeatures, encode_files
from .labelled import LabelledQuestion, labelled_questions, sighting_tokens

EQUAL = 0.01  # the largest difference of recalls that are taken for the same
MOST = {"layers": 4, "heads": 20}  # of the best that are summed


class Recall(NamedTuple):
    """Means over questions."""

    # The share of a question's needle tokens among as many with the most attention: a tenth may hold all that is shown.
    tokens: float
    # The share of the attention to all visual tokens that goes to the needles'. Layers that look everywhere lower it,
    # and blur what a selector learns from the sum.
    mass: float


Recalls = dict[AttentionChoice, Recall]
Attention = dict[int, Tensor]  # [heads, M] of each layer


@dataclass(frozen=True)
class Half:
    """Questions about one half of the videos, and the dataset of their records in the same order."""

    dataset: VideoQADataset
    questions: Sequence[LabelledQuestion]


@dataclass(frozen=True)
class Calibration:
    """What [`calibrate`] has found."""

    # For attention distillation, what the sum over each finds in the half of the videos that did not choose it.
    choices: Recalls
    # For `selection="lm_attention"`, what each single layer finds there; first that which a model reads without this.
    readings: Recalls
    questions: tuple[int, int]  # how many were measured, and how many checked

    @property
    def best_reading(self) -> AttentionChoice:
        """The one with the highest recall of tokens; among equals the shallowest, then the one with the most mass."""
        readings = self.readings
        least = max(recall.tokens for recall in readings.values()) - EQUAL
        equals = [choice for choice in readings if readings[choice].tokens >= least]

        def depth_and_mass(choice: AttentionChoice) -> tuple[int, float]:
            return _layer(choice), -self.readings[choice].mass

        return min(equals, key=depth_and_mass)

    @property
    def best(self) -> AttentionChoice:
        """The choice with the highest recall of tokens; among equals (to 1%) the one with the most mass on needles."""

        def tokens_and_mass(choice: AttentionChoice) -> tuple[float, float]:
            recall = self.choices[choice]
            return round(recall.tokens, 2), recall.mass

        return max(self.choices, key=tokens_and_mass)

    def attention_fields(self) -> dict[str, int | list[int] | None]:
        """The best reading as fields of `qtsplus_config`."""
        reading = self.best_reading
        layer = _layer(reading)
        return {"attention_layer": layer, "attention_heads": reading.of_layer(layer)}

    def fields(self) -> dict:
        """The best choice as fields of a recipe's `training` section; none if all layers are best."""
        best = self.best
        fields: dict = {}
        if best.layers is not None:
            fields["relevance_layers"] = list(best.layers)
        if best.heads is not None:
            fields["relevance_heads"] = [list(pair) for pair in best.heads]
        if best.positions != "answer":
            fields["relevance_positions"] = best.positions
        return fields


def read_labelled(path: Path) -> list[LabelledQuestion]:
    """The [`labelled_questions`] of a JSONL file that have `evidence`; a `ValueError` if there are none."""
    labelled = [question for question in labelled_questions(path) if question.needles]
    if not labelled:
        raise ValueError(
            f"{path} holds no question about a video with evidence; expected records that say as `evidence` when and "
            "where their answers can be seen."
        )
    return labelled


def calibrate(
    model,
    processor,
    questions: Sequence[LabelledQuestion],
    progress: bool = True,
) -> Calibration:
    """
    Measures every layer and head on one half of the videos, and the sums over the best of them on the other half;
    a `ValueError` for fewer than two videos that can be read. The model, whose selector takes no part, reads all visual
    tokens of a question and its true answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        records = [question.record for question in questions]
        videos = list(dict.fromkeys((str(record.video), record.fps) for record in records))
        features = encode_files(model, processor, videos, folder)
        readable = _readable(videos, features)
        halves = []
        for part in (0, 1):
            names = readable[part::2]
            of_half = [question for question in questions if str(question.record.video) in names]
            records = [question.record for question in of_half]
            dataset = VideoQADataset(records, processor, features=features)
            halves.append(Half(dataset, of_half))
        measured, checked = halves
        choices: Recalls = {}
        for positions in ("answer", "question", "both"):
            recalls = measure_recalls(model, measured, positions, progress)
            sums = [AttentionChoice(positions=positions), best_sum(recalls, "layers"), best_sum(recalls, "heads")]
            choices.update(measure_recalls(model, checked, positions, progress, sums))
        recalls = measure_recalls(model, measured, "prompt", progress)
        single = _readings(recalls, model.config.text_config)
        readings = measure_recalls(model, checked, "prompt", progress, single)
    counts = (len(measured.questions), len(checked.questions))
    return Calibration(choices, readings, counts)


def _readable(videos: Sequence[tuple[str, float | None]], features: VideoFeatures) -> list[str]:
    """The videos whose features could be made; says which are left out, and raises for fewer than two."""
    exists: dict[str, bool] = {}  # a video may be there at several rates
    for video, fps in videos:
        exists[video] = exists.get(video, True) and features.file(video, fps).exists()
    readable = [video for video in exists if exists[video]]
    unreadable = [video for video in exists if not exists[video]]
    left_out = ""
    if unreadable:
        left_out = f"Left out, for they cannot be read: {listed(unreadable)}."
    if len(readable) < 2:
        message = f"{len(readable)} of the videos can be read; expected two or more, to check with. {left_out}"
        raise ValueError(message.rstrip())
    if left_out:
        Console(stderr=True).print(left_out, markup=False)
    return readable


def _readings(recalls: Recalls, text_config) -> list[AttentionChoice]:
    """The default layer and the best ones, each with all its heads and with its best ones."""
    layers = full_attention_layers(text_config)
    full = {choice: recalls[choice] for choice in recalls if _layer(choice) in layers}
    best = best_sum(full, "layers").layers or ()
    choices = []
    for layer in dict.fromkeys((attention_layer(text_config),) + best):
        of_layer = {choice: full[choice] for choice in full if _layer(choice) == layer}
        choices.append(AttentionChoice(layers=(layer,), positions="prompt"))
        choices.append(best_sum(of_layer, "heads"))
    return choices


def write_attention(folder: Path, calibration: Calibration) -> Path | None:
    """Writes the best reading into a model's config.json; `None` where there is no folder with a QTSplus model."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    selector = read_json(path).get("qtsplus_config")
    if selector is None:
        return None
    update_json(path, qtsplus_config=selector | calibration.attention_fields())
    return path


def measure_recalls(
    model,
    half: Half,
    positions: str,
    progress: bool,
    choices: Sequence[AttentionChoice] = (),
) -> Recalls:
    """The mean needle recall of the attention summed over each choice; without any, of every single layer and head."""
    recalls: dict[AttentionChoice, list[Recall]] = {}
    for attention, shown in _attention_by_head(model, half, positions, progress):
        for choice in choices or _single_choices(attention, positions):
            scores = _summed(attention, choice)
            recalls.setdefault(choice, []).append(_recall(scores, shown))
    means = {}
    for choice, of_questions in recalls.items():
        tokens, mass = np.mean(of_questions, axis=0).tolist()
        means[choice] = Recall(tokens, mass)
    return means


def _single_choices(attention: Attention, positions: str) -> list[AttentionChoice]:
    """Every layer, then every head."""
    choices = []
    for layer in attention:
        choices.append(AttentionChoice(layers=(layer,), positions=positions))
    for layer, weights in attention.items():
        for head in range(len(weights)):
            choices.append(AttentionChoice(heads=((layer, head),), positions=positions))
    return choices


def _summed(attention: Attention, choice: AttentionChoice) -> Tensor:
    """`[M]`: the attention summed over the layers and heads of a choice."""
    layers = choice.chosen_layers
    weights = []
    for layer in attention if layers is None else layers:
        of_layer = attention[layer]
        heads = choice.of_layer(layer)
        weights.append(of_layer if heads is None else of_layer[heads])
    return torch.cat(weights).sum(0)


@torch.no_grad()
def _attention_by_head(
    model,
    half: Half,
    positions: str,
    progress: bool,
) -> Iterator[tuple[Attention, np.ndarray]]:
    """The attention `[heads, M]` of each layer, and the needles' tokens `[k]`, for every question."""
    collate = VideoQACollator(half.dataset.processor)
    choice = AttentionChoice(positions=positions)
    bar = track(half.questions, "Reading with all tokens", console=Console(stderr=True), disable=not progress)
    for index, question in enumerate(bar):
        example = half.dataset[index]
        assert not isinstance(example, SkippedRecord), example.reason
        (grid,) = model.model.merged_grid(example["video_grid_thw"])
        seconds = float(example["second_per_grid_ts"][0])
        record = question.record
        needles = [sighting_tokens(needle, grid, seconds) for needle in question.needles]
        if not all(map(len, needles)):
            raise ValueError(f"The evidence of {record.question!r} lies outside of {record.video}.")
        inputs = collate([example])
        del inputs["skipped"], inputs["source_ids"]
        inputs = send_to_device(inputs, model.device)
        labels = inputs.pop("labels")
        everything = inputs | EVERYTHING
        with evaluating(model), noting_attention(model, inputs, labels, choice, by_head=True) as (row,):
            model(**everything, use_cache=False, logits_to_keep=1)
        yield row.by_head or {}, np.unique(np.concatenate(needles))


def _recall(scores: Tensor, shown: np.ndarray) -> Recall:
    """How much the tokens with the highest `scores` `[M]` have of those `[k]` that show the answer."""
    kept = scores.topk(len(shown)).indices.cpu().numpy()
    needles = torch.from_numpy(shown).to(scores.device)
    mass = scores[needles].sum() / scores.sum().clamp(min=1e-30)
    tokens = np.isin(shown, kept).mean()
    return Recall(float(tokens), float(mass))


def _layer(choice: AttentionChoice) -> int:
    """The one layer of a choice."""
    (layer,) = choice.chosen_layers or ()
    return layer


def best_sum(recalls: Recalls, kind: str) -> AttentionChoice:
    """
    The sum of the best of the single "layers" or "heads": those with the highest recall of tokens, at least half of the
    best one's; at most half of all.
    """
    single = [choice for choice in recalls if getattr(choice, kind)]
    single.sort(key=lambda choice: -recalls[choice].tokens)
    least = recalls[single[0]].tokens / 2
    half = max(1, len(single) // 2)
    places: list[Any] = []
    for choice in single[: min(MOST[kind], half)]:
        if recalls[choice].tokens >= least:
            places += getattr(choice, kind)
    chosen: Any = {kind: tuple(sorted(places))}
    return replace(single[0], **chosen)
