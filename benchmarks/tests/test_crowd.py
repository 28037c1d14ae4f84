"""The crowded TinyWorld tells the truth: what it answers, what it says that every token shows, what it writes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from benchmarks.world import crowd
from benchmarks.world.clip import read_video
from benchmarks.world.crowd import (
    ALL_WORDS,
    CROWD_COLOURS,
    LABEL_WORDS,
    MARKS,
    MAX_CROWD,
    UNNAMED,
    context_labels,
    make_crowd,
    record_world,
    render_crowd,
    token_labels,
)
from benchmarks.world.crowd_questions import crowd_questions
from benchmarks.world.scene import CELL, DIRECTIONS, FPS, GRID, OBJECT_SHAPES
from benchmarks.world.tinyworld import ask_world, build_dataset, draw_world, split_world

SEEDS = st.integers(0, 12_000_000)
CROWDS = st.builds(make_crowd, SEEDS, st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 4, 12, 21, 22]))
NOTHING = LABEL_WORDS.index("nothing")


def grid_of(world):
    return world.seconds, GRID, GRID


# --------------------------------------------------------------------------------------------------------------------
# The truth, found again from what every token shows
# --------------------------------------------------------------------------------------------------------------------


class Watcher:
    """What every token of a crowded video shows, in words."""

    def __init__(self, world):
        self.words = np.array(LABEL_WORDS)[token_labels(world, grid_of(world))]

    def where(self, *words):
        """Second, row and column of every token that shows all of these words, `[k, 3]`."""
        return np.argwhere(np.all([(self.words == word).any(-1) for word in words], axis=0))

    def shown(self, part, *words):
        """The colours (0), shapes (1) or marks (2) of what shows these words."""
        return {self.words[tuple(place)][part] for place in self.where(*words)}

    def comes(self, *words):
        return self.where(*words)[:, 0].min()

    def goes(self, *words):
        return self.where(*words)[:, 0].max() + 1

    def answer(self, text):
        """The set of right answers to a question."""
        if match := re.fullmatch(r"What is in the (\w+) (\w+)\?", text):
            return self.shown(2, *match.groups())
        if match := re.fullmatch(r"What colour is the (\w+) with the (\w+)\?", text):
            return self.shown(0, *match.groups())
        if match := re.fullmatch(r"What shape is the (\w+) object with the (\w+)\?", text):
            return self.shown(1, *match.groups())
        if match := re.fullmatch(r"Is there an? (\w+) (\w+) in the video\?", text):
            return {"Yes" if len(self.where(*match.groups())) else "No"}
        if match := re.fullmatch(r"At which second does the (\w+) (\w+) appear\?", text):
            return {str(self.comes(*match.groups()))}
        if match := re.fullmatch(r"At which second does the (\w+) (\w+) vanish\?", text):
            return {str(self.goes(*match.groups()))}
        if match := re.fullmatch(r"In which direction does the (\w+) (\w+) move\?", text):
            track = self.where(*match.groups())
            _, down, right = track[-1] - track[0]
            assert (right == 0) != (down == 0)
            return {("right" if right > 0 else "left") if right else ("down" if down > 0 else "up")}
        if match := re.fullmatch(r"How many (\w+) objects are there at second (\d+)\?", text):
            return {str((self.where(match[1])[:, 0] == int(match[2])).sum())}
        if match := re.fullmatch(r"How many (\w+) are there at second (\d+)\?", text):
            (shape,) = {shape for shape in OBJECT_SHAPES if match[1] in (shape + "s", shape + "es")}
            return {str((self.where(shape)[:, 0] == int(match[2])).sum())}
        if match := re.fullmatch(r"Which object appears first, the (\w+) (\w+) or the (\w+) (\w+)\?", text):
            one, other = match.groups()[:2], match.groups()[2:]
            assert self.comes(*one) != self.comes(*other)
            return {" ".join(min(one, other, key=lambda name: self.comes(*name)))}
        if match := re.fullmatch(r"What colour is the first (\w+) to appear after the (\w+) (\w+)\?", text):
            came = {colour: self.comes(colour, match[1]) for colour in self.shown(0, match[1])}
            later = {colour: second for colour, second in came.items() if second > self.comes(match[2], match[3])}
            return {colour for colour, second in later.items() if second == min(later.values())}
        pattern = r"What (is in|colour is) the object to the (left|right) of the (\w+) (\w+)\?"
        if match := re.fullmatch(pattern, text):
            step = {"left": (0, 0, -1), "right": (0, 0, 1)}[match[2]]
            beside = [self.words[tuple(place + step)] for place in self.where(match[3], match[4])]
            assert len({tuple(words) for words in beside} - {("nothing",) * 3}) == 1
            return {words[2 if match[1] == "is in" else 0] for words in beside} - {"nothing"}
        raise AssertionError(f"a question that nobody checks: {text}")


@settings(max_examples=40, deadline=None)
@given(CROWDS, st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0]))
def test_every_answer_is_true_of_the_world(world, seed, multiple_choice):
    watcher = Watcher(world)
    for question in crowd_questions(world, np.random.default_rng(seed), multiple_choice):
        assert watcher.answer(question.query) == {question.answer_text}, question
        if question.options is not None:
            assert len(set(question.options)) == len(question.options) > 1


@settings(max_examples=30, deadline=None)
@given(CROWDS)
def test_as_many_objects_at_every_second_each_alone_in_its_cell(world):
    count = len(world.visible(0))
    assert 1 <= count <= MAX_CROWD[-1]
    names = [item.name for item in world.objects]
    assert len(set(names)) == len(names) <= len(CROWD_COLOURS) * len(OBJECT_SHAPES) - crowd.LEAST_ABSENT
    for second in range(world.seconds):
        cells = set()
        for item in world.visible(second):
            boxes = {item.box_at(time) for time in (second, second + 1 / FPS)}
            ((left, top, right, bottom),) = boxes
            (cell,) = {(y // CELL, x // CELL) for y in (top, bottom - 1) for x in (left, right - 1)}
            assert min(cell) >= 0 and max(cell) < GRID
            cells.add(cell)
        assert len(cells) == len(world.visible(second)) == count


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.sampled_from([1, 8]))
def test_the_same_seed_gives_the_same_world_questions_and_frames(seed, seconds):
    one, other = make_crowd(seed, seconds), make_crowd(seed, seconds)
    assert one == other != make_crowd(seed + 1, seconds)
    assert ask_world(one) == ask_world(other)
    np.testing.assert_array_equal(render_crowd(one), draw_world(other))


@pytest.mark.parametrize(("seconds", "most"), [(0, 21), (129, 21), (2.5, 21), (8, 0), (8, 23), (8, 1.5)])
def test_a_crowd_that_cannot_be_is_refused(seconds, most):
    with pytest.raises(ValueError, match=r"expected a whole number from 1 to (128|22) in a crowded world"):
        make_crowd(0, seconds, most)


# --------------------------------------------------------------------------------------------------------------------
# Labels
# --------------------------------------------------------------------------------------------------------------------


def painted(under, colour, shape, mark, side):
    """A cell's frames `[k, CELL, CELL, 3]` with an object in it."""
    paint, through = crowd._draw_sprite(colour, shape, mark, side)
    low = round(CELL / 2 - side / 2)
    frames = under.copy()
    frames[:, low : low + side, low : low + side] *= through
    frames[:, low : low + side, low : low + side] += paint
    return np.floor(frames)


@pytest.mark.parametrize("seed", range(3))
def test_labels_say_what_the_pixels_show(seed):
    world = make_crowd(seed)
    labels = token_labels(world, grid_of(world))
    frames, empty = (
        # [second, row, column, frame, y, x, channel]
        render_crowd(shown).astype(float).reshape(8, FPS, GRID, CELL, GRID, CELL, 3).transpose(0, 2, 4, 1, 3, 5, 6)
        for shown in (world, replace(world, objects=()))
    )
    is_there = labels[..., 0] != LABEL_WORDS.index("nothing")
    np.testing.assert_array_equal((frames != empty).any(axis=(3, 4, 5, 6)), is_there)
    sprites = [
        (colour, shape, mark, side)
        for colour in CROWD_COLOURS
        for shape in OBJECT_SHAPES
        for mark in MARKS
        for side in range(24, 28)
    ]
    tokens = np.argwhere(is_there)
    for place in map(tuple, np.random.default_rng(seed).permutation(tokens)[:8]):
        nearest = min(sprites, key=lambda sprite: np.abs(painted(empty[place], *sprite) - frames[place]).sum())
        assert nearest[:3] == tuple(LABEL_WORDS[index] for index in labels[place])


@given(CROWDS)
@settings(max_examples=20, deadline=None)
def test_words_beside_the_second_before_tell_what_came_and_where_it_moved(world):
    shown, beside = token_labels(world, grid_of(world)), context_labels(world, grid_of(world))
    assert (beside[0] == UNNAMED).all()
    moving = {(item.colour, item.shape) for item in world.objects if item.direction is not None}
    for place in np.ndindex(*grid_of(world)):
        if not place[0]:
            continue
        before = np.argwhere((shown[place[0] - 1] == shown[place]).all(-1))  # no two objects share all three words
        words = [ALL_WORDS[label] if label != UNNAMED else None for label in beside[place]]
        if shown[place][0] == NOTHING:
            assert words == [None, None]
        elif not len(before):
            assert words == ["appear", None]
        else:
            (row, column), name = before[0], tuple(LABEL_WORDS[label] for label in shown[place][:2])
            step = int(place[2] - column), int(place[1] - row)
            stood = None if name in moving else "nothing"
            assert words == [
                "nothing",
                stood if step == (0, 0) else next(w for w in DIRECTIONS if DIRECTIONS[w] == step),
            ]


def test_labels_of_a_coarse_grid_leave_out_tokens_that_show_several_objects():
    world = make_crowd(0)
    fine, coarse = token_labels(world, (8, GRID, GRID)), token_labels(world, (4, 3, 3), seconds_per_grid=2.0)
    assert coarse.shape == (4, 3, 3, 3)
    # [step, row, column, what is there]
    parts = fine.reshape(4, 2, 3, 2, 3, 2, 3).transpose(0, 2, 4, 1, 3, 5, 6).reshape(4, 3, 3, 8, 3)
    for place in np.ndindex(4, 3, 3):
        there = {tuple(words) for words in parts[place] if words[0] != LABEL_WORDS.index("nothing")}
        if len(there) > 1:
            assert (coarse[place] == UNNAMED).all()
        else:
            assert tuple(coarse[place]) == (there.pop() if there else (LABEL_WORDS.index("nothing"),) * 3)
    assert (coarse == UNNAMED).any()


# --------------------------------------------------------------------------------------------------------------------
# Words and files
# --------------------------------------------------------------------------------------------------------------------


def test_texts_survive_the_tiny_tokenizer_and_every_label_is_one_token(pytestconfig):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(pytestconfig.rootpath / "hub_configs" / "qtsplus-tiny" / "tokenizer.json")
    )
    for seed in range(20):
        for question in ask_world(make_crowd(seed)):
            for text in (question.question, question.answer):
                assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in ALL_WORDS]
    assert {len(of_word) for of_word in ids} == {1} and len({of_word[0] for of_word in ids}) == len(ALL_WORDS)


def test_a_crowd_is_built_as_any_other_world(tmp_path):
    """A still and a video: the file shows the world, and a record gives back the world and its labels."""
    path = Path(build_dataset(tmp_path, "test", 4, seconds=(1, 4), progress=False, crowd=True))
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    worlds = [split_world("test", index, (1, 4), crowd=True) for index in range(4)]
    assert {world.seconds for world in worlds} == {1, 4}
    for index, world in enumerate(worlds):
        video = f"test/{index:06d}.mp4"
        decoded, metadata = read_video(str(tmp_path / video), lambda count, fps: np.arange(count))
        assert metadata.fps == FPS
        assert np.abs(np.asarray(decoded).astype(int) - draw_world(world)).mean() < 9
        asked = [record for record in records if record["video"] == video]
        assert [record["question"] for record in asked] == [question.question for question in ask_world(world)]
        assert all(record_world(record) == world for record in asked)
    build_dataset(tmp_path, "test", 4, seconds=(1, 4), progress=False, crowd=True, multiple_choice=0.0)
    with pytest.raises(ValueError, match="max_objects=21, not 12 and with crowd=True, not False"):
        build_dataset(tmp_path, "test", 4, seconds=(4,), progress=False)


def test_smaller_frames_show_the_same_with_the_same_records(tmp_path):
    options = {"seconds": (2,), "progress": False, "crowd": True}
    whole, half = (
        Path(build_dataset(tmp_path / str(size), "test", 2, frame_size=size, **options)) for size in (168, 84)
    )
    for large, small in zip(whole.open(), half.open(), strict=True):
        assert json.loads(small) == {**json.loads(large), "frame_size": 84}
    large, small = (
        read_video(str(path.parent / "test" / "000000.mp4"), lambda count, fps: np.arange(count))[0]
        for path in (whole, half)
    )
    assert large.shape == (4, 168, 168, 3) and small.shape == (4, 84, 84, 3)
    mean = np.asarray(large, dtype=float).reshape(4, 84, 2, 84, 2, 3).mean(axis=(2, 4))
    assert np.abs(mean - np.asarray(small, dtype=float)).mean() < 12  # both are lossy; other frames differ by 30
    with pytest.raises(ValueError, match="frame_size=None, not 84"):
        build_dataset(whole.parent, "test", 2, frame_size=84, **options)
    with pytest.raises(ValueError, match="frame_size=100: expected one of 168, 84, 56, 28"):
        build_dataset(tmp_path / "other", "test", 2, frame_size=100, **options)


def test_as_many_questions_of_a_kind_as_are_asked_for(tmp_path):
    options = {"seconds": (8,), "progress": False, "crowd": True, "multiple_choice": 0.0}
    path = Path(build_dataset(tmp_path, "test", 2, ask={"direction": 2, "order": 0, "when": 4}, **options))
    kinds = [json.loads(line)["kind"] for line in path.open()]
    assert [kinds.count(kind) for kind in ("direction", "order", "when", "existence")] == [4, 0, 8, 4]
    for wrong in ({"colour": 1}, {"when": -1}):
        with pytest.raises(ValueError, match="expected counts of relation, order"):
            build_dataset(tmp_path, "test", 2, ask=wrong, **options)
    with pytest.raises(ValueError, match="about crowds"):
        build_dataset(tmp_path / "sparse", "test", 2, seconds=(8,), progress=False, ask={"when": 1})


def test_videos_that_are_older_than_crowds_are_no_crowds(tmp_path):
    build_dataset(tmp_path, "train", 1, seconds=(2,), progress=False)
    file = tmp_path / "train" / "videos.json"
    made_with = json.loads(file.read_text())
    assert made_with.pop("crowd") is False
    file.write_text(json.dumps(made_with))
    build_dataset(tmp_path, "train", 2, seconds=(2,), progress=False)
    with pytest.raises(ValueError, match="crowd=False, not True"):
        build_dataset(tmp_path, "train", 2, seconds=(2,), progress=False, crowd=True)


def test_a_record_of_another_world_is_refused(tmp_path):
    path = build_dataset(tmp_path, "train", 1, seconds=(2,), progress=False)
    record = json.loads(Path(path).read_text(encoding="utf-8").splitlines()[0])
    with pytest.raises(ValueError, match="record 'train-000000-00' is not of a crowded world"):
        record_world(record)
    with pytest.raises(ValueError, match="record None is not"):
        record_world({"crowd": True, "seed": 1})
