"""
What a summary tells of filmed crowds, by ways and budgets: `python -m benchmarks.real.telling WORK MODEL OUT.json`.

Films are crowds of eight seconds, one after another, of which every frame is looked at; an event is a thing that comes.
It is told if the language model names it in the chapter in which it happens.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.clips import write_mp4

from qtsplus import VideoSession, encode, load
from qtsplus.asking.summaries import Summary, chapter_steps, summarise
from qtsplus.common.journals import write_json
from qtsplus.video.encoded import EncodedVideo

from ..world.scene import FPS
from .clips import CROWD_SECONDS, film_scene
from .words import NAMES
from .work import half_precision
from .world import Pictures

PROMPT = "Summarise the video."
BUDGETS = (64, 256, 1024)
WAYS = {"relevance": "qtsplus", "uniform": "uniform", "diversity": "diversity", "coverage": "coverage"}
PARTS = 8  # crowds in which no name comes twice
FILMS = {"32 s": (0.5, 4), "10 min": (9, 4), "60 min": (56, 3)}  # how many times [`PARTS`] crowds, and how many films
CHAPTER = 8.0  # seconds at most, or as many more as leave a token for each chapter
SEED = 40_000  # of films that nothing else shows
Event = tuple[str, np.ndarray]  # a name, and the tokens `[n]` that show it


def write_film(pictures: Pictures, path: Path, seed: int, blocks: float) -> list[Event]:
    """Renders a film into `path`, and gives its events in order."""
    events: list[Event] = []
    parts = [PARTS] * int(blocks) or [round(PARTS * blocks)]

    def frames() -> Iterator[np.ndarray]:
        for block, count in enumerate(parts):
            scene, seen, shown = film_scene(pictures, seed + block, "test", count)
            begun = block * shown.size
            own = [(thing.name, begun + np.flatnonzero(shown == k)) for k, thing in enumerate(scene.things)]
            events.extend(sorted(own, key=lambda event: event[1][0]))
            yield from seen

    if not path.is_file():
        write_mp4(path.with_suffix(".part.mp4"), frames(), FPS)
        path.with_suffix(".part.mp4").replace(path)
    else:
        list(frames())
    return events


def score(summary: Summary, events: list[Event], film: EncodedVideo) -> dict[str, float | None]:
    """
    The part of the events that the chapters tell in which they happen; of the pairs of those that come one after the
    other, the part that is told so, also of pairs in the same chapter; the part of what is named that is not in the
    chapter, and of what is named the part that the film shows at another time; and what the overview has of all names.
    """
    cells = len(film.features) // film.count
    told: list[tuple[int, int]] = []  # where each event is told, and its first step
    named = invented = mistimed = 0
    shown = {name for name, _ in events}
    found = set[int]()
    for chapter, own in enumerate(summary.chapters):
        first, last = film.within(own.start, own.end)
        said = _names(own.text)
        here = {place: name for place, (name, tokens) in enumerate(events) if _within(tokens // cells, first, last)}
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
    joined = _names(summary.overview or "")
    return {
        "told": len(found) / len(events),
        "order": float(np.mean(pairs)) if pairs else None,
        "order within chapters": float(np.mean(within)) if within else None,
        "invented": invented / max(1, named),
        "at another time": mistimed / max(1, named),
        "names in the overview": len(set(joined) & shown) / len(shown),
    }


def _within(steps: np.ndarray, first: int, last: int) -> bool:
    return bool(((steps >= first) & (steps < last)).any())


def _names(text: str) -> list[str]:
    """The things that a text names, each once, in its order."""
    found = re.findall(rf"\b({'|'.join(sorted(NAMES, key=len, reverse=True))})\b", text.lower())
    return list(dict.fromkeys(found))


class Film:
    """An encoded film of which the events are known."""

    def __init__(self, model: Any, processor: Any, path: Path, events: list[Event], seconds: int):
        self.video, self.events = encode(model, processor, path, max_frames=seconds * FPS), events
        self.session = VideoSession(model, processor)
        self.session.add(self.video, "film")

    def told(self, way: str, budget: int) -> dict[str, float | None]:
        """With the budget shared out among the chapters, of which there are no more than tokens."""
        longest = CHAPTER
        while (chapters := len(list(chapter_steps(self.video, longest)))) > budget:
            longest *= 1.1
        choice = {"max_visual_tokens": budget // chapters, "retention": 1.0, "selection": WAYS[way]}
        return {"chapters": chapters, **self.summarised(longest, **choice)}

    def summarised(self, longest: float = CHAPTER, **choice: Any) -> dict[str, float | None]:
        summary = summarise(self.session, PROMPT, chapter_seconds=longest, max_new_tokens=80, **choice)
        return score(summary, self.events, self.video)


def run_telling(work: Path, folder: str, out: Path, lengths: list[str], budgets: list[float]) -> None:
    """Writes figures of each film; what `out` has is not measured again."""
    model, processor = load(folder)
    pictures = Pictures(work)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    (work / "films").mkdir(exist_ok=True)

    def note(name: str, measure: Callable[..., Any], *given: Any, **choice: Any) -> None:
        if name not in result:
            with half_precision():
                result[name] = measure(*given, **choice)
            write_json(out, result)
            print(name, result[name], flush=True)

    for length in lengths:
        blocks, count = FILMS[length]
        for number in range(count):
            path = work / f"films/{length.replace(' ', '')}-{number}.mp4"
            events = write_film(pictures, path, SEED + 1000 * list(FILMS).index(length) + 100 * number, blocks)
            seconds = round(blocks * PARTS * CROWD_SECONDS)
            film, name = Film(model, processor, path, events, seconds), f"{length}, {number}"
            tokens = len(film.video.features)
            if film.video.count != seconds * FPS // 2:
                raise ValueError(f"{path} has {film.video.count} steps, {seconds * FPS // 2} are drawn: remove it.")
            result[name] = {
                "events": len(events),
                "chapters": len(list(chapter_steps(film.video, CHAPTER))),
                "tokens": tokens,
            }
            for budget in (int(size) for size in budgets if size < tokens):
                for way in WAYS:
                    note(f"{name}: {way}, {budget} told", film.told, way, budget)
            if math.inf in budgets:
                note(f"{name}: all told", film.summarised, selection="all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--film", action="append", choices=list(FILMS))
    parser.add_argument("--budget", action="append", type=float, help="tokens of a film, inf for all of them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run_telling(given.work, given.model, given.out, given.film or list(FILMS), given.budget or [*BUDGETS, math.inf])


if __name__ == "__main__":
    main()
