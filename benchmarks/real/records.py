"""Clips as mp4 files with records of questions, as `qtsplus train`, `calibrate` and `eval records` read them."""

import json
from pathlib import Path
from typing import Any

from qtsplus.output import whole_file

from ..world.clip import write_mp4
from ..world.scene import FPS
from .clips import clip_scene
from .questions import ask_scene
from .world import Pictures, Scene, Thing

FIRST = {"train": 1_000_000, "validation": 0, "test": 0}  # the train records' clips are none that the base learned from


def write_records(
    work: Path, out: Path, split: str, clips: int, seconds: int = 8, questions: int = 4, held_out: bool = False
) -> Path:
    """
    Renders clips of crowds into `out` and writes `out/SPLIT.jsonl`. What is on disk is not rendered again.

    Args:
        split: whose films, and other scenes than any other split's.
        held_out: in wordings, with synonyms and about kinds that are never trained; into `SPLIT-held-out.jsonl`.
    """
    pictures = Pictures(work)
    (out / split).mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(FIRST[split], FIRST[split] + clips):
        video = f"{split}/{seed:07d}-{seconds}s.mp4"
        scene, frames, _ = clip_scene(pictures, seed, split, seconds, crowd=True)
        if not (out / video).is_file():
            write_mp4(out / f"{video}.part.mp4", frames, FPS)
            (out / f"{video}.part.mp4").replace(out / video)
        for question in ask_scene(scene, questions, seed, held_out):
            evidence = [sightings(thing, scene) for thing in scene.things if thing.name in question.about]
            row = {"video": video, "question": question.question, "answer": question.answer, "kind": question.kind}
            rows.append(json.dumps({**row, "evidence": evidence}) + "\n")
    path = out / f"{split}{'-held-out' if held_out else ''}.jsonl"
    with whole_file(path) as file:
        file.writelines(rows)
    return path


def sightings(thing: Thing, scene: Scene) -> list[dict[str, Any]]:
    """Where a thing can be seen in each second: `start` and `end` in seconds, `box` in shares of the frame."""
    places = []
    for frame in range(thing.start, thing.stop, FPS):
        (left, top), (width, height) = thing.corner_at(frame), scene.size
        box = [left / width, top / height, (left + thing.side) / width, (top + thing.side) / height]
        box = [round(min(1.0, max(0.0, edge)), 4) for edge in box]
        places.append({"start": frame // FPS, "end": frame // FPS + 1, "box": box})
    return places
