"""
What `qtsplus summarise` says of filmed crowds: `python -m benchmarks.real.telling WORK MODEL OUT.json`.

Videos are crowds of eight seconds, one after another; an event is a thing that comes. It is told if the language model
names it in a chapter in which it is shown.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.clips import write_mp4
from typer.testing import CliRunner

from qtsplus.cli import app
from qtsplus.common.journals import write_json

from ..world.scene import FPS
from .clips import CROWD_SECONDS, film_scene
from .words import NAMES
from .world import Pictures

OPTIONS = (
    "",
    "--selection uniform",
    "--selection all",
    "--max-visual-tokens 64",
    "--max-visual-tokens 64 --selection uniform",
)
PARTS = 8  # crowds in which no name comes twice
VIDEOS = {"32 s": (0.5, 4), "10 min": (9, 4)}  # how many times [`PARTS`] crowds, and how many videos
STEP = 2 / FPS  # seconds of a step of the grid
SEED = 40_000  # of videos that nothing else shows
Event = tuple[str, np.ndarray]  # a name, and the steps `[n]` that show it


def write_video(pictures: Pictures, path: Path, seed: int, blocks: float) -> list[Event]:
    """Renders a video into `path`, and gives its events in order."""
    events: list[Event] = []
    parts = [PARTS] * int(blocks) or [round(PARTS * blocks)]

    def frames() -> Iterator[np.ndarray]:
        for block, count in enumerate(parts):
            scene, seen, shown = film_scene(pictures, seed + block, "test", count)
            begun = block * len(shown)
            own = [(thing.name, begun + np.nonzero(shown == k)[0]) for k, thing in enumerate(scene.things)]
            events.extend(sorted(own, key=lambda event: event[1][0]))
            yield from seen

    write_mp4(path, frames(), FPS)
    return events


def score(summary: Mapping[str, Any], events: list[Event]) -> dict[str, float | None]:
    """
    The part of the events that the chapters tell in which they happen; of the pairs of those that come one after the
    other, the part that is told so, also of pairs in the same chapter; the part of what is named that is not in the
    chapter, and of what is named the part that the video shows at another time; and what the overview has of all names.
    """
    told: list[tuple[int, int]] = []  # where each event is told, and its first step
    named = invented = mistimed = 0
    shown = {name for name, _ in events}
    found = set[int]()
    for chapter, own in enumerate(summary["chapters"]):
        first, last = round(own["start"] / STEP), round(own["end"] / STEP)
        said = _names(own["text"])
        here = {place: name for place, (name, steps) in enumerate(events) if _within(steps, first, last)}
        wrong = set(said) - set(here.values())
        named += len(said)
        invented += len(wrong)
        mistimed += len(wrong & shown)
        for place in set(here) - found:
            if here[place] in said:
                found.add(place)
                told.append((chapter * 1000 + said.index(here[place]), int(events[place][1][0])))
    pairs = []
    within = []
    for a, b in combinations(told[:500], 2):
        if a[0] != b[0] and a[1] != b[1]:
            right = (a[0] < b[0]) == (a[1] < b[1])
            pairs.append(right)
            if a[0] // 1000 == b[0] // 1000:
                within.append(right)
    overview = _names(summary["overview"] or "")
    return {
        "told": len(found) / len(events),
        "omission": 1 - len(found) / len(events),
        "order": float(np.mean(pairs)) if pairs else None,
        "order within chapters": float(np.mean(within)) if within else None,
        "hallucination": invented / max(1, named),
        "at another time": mistimed / max(1, named),
        "names in the overview": len(set(overview) & shown) / len(shown),
    }


def _within(steps: np.ndarray, first: int, last: int) -> bool:
    return bool(((steps >= first) & (steps < last)).any())


def _names(text: str) -> list[str]:
    """The things that a text names, each once, in its order."""
    found = re.findall(rf"\b({'|'.join(sorted(NAMES, key=len, reverse=True))})\b", text.lower())
    return list(dict.fromkeys(found))


def summarised(path: Path, model: str, options: str) -> dict[str, Any]:
    """What the command prints."""
    line = ["summarise", str(path), "--model", model, "--json", *options.split()]
    return json.loads(CliRunner().invoke(app, line, catch_exceptions=False).stdout)


def run_telling(work: Path, model: str, out: Path, lengths: list[str], choices: list[str]) -> None:
    """Writes figures of each video; what `out` has is not measured again."""
    pictures = Pictures(work)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    (work / "films").mkdir(exist_ok=True)
    for number in range(max(VIDEOS[length][1] for length in lengths)):
        for length in lengths:
            blocks, _ = VIDEOS[length]
            path = work / f"films/{length.replace(' ', '')}-{number}.mp4"
            events = write_video(pictures, path, SEED + 1000 * list(VIDEOS).index(length) + 100 * number, blocks)
            every_frame = f"--max-frames {round(blocks * PARTS * CROWD_SECONDS * FPS)}" if blocks > 1 else ""
            for options in choices:
                name = f"{length}, {number}: {options or 'no options'}"
                if name not in result:
                    summary = summarised(path, model, f"{options} {every_frame}")
                    kept = sum(chapter["kept_tokens"] for chapter in summary["chapters"])
                    counts = {"events": len(events), "chapters": len(summary["chapters"]), "kept tokens": kept}
                    result[name] = counts | {"overview": summary["overview"]} | score(summary, events)
                    write_json(out, result)
                    print(name, result[name], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--video", action="append", choices=list(VIDEOS))
    parser.add_argument("--options", action="append", help="as in OPTIONS")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run_telling(given.work, given.model, given.out, given.video or list(VIDEOS), given.options or list(OPTIONS))


if __name__ == "__main__":
    main()
