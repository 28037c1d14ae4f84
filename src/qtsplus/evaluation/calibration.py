"""
Which heads look at what an answer rests on, and not at what other questions about the same video ask for.

While the model answers and while it reads the question, for attention distillation; and from where the answer begins,
for `selection="lm_attention"`, where answers decide.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from ..asking.choice import Choice
from ..common.folders import read_json
from ..common.journals import write_json
from ..data.records import check_shown
from ..model.lm_attention_qtsplus import attention_layer, full_attention_layers
from ..model.sampling_qtsplus import Sampling
from ..training.attention import AttentionChoice, note_attention
from ..training.dataset import VideoQACollator, VideoQADataset, warn_skipped
from ..training.features import encode_files
from ..video.encoded import EncodedVideo, open_chunks, with_bar
from .evaluate import evaluate_records
from .labelled import LabelledQuestion, sighting_tokens
from .matching import gives_answer

MOST = 20  # of the best heads that are summed
LAYERS = 3  # of the best, whose answers are compared with those by the present setting
KEPT = 0.025  # the fraction of the visual tokens from which these answers are given

Questions = Sequence[LabelledQuestion]


@dataclass
class Finds:
    """
    What the k most attended tokens show, if k tokens show the answer. Means over questions.
    """

    own: float = 0.0  # the share that shows the answer
    other: float = 0.0  # the share that shows only what other questions about the video ask for

    @property
    def lead(self) -> float:
        """What the question decides: attention that ignores the question has a lead near 0."""
        return self.own - self.other

    def __str__(self) -> str:
        return f"own {self.own:.1%}, other {self.other:.1%}"


Found = dict[AttentionChoice, Finds]


@dataclass(frozen=True)
class Calibration:
    """What [`calibrate`] has found."""

    # For attention distillation, what each choice finds in the half of the videos by which it was not chosen.
    choices: Found
    # For `selection="lm_attention"`, what the present setting and the best layers find there, and how many of these
    # questions are answered right from the tokens that they choose.
    readings: Found
    right: dict[AttentionChoice, int]
    questions: tuple[int, int]  # how many were measured, and how many checked

    @property
    def best_reading(self) -> AttentionChoice:
        """The reading with the most right answers; among equals the earliest. The present setting comes first."""
        return max(self.right, key=self.right.__getitem__)

    @property
    def best(self) -> AttentionChoice:
        """The choice with the largest lead."""
        return _by_lead(self.choices)[0]


def attention_fields(reading: AttentionChoice) -> dict:
    """A reading as fields of `qtsplus_config`."""
    assert reading.heads is not None
    layers, heads = zip(*reading.heads, strict=True)
    return {"attention_layer": layers[0], "attention_heads": list(heads)}


def calibrate(
    model,
    processor,
    questions: Questions,
) -> Calibration:
    """
    Measures every head on one half of the videos. On the other half it measures the sums over the best heads, and has
    the questions answered from the tokens that the best layers choose by `lm_attention`. A `ValueError` for fewer than
    two videos that can be read, and for evidence at times that its video does not have. While heads are measured, the
    model reads all visual tokens and the true answer; afterwards `model.config` names the best reading.
    """
    config = model.config.text_config
    heads = range(config.num_attention_heads)
    all_heads = list(product(full_attention_layers(config), heads))
    selector = model.config.qtsplus_config
    present = product([attention_layer(config, selector.attention_layer)], selector.attention_heads or heads)
    with tempfile.TemporaryDirectory() as folder:
        videos = [question.video for question in questions]
        dataset = VideoQADataset([], processor, features=encode_files(model, processor, videos, folder))
        readable = [question for question in questions if not warn_skipped(dataset.example(question.record))]
        measured, checked = halves([with_edges(processor, question) for question in readable])

        def measure_single(positions: str) -> Found:
            single = [AttentionChoice((head,), positions) for head in all_heads]
            return measure_heads(model, dataset, measured, single)

        choices: Found = {}
        for positions in ("answer", "question", "both"):
            choices |= measure_heads(model, dataset, checked, [best_heads(measure_single(positions))])
        layers = [AttentionChoice(tuple(present), "prompt"), *_best_layers(measure_single("prompt"))]
        readings = measure_heads(model, dataset, checked, layers)
    right = {reading: count_right(model, processor, checked, reading) for reading in layers}
    result = Calibration(choices, readings, right, (len(measured), len(checked)))
    model.config.qtsplus_config.update(attention_fields(result.best_reading))
    return result


def count_right(
    model,
    processor,
    questions: Questions,
    reading: AttentionChoice,
) -> int:
    """How many questions are answered right from [`KEPT`] of the tokens, which `lm_attention` chooses by a reading."""
    model.config.qtsplus_config.update(attention_fields(reading))
    outcomes = evaluate_records(
        model,
        processor,
        [question.record for question in questions],
        choice=Choice(retention=KEPT, selection="lm_attention"),
        matcher=gives_answer,
    )
    return sum(outcome.correct for outcome in outcomes)


def with_edges(processor, question: LabelledQuestion) -> LabelledQuestion:
    """
    The question, with the times at which a player shows the steps of its video; a `ValueError` for evidence before the
    first frame or after the last.
    """
    video, fps = question.video
    chunks = open_chunks(processor, video, Sampling(fps=fps))
    check_shown(f"The evidence of {question.record.question!r} in {video}", question.sightings, chunks.about)
    steps = EncodedVideo(
        video=video,
        features=torch.empty(0),
        video_grid_thw=chunks.video_grid_thw,
        seconds_per_step=chunks.second_per_grid_ts[0],
        about=chunks.about,
        seconds=0.0,
    )
    return replace(question, edges=tuple(steps.edges))


def halves(questions: Questions) -> Sequence[Questions]:
    """The questions about every second video, and those about the others."""
    videos = list(dict.fromkeys(question.video for question in questions))
    if len(videos) < 2:
        raise ValueError(
            f"Videos with evidence that can be read: {len(videos)}; expected two or more, to check with. A record says "
            "as `evidence` when and where its answer can be seen."
        )
    return [[question for question in questions if question.video in half] for half in (videos[::2], videos[1::2])]


def _by_lead(found: Found) -> list[AttentionChoice]:
    """The choices, those with the largest lead first."""
    return sorted(found, key=lambda choice: found[choice].lead, reverse=True)


def _best_layers(single: Found) -> list[AttentionChoice]:
    """The best heads of the [`LAYERS`] layers whose best head has the largest lead."""
    by_layer: dict[int, Found] = {}
    for choice in _by_lead(single):
        layer = attention_fields(choice)["attention_layer"]
        by_layer.setdefault(layer, {})[choice] = single[choice]
    return [best_heads(found) for found in list(by_layer.values())[:LAYERS]]


def write_attention(folder: Path, calibration: Calibration) -> Path | None:
    """Writes the best reading into a model's config.json; `None` where there is no folder with a QTSplus model."""
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    if "qtsplus_config" not in config:
        return None
    config["qtsplus_config"] |= attention_fields(calibration.best_reading)
    write_json(path, config)
    return path


def measure_heads(
    model,
    dataset: VideoQADataset,
    questions: Questions,
    choices: Sequence[AttentionChoice],
) -> Found:
    """What the attention summed over each choice finds; all look from the same positions."""
    found = {choice: Finds() for choice in choices}
    for attention, shown, elsewhere in _attention_by_head(model, dataset, questions, choices[0].positions):
        for choice, finds in found.items():
            scores = torch.stack([attention[layer][head] for layer, head in choice.heads or ()]).sum(0)
            most = scores.topk(len(shown)).indices.cpu().numpy()
            finds.own += float(np.isin(most, shown).mean()) / len(questions)
            finds.other += float(np.isin(most, elsewhere).mean()) / len(questions)
    return found


def _attention_by_head(
    model,
    dataset: VideoQADataset,
    questions: Questions,
    positions: str,
) -> Iterator[tuple[dict[int, Tensor], np.ndarray, np.ndarray]]:
    """
    For every question the attention `[heads, M]` of each layer, the tokens `[k]` that show its answer, and those that
    show only what other questions about the video ask for.
    """
    collate = VideoQACollator(dataset.processor)
    choice = AttentionChoice(positions=positions)
    for question in with_bar(questions, "Reading with all tokens"):
        inputs = collate([dataset.example(question.record)])
        del inputs["skipped"], inputs["source_ids"]
        (grid,) = model.model.merged_grid(inputs["video_grid_thw"])
        shown = sighting_tokens(question.sightings, grid, question.edges)
        about = [seen for one in questions if one.video == question.video for seen in one.sightings]
        of_video = sighting_tokens(about, grid, question.edges)
        inputs = send_to_device(inputs, model.device)
        (row,) = note_attention(model, inputs, inputs.pop("labels"), choice)
        yield row.by_head, shown, np.setdiff1d(of_video, shown)


def best_heads(found: Found) -> AttentionChoice:
    """The sum of at most [`MOST`] single heads: those with the largest lead, each at least half of the best one's."""
    single = _by_lead(found)
    lead = found[single[0]].lead
    least = min(lead, lead / 2)  # a negative lead keeps only its equals
    best = [choice.heads or () for choice in single[:MOST] if found[choice].lead >= least]
    return replace(single[0], heads=tuple(sorted(chain.from_iterable(best))))
