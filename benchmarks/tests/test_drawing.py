"""Pictures of what is kept."""

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.drawing import draw_kept_tokens


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_there_is_a_row_for_every_answer(tmp_path, steps):
    frames = np.random.default_rng(0).integers(0, 255, (steps, 28, 28, 3), dtype=np.uint8)
    kept = [(f"question {index}", torch.rand(steps, 2, 2) < 0.5) for index in range(3)]
    for count in (1, 3):
        draw_kept_tokens(frames, kept[:count], 0.5, tmp_path / f"{count}.png")
    with Image.open(tmp_path / "1.png") as single, Image.open(tmp_path / "3.png") as triple:
        assert triple.height == 3 * single.height and triple.width == single.width
        assert single.width == pytest.approx(min(steps, 8) * 165, abs=2)
