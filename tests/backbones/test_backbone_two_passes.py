"""Two passes on every backbone: tiles where the vision tower can be given them, else whole frames, else an error."""

import pytest

from qtsplus import session
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
