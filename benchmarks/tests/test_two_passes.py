"""Two passes: a video is read small, and the regions that a question chooses at full size."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.two_passes import (
    Tiles,
    TwoPasses,
    encode_tiles,
    open_twice,
    read_small,
    second_pass,
    second_prompt,
    tile_side,
)
from qtsplus.asking import session

GRID = torch.tensor([[8, 8, 12]])  # of the clip in patches
QUESTION = "What colour is the shape that moves to the left?"


@pytest.fixture(scope="module")
def loaded(tiny_published):
    return session.load(tiny_published)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A folder of 15 frames, in which a square moves: the last step in time has one frame of its own."""
    folder = tmp_path_factory.mktemp("moving-square")
    rng = np.random.default_rng(0)
    for index in range(15):
        frame = rng.integers(150, 250, (112, 168, 3), np.uint8)
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


@pytest.fixture
def ask(loaded, clip):
    """Asks about the folder in two passes: what the second one encoded, which tokens were kept, and the new ids."""
    model, processor = loaded

    def ask(passes, max_new_tokens=1, **choice):
        small, large = read_small(model, processor, clip, passes, fps=2)
        prompt = session.prompt_inputs(processor, {"clip": small}, [QUESTION])
        second = second_pass(model, large, prompt, **choice)
        whole = session.prompt_inputs(processor, {"clip": replace(small, video_grid_thw=GRID)}, [QUESTION])
        del whole["video_features"]
        compact = second_prompt(model, whole, [second], selection=choice.get("selection"))
        output = model.generate_from(compact, max_new_tokens=max_new_tokens, return_dict_in_generate=True)
        kept = second.places[output.qtsplus.kept_indices[0]]
        return second, kept, output.sequences[0, whole["input_ids"].shape[1] :]

    return ask


def test_one_question(ask, seen):
    """Frames of 4 x 6 tokens, in tiles of 2 x 2."""
    second, kept, _ = ask(TwoPasses(0.5, 0.25, tile=2), retention=0.1)
    assert seen == {(4, 6): 8, (4, 4): 12}, "all steps at half the sides, a quarter of the 48 tiles at full size"
    assert second.num_tokens == 8 * 24 and second.rho == pytest.approx(0.1)
    assert len(kept) == 20, "a tenth of the whole video, from twelve tiles"


def test_what_is_kept_stands_where_it_was_chosen(ask, monkeypatch):
    monkeypatch.setattr(Tiles, "best", lambda *_: torch.tensor([[7, 0, 2], [3, 1, 0]]))
    _, kept, _ = ask(TwoPasses(tile=2), retention=8 / 192)
    expected = torch.zeros(8, 4, 6, dtype=torch.bool)
    expected[7, :2, 4:] = expected[3, 2:, :2] = True
    assert torch.equal(kept, expected.flatten().nonzero()[:, 0])


def test_every_question_chooses_for_itself(loaded, clip, seen):
    small, large = read_small(*loaded, clip, TwoPasses(tokens=0.2, tile=2), fps=2)
    assert seen == {(4, 6): 8} and len(small.features) == 8 * 6
    for _ in range(2):
        second_pass(loaded[0], large, session.prompt_inputs(loaded[1], {"clip": small}, [QUESTION]))
    assert seen == {(4, 6): 8, (4, 4): 2 * 9}


def test_with_all_of_whole_frames_it_is_one_pass(loaded, clip, ask):
    """From the last step's lonely frame on, bit for bit."""
    once = session.ask(*loaded, clip, QUESTION, fps=2, selection="all", max_new_tokens=6)
    second, kept, ids = ask(TwoPasses(tokens=1, tile=6), 6, selection="all")
    assert loaded[1].tokenizer.decode(ids, skip_special_tokens=True).strip() == once.answer
    assert len(kept) == once.visual_tokens and second.rho == 1
    assert torch.equal(second.features, session.encode(*loaded, clip, fps=2).features)


@pytest.mark.parametrize("frames_per_chunk", (None, 4))
def test_a_tile_is_what_it_is_in_its_frame(loaded, clip, frames_per_chunk, monkeypatch):
    """Where the tower attends within windows and a tile is one; at the right edge it is smaller."""
    model, processor = loaded
    visual = model.model.visual
    monkeypatch.setattr(visual, "fullatt_block_indexes", [])
    monkeypatch.setattr(visual.config, "fullatt_block_indexes", [])
    assert tile_side(model) == 4
    chunks = processor.video_chunks(clip, fps=2, frames_per_chunk=frames_per_chunk)
    whole = session.encode(model, processor, clip, fps=2).features
    large, _ = open_twice(model, processor, chunks, TwoPasses())
    assert large.tiles.sizes.tolist() == [[16, 8]]
    every = torch.cartesian_prod(torch.arange(8), torch.arange(1), torch.arange(2))
    features, places = encode_tiles(model, large, every)
    assert torch.equal(places, torch.arange(192))
    torch.testing.assert_close(features, whole, atol=1e-4, rtol=1e-4)
    features, places = encode_tiles(model, large, torch.tensor([[7, 0, 1], [2, 0, 0], [2, 0, 1]]))
    assert len(places) == 32 and places.diff().min() > 0
    torch.testing.assert_close(features, whole[places], atol=1e-4, rtol=1e-4)


def test_a_tile_that_stays_the_same_is_encoded_once(loaded, tmp_path, seen):
    for index in range(8):
        frame = np.full((56, 112, 3), 200, np.uint8)
        frame[:, 56:] = 10 * index
        Image.fromarray(frame).save(tmp_path / f"{index}.png")
    model, processor = loaded
    every = torch.cartesian_prod(torch.arange(4), torch.arange(1), torch.arange(2))
    every = every[every[:, 2].argsort(stable=True)]  # the steps of a place one after another
    large, _ = open_twice(model, processor, processor.video_chunks(tmp_path, fps=2), TwoPasses(tile=2))
    seen.clear()
    features, _ = encode_tiles(model, large, every)
    assert seen == {(4, 4): 5} and len(features) == 4 * 8


def test_the_best_tiles():
    """Two steps of 3 x 5 tokens in tiles of 2 x 2; the last row and column have smaller ones."""
    tiles = Tiles((2, 3, 5), (2, 2))
    assert tiles.sizes.tolist() == [[4, 4, 2], [2, 2, 1]]
    mass = torch.zeros(2, 2, 3)
    mass[1, 0, 1], mass[0, 0, 1], mass[0, 1, 2] = 0.5, 0.2, 0.1
    assert tiles.best(mass, 4).tolist() == [[1, 0, 1]]
    assert tiles.best(mass, 5).tolist() == [[1, 0, 1], [0, 1, 2]], "a tenth of one token is more than of four"
    assert tiles.best(mass, 30).tolist() == [[0, 0, 1], [1, 0, 1], [0, 1, 2]], "the others have nothing"
    assert tiles.best(mass, 1).tolist() == [[1, 0, 1]], "one at least"


def test_the_mass_of_a_smaller_video():
    tiles = Tiles((1, 4, 6), (2, 2))
    weights = torch.rand(1, 2, 3)
    torch.testing.assert_close(tiles.mass(weights), weights)
    # A token of the small video that lies in two tiles gives each its share.
    assert tiles.mass(torch.tensor([[[1.0, 0.0]]])).tolist() == [[[pytest.approx(1 / 3), pytest.approx(1 / 6), 0]] * 2]


def test_without_relevance_kept_tokens_count(ask, seen):
    ask(TwoPasses(tokens=1, tile=2), selection="uniform", retention=0.1)
    assert seen[4, 4] == 5, "a tenth of 48 small tokens, and none that was not kept"


@pytest.mark.parametrize("choice", [{"selection": "all"}, {"retention": 1}, {"retention": 0.3}], ids=str)
def test_more_than_a_second_pass_encodes_is_refused(ask, choice):
    with pytest.raises(ValueError, match="tokens are asked for, and the second pass encodes 48: keep fewer"):
        ask(TwoPasses(tile=2), **choice)


def test_what_the_model_predicts_ends_at_what_was_encoded(ask):
    second, kept, _ = ask(TwoPasses(tokens=0.03, tile=1))
    assert len(kept) <= 5 and second.rho == pytest.approx(5 / 192)


def test_what_it_refuses(loaded, clip, monkeypatch):
    for wrong in ({"scale": 1.0}, {"scale": 0}, {"tokens": 0}, {"tokens": 1.5}):
        with pytest.raises(ValueError, match="expected a fraction of"):
            TwoPasses(**wrong)
    for side in (0, 1.5, True):
        with pytest.raises(ValueError, match="expected a whole number of tokens, at least 1"):
            TwoPasses(tile=side)
    monkeypatch.setattr(loaded[0].config, "model_type", "qwen3_vl_qtsplus")
    with pytest.raises(ValueError, match="tile=2: the vision tower of this model .* has to see whole frames"):
        read_small(*loaded, clip, TwoPasses(tile=2), fps=2)
    monkeypatch.setattr(loaded[1], "native_resolution", False)
    with pytest.raises(ValueError, match="Two passes need a model that reads frames of any size"):
        read_small(*loaded, clip, TwoPasses(), fps=2)
