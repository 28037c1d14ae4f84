"""What is asked about: rendered films, and records that say where in them an answer can be seen."""

import json
from pathlib import Path

import numpy as np

from ..world.clip import Clip, render_clip

FILM, CLIPS = "film.mp4", ("clip-0.mp4", "clip-1.mp4")
RECORDS = "records.jsonl"
QUESTIONS = 2  # about each clip
QUESTION, SECOND_QUESTION = "Which colours do the shapes have?", "In which direction does the circle move?"


def render_films(folder: Path, size: tuple[int, int], seconds: tuple[float, float]) -> None:
    """
    Writes a film to ask about, and two clips with records about them.

    Args:
        size: (width, height) in pixels.
        seconds: of the film, and of each clip.
    """
    render_clip(folder / FILM, seconds=seconds[0], size=size)
    rows = []
    for number, name in enumerate(CLIPS):
        clip = render_clip(folder / name, seconds=seconds[1], size=size, seed=1 + number)
        rows += [_record(name, clip, number, index) for index in range(QUESTIONS)]
    (folder / RECORDS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _record(video: str, clip: Clip, number: int, index: int) -> dict[str, object]:
    """A question with four options about one object, of either source in turn."""
    item = clip.objects[index]
    width, height = clip.size
    frames = np.flatnonzero(~np.isnan(item.boxes[:, 0])).tolist()
    seen = [
        {
            "start": frame / clip.fps,
            "end": (frame + 1) / clip.fps,
            "box": (item.boxes[frame] / [width, height, width, height]).tolist(),
        }
        for frame in frames[:: int(clip.fps)]
    ]
    return {
        "video": video,
        "question": f"What is {item.colour}?\nA. circle\nB. square\nC. triangle\nD. star\nAnswer with the letter.",
        "query": f"What is {item.colour}?",
        "answer": {"circle": "A", "square": "B", "triangle": "C"}[item.shape],
        "source": ("mcq", "vqa")[index % 2],
        "evidence": [seen],
    }
