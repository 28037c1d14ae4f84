"""Two passes: a video is read small, and the frames that a question chooses at full size."""

import numpy as np
import pytest
import torch
from PIL import Image

from qtsplus import session, two_passes
from qtsplus.two_passes import TwoPasses, best_steps

QUESTION = "What colour is the shape that moves to the left?"


@pytest.fixture(scope="module")
def loaded(tiny_published):
    return session.load(tiny_published)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A folder of 15 frames, in which a square moves: the last step in time has one frame of its own."""
    folder = tmp_path_factory.mktemp("frames")
    for index in range(15):
        frame = np.full((112, 168, 3), 200, np.uint8)
        frame[30:60, 8 * index : 8 * index + 30] = (200, 20, 20)
        Image.fromarray(frame).save(folder / f"{index:02d}.png")
    return folder


@pytest.fixture
def seen(loaded, monkeypatch):
    """Grids that the vision tower was given, without their steps in time: how many of each size."""
    counts, model = {}, loaded[0].model
    encode_pixels = model.encode_pixels

    def count(modality, pixels, grid):
        for time, *size in grid.tolist():
            counts[tuple(size)] = counts.get(tuple(size), 0) + time
        return encode_pixels(modality, pixels, grid)

    monkeypatch.setattr(model, "encode_pixels", count)
    return counts


def test_one_question(loaded, clip, seen):
    answer = session.ask(
        *loaded, clip, QUESTION, fps=2, retention=0.1, two_passes=TwoPasses(0.5, 0.25), max_new_tokens=4
    )
    assert seen == {(4, 6): 8, (8, 12): 2}, "all steps at half the sides, a quarter of them at full size"
    assert answer.keep_map.shape == (8, 4, 6) and answer.visual_tokens == 8 * 24
    assert answer.kept_tokens == answer.keep_map.sum() == 20, "a tenth of the whole video, from two steps"
    steps = answer.keep_map.flatten(1).any(1).nonzero()[:, 0]
    assert len(steps) <= 2 and answer.rho == pytest.approx(0.1)
    for one in answer.evidence:
        assert any(one.start <= int(step) < one.end for step in steps)
    assert set(answer.timings) == {"encode", "second_pass", "first_token", "generate"}


def test_what_is_kept_stands_where_it_was_chosen(loaded, clip, monkeypatch):
    monkeypatch.setattr(two_passes, "best_steps", lambda *_: [3, 7])
    answer = session.ask(*loaded, clip, QUESTION, fps=2, retention=0.2, two_passes=TwoPasses(), max_new_tokens=1)
    assert answer.keep_map.flatten(1).any(1).nonzero()[:, 0].tolist() == [3, 7]
    assert answer.evidence and all((one.start, one.end) in ((3, 4), (7, 7.5)) for one in answer.evidence)


def test_every_question_chooses_for_itself(loaded, clip, seen):
    video = session.encode(*loaded, clip, fps=2, two_passes=TwoPasses(frames=0.2))
    assert seen == {(4, 6): 8} and len(video.features) == 8 * 6
    for _ in range(2):
        session.ask(*loaded, video, QUESTION, max_new_tokens=1)
    assert seen[4, 6] == 8 and seen[8, 12] == 4


def test_with_all_frames_it_is_one_pass(loaded, clip):
    """From the last step's lonely frame on, bit for bit."""
    call = {"fps": 2, "selection": "all", "max_new_tokens": 6}
    once, twice = (
        session.ask(*loaded, clip, QUESTION, two_passes=passes, **call) for passes in (None, TwoPasses(frames=1))
    )
    assert once.answer == twice.answer and torch.equal(once.keep_map, twice.keep_map)
    assert once.rho == twice.rho == 1


def test_the_most_relevant_steps():
    relevance = torch.tensor([0.3, 0.0, 0.1, 0.1, 0.0, 0.0, 0.2, 0.25])  # four steps of two tokens
    assert best_steps(torch.tensor([0, 2, 3, 6, 7]), relevance, 4, 8, count=2) == [0, 3]
    assert best_steps(torch.tensor([0, 2, 3]), relevance, 4, 8, count=3) == [0, 1], "the others hold no kept token"
    assert best_steps(torch.tensor([0, 2, 3]), None, 4, 8, count=1) == [1]


def test_what_it_refuses(loaded, clip):
    for wrong in ({"scale": 1.0}, {"scale": 0}, {"frames": 0}, {"frames": 1.5}):
        with pytest.raises(ValueError, match="expected a fraction of"):
            TwoPasses(**wrong)
    video = session.encode(*loaded, clip, fps=2)
    with pytest.raises(ValueError, match=r"Got two_passes=TwoPasses\(.*for a video that was encoded before"):
        session.ask(*loaded, video, QUESTION, two_passes=TwoPasses())
