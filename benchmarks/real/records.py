"""Clips as mp4 files with records of questions, as `qtsplus train`, `calibrate` and `eval records` read them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.clips import write_mp4

from qtsplus.common.files import whole_file

from ..world.scene import FPS
from .clips import CROWD_SECONDS, clip_scene, film_scene
from .questions import ask_scene
from .world import Pictures

FIRST = {"train": 1_000_000}  # the train records' clips are none that the base learned from


def write_records(
    work: Path,
    out: Path,
    split: str,
    clips: int,
    seconds: int = 8,
    questions: int = 4,
    held_out: bool = False,
    things: str = "trained",
    crowd: bool = True,
    plain: bool = False,
) -> Path:
    """
    Renders clips of crowds into `out` and writes records of them. What is on disk is not rendered again.

    Args:
        split: whose films, and other scenes than any other split's.
        seconds: 8, or as many times that as crowds follow each other in a clip.
        held_out: in wordings, with synonyms and about kinds that are never trained.
        things: which set of [`Pictures.of`] is shown; "drawing" and "thing" are never trained.
        crowd: else clips as the base learned from.
        plain: backgrounds without things, about which something is asked all the same.

    Returns:
        `SPLIT.jsonl` in `out`, with `-held-out`, `-drawing`, `-32s`, `-few` or `-plain` in its name where that is so.
    """
    pictures = Pictures(work)
    names = tuple(dict.fromkeys(pictures.names[drawing] for drawing in pictures.of(things)))
    rows = []
    kinds = {things: things != "trained", f"{seconds}s": seconds != 8, "few": not crowd, "plain": plain}
    marks = "".join(f"-{mark}" for mark, is_so in kinds.items() if is_so)
    first = FIRST.get(split, 0)
    for seed in range(first, first + clips):
        video = f"{split}{marks}/{seed:07d}-{seconds}s.mp4"
        if seconds > CROWD_SECONDS:
            scene, frames, shown = film_scene(pictures, seed, split, seconds // CROWD_SECONDS)
        else:
            scene, frames, shown = clip_scene(pictures, seed, split, seconds, crowd, pictures.of(things), plain)
        if not (out / video).is_file():
            (out / video).parent.mkdir(parents=True, exist_ok=True)
            write_mp4(out / f"{video}.part.mp4", frames, FPS)
            (out / f"{video}.part.mp4").replace(out / video)
        for question in ask_scene(scene, questions, seed, held_out, names, further=split == "train"):
            if question.doubtful and split in ("train", "validation"):
                continue
            about = [place for place, thing in enumerate(scene.things) if thing.name in question.about]
            evidence = [sightings(shown == place) for place in about]
            row = {"video": video, "question": question.question, "answer": question.answer, "kind": question.kind}
            marked = {mark: True for mark in ("other_words", "doubtful") if getattr(question, mark)}
            rows.append(json.dumps({**row, **marked, "evidence": evidence}) + "\n")
    path = out / f"{split}{marks}{'-held-out' if held_out else ''}.jsonl"
    with whole_file(path) as file:
        file.writelines(rows)
    return path


def sightings(shown: np.ndarray) -> list[dict[str, Any]]:
    """
    Where a thing can be seen, token by token, for its drawing fills a third of the box around it: `start` and `end` in
    seconds, `box` in shares of the frame.

    Args:
        shown: `[time, rows, columns]` bool, the tokens that show it.
    """
    _, rows, columns = shown.shape
    places = []
    for step, row, column in np.argwhere(shown).tolist():
        box = [column / columns, row / rows, (column + 1) / columns, (row + 1) / rows]
        places.append({"start": step, "end": step + 1, "box": [round(edge, 4) for edge in box]})
    return places
