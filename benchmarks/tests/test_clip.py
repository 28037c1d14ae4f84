"""The synthetic clips: what is described is what is seen."""

from pathlib import Path

import av
import numpy as np
import pytest

from benchmarks.world.clip import COLOURS, render_clip


def decode(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])


def test_a_seed_gives_the_same_clip_and_another_seed_another(tmp_path):
    first, again, other = (render_clip(tmp_path / f"{i}.mp4", seconds=1, seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert Path(first.path).read_bytes() == Path(again.path).read_bytes()
    assert [item.colour for item in first.objects] == [item.colour for item in again.objects]
    assert (decode(first.path) != decode(other.path)).any()


@pytest.mark.parametrize("seed", range(4))
def test_an_object_shows_its_colour_only_while_it_is_visible(tmp_path, seed):
    clip = render_clip(tmp_path / "clip.mp4", seconds=4, fps=8, seed=seed)
    frames = decode(clip.path).astype(int)
    times = np.arange(len(frames)) / clip.fps
    last_drawn = clip.objects[-1]  # nothing covers it
    near = np.abs(frames - COLOURS[last_drawn.colour]).max(-1) < 40
    visible = (times >= last_drawn.appears_at) & (times < last_drawn.vanishes_at)
    assert visible.any() and not visible.all()
    np.testing.assert_array_equal(visible, ~np.isnan(last_drawn.boxes[:, 0]))
    np.testing.assert_array_equal(visible, near.sum((1, 2)) > 200)
    for index in np.flatnonzero(visible):
        left, top, right, bottom = last_drawn.boxes[index]
        rows, columns = np.nonzero(near[index])
        assert left - 3 <= columns.mean() <= right + 3 and top - 3 <= rows.mean() <= bottom + 3
