"""Needles in a long video: a clip or frame, put at chosen depths into backgrounds of chosen lengths, and asked for.

The background is encoded once, for the longest length, and so is every needle. A shorter background is the beginning of
the longest. A needle takes the place of as many steps of the grid as it has itself. Frames of one step see those of no
other, so the features are those of a video that was cut that way.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from qtsplus.asking.session import encode
from qtsplus.common.files import check_output
from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.labelled import LabelledQuestion, sighting_tokens
from qtsplus.model.methods_qtsplus import METHODS
from qtsplus.video.storage import digest_of

from ..exact_match import answer, conversation
from ..files import begin, finish, save_figure
from ..intervals import percent_interval, share_interval
from ..tables import markdown_table

# Keeping everything says what the language model can read, and takes long.
SELECTIONS = tuple(name for name in METHODS if name != "all")
_MAX_FRAMES = 10**6  # no background is too long
_MEASURES = {"share": "needle tokens kept", "correct": "right answers"}


@dataclass(frozen=True)
class Clip:
    """A needle: its features `[m, d]`, and which of its tokens `[k]` show what is asked for."""

    features: torch.Tensor
    tokens: np.ndarray


def run_needle(
    model: Any,
    processor: Any,
    needles: Sequence[LabelledQuestion],
    background: str,
    out: Path,
    *,
    lengths: Sequence[float],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    selections: Sequence[str] = SELECTIONS,
    retention: float | None = None,
    max_visual_tokens: int | None = None,
    fps: float | None = None,
    progress: bool = True,
) -> Path:
    """
    Asks for every needle at every length and depth, once per selection: `needle.json`, `.md` and `.png`. What an
    interrupted run has asked is not asked again.

    Args:
        needles: what is hidden and asked for: the video of each is a clip or an image. What counts as found are the
            tokens of its needles, or all of the clip where none are known.
        background: a video file, an address, or a folder of frames; at least as long as the longest length.
        lengths, depths, selections: of the videos in seconds, of the needles in them from 0 to 1, and names of methods.
        retention: fraction of the visual tokens to keep; the model's own budget if `None`.
        max_visual_tokens: exactly so many instead, as far as there are so many.
        fps: frames to look at per second, of the background and the clips; of a folder, the rate of its frames.

    Raises:
        ValueError: a selection, length or depth out of its range, a video that cannot be read, a background shorter
            than a length, or a needle longer than one.
    """
    check_places(lengths, depths, selections)
    target = check_output(out / "needle.json")
    most: dict[str, Any] = {} if Path(background).is_dir() else {"max_frames": _MAX_FRAMES}  # or all of a folder
    opened = processor.video_chunks(background, fps=fps, **most)  # nothing is decoded yet
    total, *size = opened.video_grid_thw[0].tolist()
    seconds, (cells,) = opened.second_per_grid_ts[0], model.model.merged_grid(torch.tensor([[1, *size]]))
    if round(max(lengths) / seconds) > total:
        raise ValueError(f"The background has {total * seconds:g} s; expected at least the length, {max(lengths):g} s.")
    clips = [_encode_clip(model, processor, needle, size, fps) for needle in needles]
    longest, per_step = max(len(clip.features) for clip in clips), int(np.prod(cells))
    if round(min(lengths) / seconds) * per_step < longest:
        raise ValueError(
            f"A length of {min(lengths):g} s is shorter than a needle of {longest // per_step * seconds:g} s: ask for "
            "longer videos, or give shorter clips."
        )
    haystack = encode(model, processor, background, fps=fps, **most, device="cpu", progress=progress)
    call: dict[str, Any] = {"retention": retention, "max_visual_tokens": max_visual_tokens}
    features = [_digest(one) for one in (haystack.features, *(clip.features for clip in clips))]
    made_from = {"model": digest_of(model.state_dict(), model.config.to_dict()), "features": features}
    journal = begin(out / ".needle.jsonl", {**call, **made_from, "needles": [asdict(one) for one in needles]})
    asked, answers = list(product(lengths, enumerate(needles))), []
    for length, (number, needle) in track(asked, "Asking", console=Console(stderr=True), disable=not progress):
        steps = round(length / seconds)
        prompt = _prompt(processor, needle.record, torch.tensor([[steps, *size]]), seconds)
        for selection, depth in product(selections, depths):
            key = f"{length:g}/{number}/{depth:g}/{selection}"
            if key not in journal.done:
                video, start = hide(haystack.features[: steps * per_step], clips[number].features, depth, per_step)
                inputs = {**prompt, "video_features": [video]}
                shown = start + clips[number].tokens
                journal.add(key, _ask(model, processor, inputs, needle.record, shown, _call(selection, **call)))
            place = {"selection": selection, "length": length, "depth": depth, "needle": number}
            answers.append({**place, **journal.done[key]})
    document: dict[str, Any] = {
        "settings": {**call, "needles": len(needles), "seconds_per_step": seconds, "tokens_per_step": per_step},
        "cells": _summed(answers, "selection", "length", "depth"),
        "lengths": _summed(answers, "selection", "length"),
    }
    target.with_suffix(".md").write_text("\n".join(_page(document)) + "\n", encoding="utf-8")
    save_figure(_draw(document["cells"]), target.with_suffix(""))
    return finish(journal, target, document)


def hide(video: torch.Tensor, clip: torch.Tensor, depth: float, per_step: int) -> tuple[torch.Tensor, int]:
    """Features `[M, d]` with a clip at a depth from 0, the beginning, to 1, the end; and its first token."""
    start = round(depth * (len(video) - len(clip)) / per_step) * per_step
    return torch.cat([video[:start], clip, video[start + len(clip) :]]), start


def _encode_clip(model: Any, processor: Any, needle: LabelledQuestion, size: Sequence[int], fps: float | None) -> Clip:
    """With frames as large as the background's, and at its rate."""
    record = needle.record
    chunks = processor.video_chunks(str(record.video), fps=record.fps if record.fps is not None else fps, min_frames=1)
    frames = np.stack(list(chunks.decode()))
    pixels, patches = processor.preprocess_frames(frames, torch.tensor([[len(frames), *size]]))
    (features,) = model.encode_videos(pixels, patches, device="cpu")
    (grid,) = model.model.merged_grid(patches)
    seen = [sighting for alternatives in needle.needles for sighting in alternatives]
    shown = sighting_tokens(seen, grid, chunks.second_per_grid_ts[0]) if seen else np.arange(len(features))
    return Clip(features, shown)


def _digest(features: torch.Tensor) -> str:
    return hashlib.sha256(features.float().numpy().tobytes()).hexdigest()


def _prompt(processor: Any, record: VideoRecord, grid: torch.Tensor, seconds: float) -> dict[str, Any]:
    times = {"video_grid_thw": grid, "second_per_grid_ts": torch.tensor([seconds])}
    query = record.query or record.question
    return {**processor.conversation_inputs([conversation(record.question)], query=query, **times), **times}


def _ask(
    model: Any, processor: Any, inputs: Mapping[str, Any], record: VideoRecord, shown: np.ndarray, call: dict[str, Any]
) -> dict[str, Any]:
    """Whether the answer is right, and which share was kept of the tokens that show it."""
    torch.manual_seed(0)  # of selection="random"
    limit = len(processor.text_ids(record.answer)) + 2
    (text,), chosen = answer(model, processor, inputs, limit, **call)
    kept = chosen.kept_indices[0].cpu().numpy()
    counts = {"kept": len(kept), "visual_tokens": len(inputs["video_features"][0])}
    return {"correct": text == record.answer, "share": float(np.isin(shown, kept).mean()), **counts}


def _call(selection: str, retention: float | None, max_visual_tokens: int | None) -> dict[str, Any]:
    """What a selection is called with; the same number of tokens for all, except the one that keeps everything."""
    if selection == "all":
        return {"selection": selection}
    if max_visual_tokens is not None:
        return {"selection": selection, "retention": 1.0, "max_visual_tokens": max_visual_tokens}
    return {"selection": selection, "retention": retention}


def check_places(lengths: Sequence[float], depths: Sequence[float], selections: Sequence[str]) -> None:
    """Raises `ValueError` for lengths in seconds, depths or selections out of their range."""
    for name, values in (("length", lengths), ("depth", depths), ("selection", selections)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"Got {name}s {list(values)}; expected at least one, and each once.")
    if not all(0 < length < float("inf") for length in lengths) or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(
            f"Got lengths {list(lengths)} and depths {list(depths)}; expected finite numbers of seconds above 0, and "
            "shares of the video from 0 to 1."
        )
    if set(selections) - set(METHODS):
        raise ValueError(f"Got the selections {list(selections)}; expected some of {', '.join(METHODS)}.")


def _summed(answers: Sequence[Mapping[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Means of the answers that share what is named. One needle is asked for often, so intervals are over needles."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for one in answers:
        groups.setdefault(tuple(one[name] for name in names), []).append(one)
    rows = []
    for key, group in groups.items():
        needles = np.array([one["needle"] for one in group])
        values = {name: np.array([one[name] for one in group], dtype=float) for name in (*_MEASURES, "kept")}
        rows.append(
            {
                **dict(zip(names, key, strict=True)),
                **{name: float(column.mean()) for name, column in values.items()},
                "visual_tokens": group[0]["visual_tokens"],
                "intervals": {name: share_interval(values[name], needles) for name in _MEASURES},
            }
        )
    return sorted(rows, key=lambda row: list(METHODS).index(row["selection"]))


def _page(document: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            row["selection"],
            f"{row['length']:g} s",
            f"{row['kept']:.0f} of {row['visual_tokens']}",
            *(percent_interval(row[name], row["intervals"][name]) for name in _MEASURES),
        ]
        for row in document["lengths"]
    ]
    settings = ", ".join(f"{name} {value}" for name, value in document["settings"].items())
    table = markdown_table(["selection", "length", "tokens kept", *_MEASURES.values()], rows)
    return [f"Means over needles and depths: {settings}. Intervals: 95%, over needles.", "", *table]


def _draw(cells: Sequence[Mapping[str, Any]]) -> Figure:
    """A heat map for each measure, row by row, and selection."""
    lengths, depths, selections = (
        list(dict.fromkeys(cell[name] for cell in cells)) for name in ("length", "depth", "selection")
    )
    found = {(cell["selection"], cell["length"], cell["depth"]): cell for cell in cells}
    size = (1.2 + len(selections) * (0.9 + 0.42 * len(lengths)), 2.4 + 0.68 * len(depths))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(2, len(selections), squeeze=False, sharex=True, sharey=True)
    for row, (measure, title) in zip(panels, _MEASURES.items(), strict=True):
        for axes, selection in zip(row, selections, strict=True):
            values = [[100 * found[selection, length, depth][measure] for length in lengths] for depth in depths]
            image = axes.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
            axes.set_title(selection.replace("_", " "), fontsize=9)
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            axes.set_xticks(range(len(lengths)), [f"{length:g} s" for length in lengths], rotation=60, fontsize=7)
        row[0].set_ylabel(f"{title}, %\ndepth", fontsize=9)
        figure.colorbar(image, ax=list(row), fraction=0.02)
    return figure
