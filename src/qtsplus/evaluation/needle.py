"""Needles in a long video: a clip or frame, put at chosen depths into backgrounds of chosen lengths, and asked for.

The background is encoded once, for the longest length, and so is every needle. A shorter background is the beginning of
the longest. A needle takes the place of as many steps of the grid as it has itself. Frames of one step see those of no
other, so the features are those of a video that was cut that way.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from ..data.records import VideoRecord
from ..figures import save_figure
from ..methods_qtsplus import METHODS
from ..output import check_folder, check_output, markdown_table
from ..results import Journal, environment, steps
from ..session import encode
from ..training.features import features_of, fingerprint, write_tensors
from .baselines import read_at
from .exact_match import answer, conversation
from .intervals import percent, percent_interval, share_interval
from .labelled import LabelledQuestion

# Keeping everything says what the language model can read, and takes long.
SELECTIONS = tuple(name for name in METHODS if name != "all")
_MAX_FRAMES = 10**6  # no background is too long
_MEASURES = {"found": "found", "share": "share", "accuracy": "correct"}  # of a table, from which field of an answer
_MAPS = {"share": "needle tokens kept", "accuracy": "right answers"}


@dataclass(frozen=True)
class Encoded:
    """
    A video as visual tokens.

    Args:
        features: `[M, d]`.
        grid: `[1, 3]` in patches.
        seconds: of a step of the grid.
    """

    features: torch.Tensor
    grid: torch.Tensor
    seconds: float

    @property
    def steps(self) -> int:
        return int(self.grid[0, 0])

    @property
    def tokens_per_step(self) -> int:
        return len(self.features) // self.steps

    def first(self, count: int) -> "Encoded":
        """Its beginning, `count` steps long."""
        height, width = self.grid[0, 1:].tolist()
        return replace(
            self, features=self.features[: count * self.tokens_per_step], grid=torch.tensor([[count, height, width]])
        )

    def hide(self, needle: "Encoded", depth: float) -> tuple[torch.Tensor, int]:
        """Features with the needle at a depth from 0, the beginning, to 1, the end; and its first token."""
        start = round(depth * (self.steps - needle.steps)) * self.tokens_per_step
        parts = self.features[:start], needle.features, self.features[start + len(needle.features) :]
        return torch.cat(parts), start


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
    work: Path = Path("runs/needle"),
    command: str = "",
    name: str = "videos",
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """
    Asks for every needle at every length and depth, once per selection: `needle-NAME.json`, `.md` and `.png`. An
    interrupted run goes on where it stopped.

    Args:
        needles: what is hidden and asked for: the video of each is a clip or an image. What counts as found are the
            tokens of its needles, or all of the clip where none are known.
        background: a video file, an address, or a folder of frames; at least as long as the longest length.
        lengths, depths, selections: of the videos in seconds, of the needles in them from 0 to 1, and names of methods.
        retention: fraction of the visual tokens to keep; the model's own budget if `None`.
        max_visual_tokens: exactly so many instead, as far as there are so many.
        fps: frames to look at per second, of the background and the clips; of a folder, the rate of its frames.
        work: where the background's features are kept.
        command: what was typed, for the record.
        say: hears what is odd about the background.

    Raises:
        ValueError: a selection, length or depth out of its range, a video that cannot be read, a background shorter
            than a length, or a needle longer than one.
    """
    check_places(lengths, depths, selections)
    target = check_output(out / f"needle-{name}.json")
    check_folder(work)
    opened = processor.video_chunks(background, fps=fps, max_frames=_MAX_FRAMES)  # nothing is decoded yet
    grid, seconds = opened.video_grid_thw, opened.second_per_grid_ts[0]
    warnings = _shrunk(processor, background, grid)
    for warning in warnings:
        say(warning)
    if round(max(lengths) / seconds) > grid[0, 0]:
        raise ValueError(
            f"The background has {int(grid[0, 0]) * seconds:g} s; expected at least the {max(lengths):g} s that were "
            "asked for."
        )
    clips = [_encode_needle(model, processor, needle.record, grid, seconds, fps) for needle in needles]
    longest = max(clip.steps for clip in clips)
    if round(min(lengths) / seconds) < longest:
        raise ValueError(
            f"A length of {min(lengths):g} s is shorter than a needle of {longest * seconds:g} s: ask for longer "
            "videos, or give shorter clips."
        )
    haystack = _encode_background(model, processor, background, fps, work, progress)
    videos = {length: haystack.first(round(length / seconds)) for length in lengths}
    call = {"retention": retention, "max_visual_tokens": max_visual_tokens}
    hidden = [asdict(needle) for needle in needles]
    clip_digests = [_digest(clip) for clip in clips]
    made_from = {"model": fingerprint({"model": model}, model.config.to_dict()), "background": _digest(haystack)}
    journal = Journal(out / f".needle-{name}.jsonl", {**call, **made_from, "needles": hidden, "clips": clip_digests})
    hunt = _Hunt(model, processor, journal, call)
    answers = []
    with steps("needle", len(lengths) * len(needles), progress) as step:
        for length, (number, needle) in product(lengths, enumerate(needles)):
            for depth, selection in product(depths, selections):
                key = f"{length:g}/{number}/{depth:g}/{selection}"
                hunt.ask(key, videos[length], needle, clips[number], depth, selection)
                place = {"selection": selection, "length": length, "depth": depth, "needle": number}
                answers.append({**place, **journal.done[key]})
            step(f"{length:g} s, needle {number + 1} of {len(needles)}")
    answers.sort(key=lambda one: selections.index(one["selection"]))
    document = {
        "command": command,
        "environment": environment(str(model.device)),
        "warnings": warnings,
        "settings": {
            **call,
            "needles": len(needles),
            "seconds_per_step": haystack.seconds,
            "tokens_per_step": haystack.tokens_per_step,
            "lengths": list(lengths),
            "depths": list(depths),
            "selections": list(selections),
        },
        "cells": _summed(answers, "selection", "length", "depth"),
        "lengths": _summed(answers, "selection", "length"),
    }
    target.with_suffix(".md").write_text("\n".join(_page(document)) + "\n", encoding="utf-8")
    save_figure(_draw(document), target.with_suffix(""))
    return journal.finish(target, document)


# --- Videos ---


def _shrunk(processor: Any, video: str, grid: torch.Tensor) -> list[str]:
    """What is to be said of frames that are smaller than in a short video; of a folder that is not known."""
    if Path(video).is_dir():
        return []
    short = processor.video_chunks(video, num_frames=4).video_grid_thw
    if torch.equal(short[0, 1:], grid[0, 1:]):
        return []
    here, there = (" x ".join(map(str, one[0, 1:].tolist())) for one in (grid, short))
    return [
        f"The background is so long that its frames have {here} patches; those of a short video have {there}. Ask for "
        "shorter videos or fewer frames per second to see them as large."
    ]


def _encode_background(
    model: Any, processor: Any, video: str, fps: float | None, work: Path, progress: bool
) -> Encoded:
    """The whole background, from the disk where it was encoded before."""
    file = features_of(model, processor, work, {"max_frames": _MAX_FRAMES}).file(video, fps)
    if not file.exists():
        encoded = encode(model, processor, video, fps=fps, max_frames=_MAX_FRAMES, device="cpu", progress=progress)
        tensors = {
            "video_features": encoded.features,
            "video_grid_thw": encoded.video_grid_thw,
            "second_per_grid_ts": torch.tensor(encoded.second_per_grid_ts),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(file, tensors)
    tensors = load_file(file)
    return Encoded(tensors["video_features"], tensors["video_grid_thw"], float(tensors["second_per_grid_ts"][0]))


def _encode_needle(
    model: Any, processor: Any, record: VideoRecord, grid: torch.Tensor, seconds: float, fps: float | None
) -> Encoded:
    """A clip with frames as large as the background's, and at its rate."""
    rate = record.fps if record.fps is not None else fps
    pixels = read_at(processor, str(record.video), grid[0, 1:].tolist(), fps=rate, min_frames=1)
    (features,) = model.encode_videos(pixels["pixel_values_videos"], pixels["video_grid_thw"], device="cpu")
    return Encoded(features, pixels["video_grid_thw"], seconds)


def _digest(video: Encoded) -> str:
    return hashlib.sha256(video.features.float().numpy().tobytes()).hexdigest()


# --- Asking ---


class _Hunt:
    """Every question once."""

    def __init__(self, model: Any, processor: Any, journal: Journal, call: Mapping[str, Any]):
        self.model, self.processor, self.journal, self.call = model, processor, journal, call
        # Of an hour, a prompt has so many placeholders that it takes seconds to make.
        self._prompt = lru_cache(maxsize=1)(self._make_prompt)

    def _make_prompt(self, record: VideoRecord, num_steps: int, height: int, width: int, seconds: float) -> dict:
        times = {
            "video_grid_thw": torch.tensor([[num_steps, height, width]]),
            "second_per_grid_ts": torch.tensor([seconds]),
        }
        query = record.query or record.question
        return {**self.processor.conversation_inputs([conversation(record.question)], query=query, **times), **times}

    def ask(
        self, key: str, video: Encoded, needle: LabelledQuestion, clip: Encoded, depth: float, selection: str
    ) -> None:
        """One needle at one depth, with one selection, unless that has been done."""
        if key in self.journal.done:
            return
        record = needle.record
        features, start = video.hide(clip, depth)
        inputs = {**self._prompt(record, *video.grid[0].tolist(), video.seconds), "video_features": [features]}
        torch.manual_seed(0)  # of selection="random"
        limit = len(self.processor.text_ids(record.answer)) + 2
        (said,), chosen = answer(self.model, self.processor, inputs, limit, **_call(selection, **self.call))
        kept = chosen.kept_indices[0].cpu().numpy()
        shown = start + self._tokens(needle, clip)
        share = float(np.isin(shown, kept).mean())
        counts = {"kept": len(kept), "visual_tokens": len(features)}
        self.journal.add(key, {"correct": said == record.answer, "share": share, "found": share > 0, **counts})

    def _tokens(self, needle: LabelledQuestion, clip: Encoded) -> np.ndarray:
        """`[k]`: of the clip's tokens, those that show what is asked for."""
        if not needle.needles:
            return np.arange(len(clip.features))
        (grid,) = self.model.model.merged_grid(clip.grid)
        return needle.tokens(grid, clip.seconds)


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
    for length in lengths:
        if not 0 < length < float("inf"):
            raise ValueError(f"A length is {length:g}; expected a finite number of seconds above 0.")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"A depth is {depth:g}; expected a share of the video, from 0 to 1.")
    if set(selections) - set(METHODS):
        raise ValueError(f"Got the selections {list(selections)}; expected some of {', '.join(METHODS)}.")


# --- The page and the figure ---


def _summed(answers: Sequence[Mapping[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Means of the answers that share what is named. One needle is asked for often, so intervals are over needles."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for one in answers:
        groups.setdefault(tuple(one[name] for name in names), []).append(one)
    rows = []
    for key, group in groups.items():
        needles = np.array([one["needle"] for one in group])
        values = {title: np.array([one[name] for one in group], dtype=float) for title, name in _MEASURES.items()}
        rows.append(
            {
                **dict(zip(names, key, strict=True)),
                **{title: float(shares.mean()) for title, shares in values.items()},
                "kept": float(np.mean([one["kept"] for one in group])),
                "visual_tokens": group[0]["visual_tokens"],
                "intervals": {title: share_interval(shares, needles) for title, shares in values.items()},
            }
        )
    return rows


def _page(document: Mapping[str, Any]) -> list[str]:
    settings = document["settings"]
    tokens, share = settings["max_visual_tokens"], settings["retention"]
    budget = f"{tokens} visual tokens kept" if tokens is not None else "the model's own budget"
    budget = f"{percent(share)} of the visual tokens kept" if tokens is None and share is not None else budget
    depths = ", ".join(f"{depth:g}" for depth in settings["depths"])
    rows = [
        [
            row["selection"],
            time_of(row["length"]),
            f"{row['kept']:.0f} of {row['visual_tokens']}",
            *(percent_interval(row[name], row["intervals"][name]) for name in _MEASURES),
        ]
        for row in document["lengths"]
    ]
    columns = ["selection", "length", "tokens kept", "needles found", *_MAPS.values()]
    return [
        f"{settings['needles']} needles, each at the depths {depths}: {settings['needles'] * len(settings['depths'])} "
        f"questions in every row; {budget}. A needle is found where one of its tokens is kept. A step of the video is "
        f"{settings['seconds_per_step']:g} s and has {settings['tokens_per_step']} tokens. Intervals: 95%, over "
        "needles.",
        *(line for warning in document["warnings"] for line in ("", warning)),
        "",
        f"`{document['command']}`",
        "",
        *markdown_table(columns, rows),
    ]


def time_of(seconds: float) -> str:
    """A length as people say it."""
    if seconds < 120:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} min"


def _draw(document: Mapping[str, Any]) -> Figure:
    """A heat map for each measure, row by row, and selection."""
    settings = document["settings"]
    lengths, depths, selections = (settings[name] for name in ("lengths", "depths", "selections"))
    cells = {(cell["selection"], cell["length"], cell["depth"]): cell for cell in document["cells"]}
    size = (1.2 + len(selections) * (0.9 + 0.42 * len(lengths)), 1.0 + len(_MAPS) * (0.7 + 0.34 * len(depths)))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(_MAPS), len(selections), squeeze=False, sharex=True, sharey=True)
    for row, (measure, title) in zip(panels, _MAPS.items(), strict=True):
        for axes, selection in zip(row, selections, strict=True):
            values = np.array([[cells[selection, length, depth][measure] for length in lengths] for depth in depths])
            image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            for place, value in np.ndenumerate(values):
                colour = "white" if value < 0.6 else "black"
                axes.text(place[1], place[0], f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=7)
            axes.set_title(selection.replace("_", " "), fontsize=9)
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            axes.set_xticks(range(len(lengths)), map(time_of, lengths), rotation=60, fontsize=7)
        row[0].set_ylabel(f"{title}, %\ndepth", fontsize=9)
        figure.colorbar(image, ax=list(row), fraction=0.02)
    for axes in panels[-1]:
        axes.set_xlabel("length of the video", fontsize=8)
    return figure
