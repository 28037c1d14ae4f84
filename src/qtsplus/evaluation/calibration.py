"""
Which heads look at what an answer rests on: needle recall of each, over questions with their evidence.

While the model answers and while it reads the question, for attention distillation; and from where the answer begins,
for `selection="lm_attention"`.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import send_to_device
from rich.console import Console
from torch import Tensor
from transformers.utils import logging

from ..common.files import listed
from ..common.folders import read_json, update_json
from ..model.lm_attention_qtsplus import attention_layer, full_attention_layers
from ..training.attention import AttentionChoice, note_attention
from ..training.dataset import VideoQACollator, VideoQADataset
from ..training.features import VideoFeatures, encode_files
from .labelled import LabelledQuestion, labelled_questions, sighting_tokens

EQUAL = 0.01  # the largest difference of recalls that are taken for the same
MOST = 20  # of the best heads that are summed


Questions = Sequence[LabelledQuestion]
# The mean share of a question's needle tokens among as many tokens with the most attention.
Recalls = dict[AttentionChoice, float]
Attention = dict[int, Tensor]  # [heads, M] of each layer


@dataclass(frozen=True)
class Calibration:
    """What [`calibrate`] has found."""

    # For attention distillation, what the sum over each finds in the half of the videos that did not choose it.
    choices: Recalls
    # For `selection="lm_attention"`, what the best heads of each layer find there; first that which a model reads
    # without this.
    readings: Recalls
    questions: tuple[int, int]  # how many were measured, and how many checked

    @property
    def best_reading(self) -> AttentionChoice:
        """The choice with the highest recall; among equals that with the shallowest layer."""
        highest = max(self.readings.values())
        least = highest - EQUAL
        good = [choice for choice, recall in self.readings.items() if recall >= least]
        return min(good, key=_layer)

    @property
    def best(self) -> AttentionChoice:
        """The choice with the highest recall, to 1%; among equals the first, which is of fewer heads."""
        return max(self.choices, key=lambda choice: round(self.choices[choice], 2))

    def attention_fields(self) -> dict:
        """The best reading as fields of `qtsplus_config`."""
        reading = self.best_reading
        heads = [head for _, head in reading.heads or ()]
        return {"attention_layer": _layer(reading), "attention_heads": heads}

    def fields(self) -> dict:
        """The best choice as fields of a recipe's `training` section; none if all heads are best."""
        best = self.best
        fields: dict = {}
        if best.heads is not None:
            fields["relevance_heads"] = list(map(list, best.heads))
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
    questions: Questions,
) -> Calibration:
    """
    Measures every head on one half of the videos, and the sums over the best of them on the other half;
    a `ValueError` for fewer than two videos that can be read. The model, whose selector takes no part, reads all visual
    tokens of a question and its true answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        videos = [question.video for question in questions]
        features = encode_files(model, processor, videos, folder)
        dataset = VideoQADataset([], processor, features=features)
        measured, checked = _halves(questions, features)
        choices: Recalls = {}
        for positions in ("answer", "question", "both"):
            heads = _single_heads(model, positions)
            recalls = measure_recalls(model, dataset, measured, heads)
            sums = [best_heads(recalls), AttentionChoice(positions=positions)]
            choices |= measure_recalls(model, dataset, checked, sums)
        heads = _single_heads(model, "prompt")
        recalls = measure_recalls(model, dataset, measured, heads)
        of_layers = _readings(recalls, model.config.text_config)
        readings = measure_recalls(model, dataset, checked, of_layers)
    counts = (len(measured), len(checked))
    return Calibration(choices, readings, counts)


def _halves(questions: Questions, features: VideoFeatures) -> list[Questions]:
    """The questions about every second video with features, and those about the others; says which are left out."""
    by_video: dict[tuple[str, float | None], list[LabelledQuestion]] = {}
    for question in questions:
        by_video.setdefault(question.video, []).append(question)
    unreadable = [video for video in by_video if not features.file(*video).exists()]
    for video in unreadable:
        del by_video[video]
    if unreadable:
        names = [name for name, _ in unreadable]
        console = Console(stderr=True)
        console.print(f"Left out, for they cannot be read: {listed(names)}.", markup=False)
    readable = list(by_video.values())
    if len(readable) < 2:
        raise ValueError(f"{len(readable)} of the videos can be read; expected two or more, to check with.")
    measured = list(chain.from_iterable(readable[::2]))
    checked = list(chain.from_iterable(readable[1::2]))
    return [measured, checked]


def _readings(recalls: Recalls, text_config) -> list[AttentionChoice]:
    """All heads of the default layer, and the best ones of every layer that a model can select by."""
    default = attention_layer(text_config)
    heads = range(text_config.num_attention_heads)
    pairs = product([default], heads)
    choices = [AttentionChoice(tuple(pairs), "prompt")]
    for layer in full_attention_layers(text_config):
        choices.append(best_heads(recalls, layer))
    return choices


def write_attention(folder: Path, calibration: Calibration) -> Path | None:
    """Writes the best reading into a model's config.json; `None` where there is no folder with a QTSplus model."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    content = read_json(path)
    if "qtsplus_config" not in content:
        return None
    selector = content["qtsplus_config"] | calibration.attention_fields()
    update_json(path, qtsplus_config=selector)
    return path


def measure_recalls(
    model,
    dataset: VideoQADataset,
    questions: Questions,
    choices: Sequence[AttentionChoice],
) -> Recalls:
    """The mean needle recall of the attention summed over each choice; all look from the same positions."""
    recalls = dict.fromkeys(choices, 0.0)
    for attention, shown in _attention_by_head(model, dataset, questions, choices[0].positions):
        for choice in choices:
            scores = _summed(attention, choice)
            recall = _recall(scores, shown)
            recalls[choice] += recall / len(questions)
    return recalls


def _single_heads(model, positions: str) -> list[AttentionChoice]:
    """Every head by itself."""
    config = model.config.text_config
    layers = full_attention_layers(config)
    heads = range(config.num_attention_heads)
    choices = []
    for pair in product(layers, heads):
        choice = AttentionChoice((pair,), positions)
        choices.append(choice)
    return choices


def _summed(attention: Attention, choice: AttentionChoice) -> Tensor:
    """`[M]`: the attention summed over the heads of a choice."""
    if choice.heads is None:
        return torch.cat(list(attention.values())).sum(0)
    weights = []
    for layer, head in choice.heads:
        of_layer = attention[layer]
        weights.append(of_layer[head])
    return torch.stack(weights).sum(0)


def _attention_by_head(
    model,
    dataset: VideoQADataset,
    questions: Questions,
    positions: str,
) -> Iterator[tuple[Attention, np.ndarray]]:
    """The attention `[heads, M]` of each layer, and the needles' tokens `[k]`, for every question."""
    collate = VideoQACollator(dataset.processor)
    choice = AttentionChoice(positions=positions)
    for question in logging.tqdm(questions, "Reading with all tokens", disable=None):
        inputs = collate([dataset.example(question.record)])
        del inputs["skipped"]
        del inputs["source_ids"]
        (grid,) = model.model.merged_grid(inputs["video_grid_thw"])
        seconds = float(inputs["second_per_grid_ts"][0])
        sightings = list(chain.from_iterable(question.needles))
        shown = sighting_tokens(sightings, grid, seconds)
        inputs = send_to_device(inputs, model.device)
        labels = inputs.pop("labels")
        (row,) = note_attention(model, inputs, labels, choice)
        yield row.by_head, shown


def _recall(scores: Tensor, shown: np.ndarray) -> float:
    """The share of the tokens `[k]` that show the answer among as many with the highest `scores` `[M]`."""
    best = scores.topk(len(shown)).indices
    kept = best.cpu().numpy()
    return float(np.isin(shown, kept).mean())


def _layer(choice: AttentionChoice) -> int:
    """The layer of a choice that has one."""
    assert choice.heads is not None
    layer, _ = choice.heads[0]
    return layer


def best_heads(recalls: Recalls, layer: int | None = None) -> AttentionChoice:
    """
    The sum of the best of the single heads, of a layer if one is given: those with the highest recall of tokens, at
    least half of the best one's; at most half of all.
    """
    single = sorted(recalls, key=recalls.__getitem__, reverse=True)
    if layer is not None:
        single = [choice for choice in single if _layer(choice) == layer]
    best = single[0]
    least = recalls[best] / 2
    half = max(1, len(single) // 2)
    most = min(MOST, half)
    heads: list[tuple[int, int]] = []
    for choice in single[:most]:
        if recalls[choice] >= least:
            heads += choice.heads or ()
    heads.sort()
    return replace(best, heads=tuple(heads))
