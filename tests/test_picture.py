"""The picture of what an answer kept: frames as the model saw them, with the kept tokens lit."""

import numpy as np
import pytest
import torch
from PIL import Image

from qtsplus import picture


def test_only_kept_tokens_are_lit():
    frame = np.full((8, 12, 3), 200, np.uint8)
    kept = np.array([[True, False, True], [False, False, True]])
    lit = picture._lit(frame, kept)
    assert (lit[:4, :4] == 200).all() and (lit[4:, 8:] == 200).all()
    assert (lit[4:, :8] < 60).all() and (lit[:4, 4:8] < 60).all()


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_there_is_a_row_for_every_answer(tmp_path, steps):
    frames = np.random.default_rng(0).integers(0, 255, (steps, 28, 28, 3), dtype=np.uint8)
    kept = [(f"question {index}", torch.rand(steps, 2, 2) < 0.5) for index in range(3)]
    one, three = (
        picture.draw_kept_tokens(frames, kept[:count], 0.5, tmp_path / "new" / f"{count}.png") for count in (1, 3)
    )
    with Image.open(one) as single, Image.open(three) as triple:
        assert triple.height == 3 * single.height and triple.width == single.width
        assert single.width == pytest.approx(min(steps, 8) * 165, abs=2)
