"""The README's picture of what two questions keep of one video."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from qtsplus.data.clip import write_mp4
from qtsplus.data.crowd import make_crowd, render_crowd
from qtsplus.data.scene import FPS
from qtsplus.training.models import load_model

SCRIPT = Path(__file__).parents[1] / "docs/images/draw_two_questions.py"
QUESTIONS = ("What is in the red circle?", "At which second does the blue star appear?")


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("draw_two_questions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_questions_are_drawn_with_what_each_keeps(script, tiny_processor, tmp_path):
    video, frames = tmp_path / "clip.mp4", render_crowd(make_crowd(0, 3))
    write_mp4(video, frames, FPS)
    model = load_model("qtsplus-tiny", None).eval()
    figure = script.draw(model, tiny_processor, str(video), QUESTIONS, retention=0.1)
    rows = figure.subfigs
    assert [title in row.get_suptitle() for row, title in zip(rows, QUESTIONS, strict=True)] == [True, True]
    kept = []
    for row in rows:
        assert len(row.axes) == 3 and "11 of 108 visual tokens kept" in row.get_suptitle()
        for step, axes in enumerate(row.axes):
            frame, dark = axes.images
            assert np.abs(frame.get_array().astype(int) - frames[2 * step]).mean() < 12  # as H.264 leaves it
            kept.append(np.asarray(dark.get_alpha()) == 0)
    assert [sum(part.sum() for part in kept[start : start + 3]) for start in (0, 3)] == [11, 11]
    assert any((one != other).any() for one, other in zip(kept[:3], kept[3:], strict=True))
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
