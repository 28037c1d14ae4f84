"""
Draws two_questions.png, the picture of the README: one video, two questions, and what a model keeps for each.

`python docs/images/draw_two_questions.py MODEL VIDEO QUESTION QUESTION` with a folder or Hub id and a video file.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qtsplus import session
from qtsplus.picture import frames_from_patches

DIMMED = 0.78  # how much of the light what was dropped loses
FRAMES = 8  # of the video, at most


def frames_seen(processor: Any, video: str) -> np.ndarray:
    """The first frame of every grid step, `[T, H, W, 3]` uint8, as the model sees it."""
    seen = processor(videos=video, return_tensors="pt")
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    sizes = {name: getattr(processor.video_processor, name) for name in names}
    return frames_from_patches(seen["pixel_values_videos"], seen["video_grid_thw"][0].tolist(), **sizes)


def draw(model: Any, processor: Any, video: str, questions: Sequence[str], retention: float | None = None) -> Figure:
    """
    A row of frames for each question, with the kept tokens lit.

    Args:
        model, processor: as `qtsplus.session.load` gives them.
        video: a file.
        questions: what is asked.
        retention: fraction of the visual tokens to keep; the model's decision when absent.
    """
    frames, encoded = frames_seen(processor, video), session.encode(model, processor, video)
    seconds = float(encoded.second_per_grid_ts[0])
    shown = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), FRAMES)).round().astype(int))
    figure = Figure(figsize=(1.5 * len(shown), 2.1 * len(questions)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, question in zip(figure.subfigures(len(questions), squeeze=False)[:, 0], questions, strict=True):
        answer = session.ask(model, processor, encoded, question, retention=retention, max_new_tokens=16)
        kept = f"{answer.kept_tokens} of {answer.visual_tokens} visual tokens kept"
        row.suptitle(f"“{question}”  {answer.answer}  ({kept})", fontsize=10)
        for axes, step in zip(row.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            height, width = frames[step].shape[:2]
            edges = (-0.5, width - 0.5, height - 0.5, -0.5)
            dropped = 1.0 - answer.keep_map[step].numpy()
            axes.imshow(frames[step])
            axes.imshow(np.zeros((*dropped.shape, 3)), alpha=DIMMED * dropped, extent=edges, interpolation="nearest")
            axes.set_title(f"{step * seconds:.0f} s", fontsize=8)
            axes.axis("off")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder or a Hub id")
    parser.add_argument("video", help="a video file")
    parser.add_argument("questions", nargs=2, help="two questions about it")
    parser.add_argument("--retention", type=float, help="the fraction of the visual tokens to keep")
    given = parser.parse_args()
    figure = draw(*session.load(given.model), given.video, given.questions, given.retention)
    figure.savefig(Path(__file__).with_name("two_questions.png"), dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
