"""Two passes on every backbone: tiles where the vision tower can be given them, else whole frames, else an error."""

from types import SimpleNamespace

import pytest

from benchmarks.learned.twice import ask_twice
from benchmarks.learned.work import Work
from qtsplus import session
from qtsplus.data.records import VideoRecord
from qtsplus.two_passes import TwoPasses


def test_two_passes(backbone, model, processor, clips):
    """With all tokens it is one pass, in tiles as large as the frames."""
    call = {"fps": 2, "selection": "all", "max_new_tokens": 4}
    asked = (model, processor, clips / "long.mp4", "What moves?")
    if not processor.native_resolution:
        with pytest.raises(ValueError, match="Two passes need a model that reads frames of any size"):
            session.ask(*asked, **call, two_passes=TwoPasses())
        return
    whole = TwoPasses(tokens=1, tile=None if model.model.tile_side is None else 99)
    once, twice = (session.ask(*asked, **call, two_passes=passes) for passes in (None, whole))
    assert once.answer == twice.answer and once.kept_tokens == twice.kept_tokens == once.visual_tokens
    some = session.ask(*asked, fps=2, retention=0.1, two_passes=TwoPasses(tokens=0.4), max_new_tokens=2)
    assert some.kept_tokens == -(-some.visual_tokens // 10)
    if model.model.tile_side is None:
        steps = some.keep_map.flatten(1).any(1).sum()
        assert steps == 1, "whole frames: of three steps one is at most two fifths"
        with pytest.raises(ValueError, match="has to see whole frames"):
            session.ask(*asked, two_passes=TwoPasses(tile=2))


def test_in_the_learned_benchmark(model, processor, clips):
    """Asked where there are two passes, and left out with the reason where there are none."""
    left_out = Work.left_out.fget(SimpleNamespace(processor=processor))
    assert ("two_passes" in left_out) is not processor.native_resolution
    if not processor.native_resolution:
        return
    records = [
        VideoRecord(question=f"What is {word}?", answer="A ball.", kind="attribute", video=str(clips / f"{name}.mp4"))
        for word, name in (("red", "long"), ("green", "short"), ("blue", "long"))
    ]
    asked = ask_twice(model, processor, records, 0.1, batch_size=2)
    for record, twice in zip(records, asked, strict=True):
        (grid,) = model.model.merged_grid(processor.video_chunks(record.video).video_grid_thw)
        tokens = grid[0] * grid[1] * grid[2]
        assert twice.outcome.visual_tokens == tokens and twice.outcome.kept_tokens == -(-tokens // 10)
        assert twice.small < tokens and twice.outcome.kept_tokens <= twice.large < tokens
        assert max(twice.outcome.kept_indices) < tokens
