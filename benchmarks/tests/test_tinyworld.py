"""TinyWorld tells the truth: what it answers, where it says the answer is, and what it writes to disk."""

import collections
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from benchmarks.world import tinyworld
from benchmarks.world.clip import COLOURS, read_video
from benchmarks.world.scene import CELL, FPS, GRID, OBJECT_SHAPES, WorldObject, sightings
from benchmarks.world.tinyworld import (
    LETTERS,
    QUESTION_KINDS,
    SPLITS,
    ask_world,
    build_dataset,
    caption,
    evidence_tokens,
    make_world,
    moment,
    needle_recall,
    questions,
    render,
    split_seed,
    split_world,
)
from qtsplus.data.check import check_set
from qtsplus.evaluation.labelled import sighting_tokens

SEEDS = st.integers(0, 12_000_000)
SECONDS = st.sampled_from([2, 4, 8, 16, 32, 128])
WORLDS = st.builds(make_world, SEEDS, SECONDS)


# --------------------------------------------------------------------------------------------------------------------
# The truth, found again from the objects alone: second by second, as somebody who watches the video would
# --------------------------------------------------------------------------------------------------------------------


class Watcher:
    """What is seen at every second: {(colour, shape): centre of the box}, for the first and second half."""

    def __init__(self, world):
        self.seen = []
        for frame in range(world.seconds * FPS):
            time = frame / FPS
            here = {}
            for item in world.objects:
                if item.appears_at <= time < item.vanishes_at:
                    left, top, right, bottom = item.box_at(time)
                    here[item.colour_at(time), item.shape] = ((left + right) / 2, (top + bottom) / 2)
            self.seen.append(here)
        self.ever = {name for here in self.seen for name in here}
        # An object goes on under its first name: a name that comes in the frame in which another of the same shape and
        # place goes is the same object.
        self.first_name = {}
        for before, here in zip([{}, *self.seen], self.seen, strict=False):
            for name, centre in here.items():
                twin = [old for old in before if old[1] == name[1] and before[old] == centre and old not in here]
                if name not in before:
                    self.first_name[name] = self.first_name[twin[0]] if twin else name

    def frames_of(self, name):
        """The frames that show the object with this first name."""
        return [i for i, here in enumerate(self.seen) if any(self.first_name[other] == name for other in here)]

    def track(self, name):
        return [centre for here in self.seen for other, centre in here.items() if self.first_name[other] == name]

    def answer(self, text):
        """The set of right answers to a question."""
        objects = set(self.first_name.values())
        if match := re.fullmatch(r"What colour is the (\w+)\?", text):
            return {colour for colour, shape in self.ever if shape == match[1]}
        if match := re.fullmatch(r"Which shape is (\w+)\?", text):
            return {shape for colour, shape in self.ever if colour == match[1]}
        if match := re.fullmatch(r"Is there an? (\w+) (\w+) in the video\?", text):
            return {"Yes" if (match[1], match[2]) in self.ever else "No"}
        if match := re.fullmatch(r"In which direction does the (\w+) (\w+) move\?", text):
            track = self.track((match[1], match[2]))
            right, down = np.subtract(track[-1], track[0])
            assert (right == 0) != (down == 0)
            return {("right" if right > 0 else "left") if right else ("down" if down > 0 else "up")}
        if match := re.fullmatch(r"At which second does the (\w+) (\w+) (appear|vanish)\?", text):
            frames = self.frames_of((match[1], match[2]))
            return {str(frames[0] // FPS) if match[3] == "appear" else str((frames[-1] + 1) // FPS)}
        if match := re.fullmatch(r"What colour does the (\w+) (\w+) turn into\?", text):
            name = (match[1], match[2])
            return {other[0] for other, first in self.first_name.items() if first == name and other != name}
        if text == "How many objects are there in the video?":
            return {str(len(objects))}
        if match := re.fullmatch(r"How many (\w+) objects are there in the video\?", text):
            return {str(len({self.first_name[name] for name in self.ever if name[0] == match[1]}))}
        if match := re.fullmatch(r"How many (\w+?)(es|s) are there in the video\?", text):
            singular = {shape: shape for shape in OBJECT_SHAPES} | {shape + "s": shape for shape in OBJECT_SHAPES}
            shape = next(singular[word] for word in (match[1], match[1] + match[2][:-1]) if word in singular)
            return {str(len({name for name in objects if name[1] == shape}))}
        if match := re.fullmatch(r"Which object appears first, the (\w+) (\w+) or the (\w+) (\w+)\?", text):
            first = min([(match[1], match[2]), (match[3], match[4])], key=lambda name: self.frames_of(name)[0])
            return {" ".join(first)}
        if text == "Which colour is never in the video?":
            return set(COLOURS) - {colour for colour, _ in self.ever}
        if text == "Name all objects of the video in order.":
            ordered = sorted(objects, key=lambda name: (self.frames_of(name)[0], name))
            return {", ".join(" ".join(name) for name in ordered)}
        raise AssertionError(f"a question that nobody checks: {text}")


@settings(max_examples=60, deadline=None)
@given(WORLDS, st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0]))
def test_every_answer_is_true_of_the_world(world, seed, multiple_choice):
    watcher = Watcher(world)
    for question in questions(world, np.random.default_rng(seed), multiple_choice):
        right = watcher.answer(question.query)
        assert question.answer_text in right, question
        if question.options is None:
            # A free answer that is the only right one can be marked.
            assert len(right) == 1
        else:
            assert len(set(question.options)) == len(question.options)
            assert [option for option in question.options if option in right] == [question.answer_text]
            for letter, option in zip(LETTERS, question.options, strict=False):
                assert f"{letter}. {option} " in question.question
            assert question.question.startswith(question.query)


@settings(max_examples=30, deadline=None)
@given(WORLDS)
def test_captions_and_moments_are_true(world):
    watcher = Watcher(world)
    sentences = caption(world).answer.split(". ")
    assert len(sentences) == len(world.objects) == len(set(watcher.first_name.values()))
    for sentence in sentences:
        match = re.match(r"An? (\w+) (\w+) appears at second (\d+)", sentence)
        frames = watcher.frames_of((match[1], match[2]))
        assert frames[0] == int(match[3]) * FPS
        gone = re.search(r"vanishes at second (\d+)", sentence)
        assert frames[-1] + 1 == (int(gone[1]) if gone else world.seconds) * FPS
        turned = re.search(r"turns (\w+) at second (\d+)", sentence)
        names = [name for name, first in watcher.first_name.items() if first == (match[1], match[2])]
        assert len(names) == (2 if turned else 1)
        if turned:
            assert (turned[1], match[2]) in watcher.seen[int(turned[2]) * FPS]
    for second in range(world.seconds):
        said = set(re.findall(r"an? (\w+) (\w+)", moment(world, second).answer))
        assert said == set(watcher.seen[second * FPS]) == set(watcher.seen[second * FPS + 1])


def test_every_kind_is_asked_often_and_answers_are_balanced():
    asked = collections.Counter()
    answers = collections.defaultdict(collections.Counter)
    letters = collections.Counter()
    for seed in range(300):
        for question in questions(make_world(seed, 8), np.random.default_rng(seed)):
            asked[question.kind] += 1
            answers[question.kind][question.answer_text] += 1
            if question.options is not None and len(question.options) == len(LETTERS):
                letters[question.answer] += 1
    assert set(asked) == set(QUESTION_KINDS) - {"relation"}  # which only crowds have
    assert min(asked.values()) > 100
    assert abs(answers["existence"]["Yes"] / asked["existence"] - 0.5) < 0.12
    for kind in ("attribute", "direction", "when", "change"):
        assert answers[kind].most_common(1)[0][1] < 0.4 * asked[kind], kind
    assert answers["count"].most_common(1)[0][1] < 0.75 * asked["count"]
    assert min(letters.values()) > 0.18 * sum(letters.values())


# --------------------------------------------------------------------------------------------------------------------
# The world
# --------------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([4, 8, 16]))
def test_the_same_seed_gives_the_same_world_questions_and_frames(seed, seconds):
    one, other = make_world(seed, seconds), make_world(seed, seconds)
    assert one == other
    assert ask_world(one) == ask_world(other)
    np.testing.assert_array_equal(render(one), render(other))


def test_other_seeds_and_lengths_give_other_worlds():
    assert len({make_world(seed, seconds).objects for seed in range(20) for seconds in (8, 9)}) == 40


@settings(max_examples=60, deadline=None)
@given(WORLDS)
def test_objects_stay_inside_and_apart(world):
    assert 1 <= len(world.objects) <= 12
    names = [(colour, item.shape) for item in world.objects for colour in item.colours]
    assert len(set(names)) == len(names)
    for second in range(world.seconds):
        taken: set[tuple[int, int]] = set()
        for item in world.visible(second):
            cells = set()
            for time in (second, second + 0.5):
                left, top, right, bottom = item.box_at(time)
                assert 0 <= left < right <= CELL * GRID and 0 <= top < bottom <= CELL * GRID
                cells |= {(y // CELL, x // CELL) for y in (top, bottom - 1) for x in (left, right - 1)}
            assert not taken & cells
            taken |= cells


@pytest.mark.parametrize("seconds", [0, 1, -3, 2.5, 129, 500])
def test_a_length_that_cannot_be_is_refused(seconds):
    with pytest.raises(ValueError, match="whole number of seconds from 2 to 128"):
        make_world(0, seconds)


@pytest.mark.parametrize("max_objects", [0, -1, 37, 500])
def test_a_number_of_objects_that_cannot_be_is_refused(max_objects):
    with pytest.raises(ValueError, match="whole number from 1 to 36"):
        make_world(0, 8, max_objects)


# --------------------------------------------------------------------------------------------------------------------
# Evidence
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_evidence_tokens_hold_the_pixels_of_the_object(seed):
    world = make_world(seed, 8)
    frames = render(world).astype(int)
    for item in world.objects:
        without = replace(world, objects=tuple(other for other in world.objects if other is not item))
        changed = (render(without).astype(int) != frames).any(-1)
        per_cell = changed.reshape(8, FPS, GRID, CELL, GRID, CELL).sum(axis=(1, 3, 5)).ravel()
        tokens = sighting_tokens(sightings(item), (8, GRID, GRID))
        assert (per_cell[tokens] > 0).all()
        assert per_cell[tokens].sum() > 0.9 * per_cell.sum()
        for second in range(item.appears_at, item.vanishes_at):
            assert 1 <= ((tokens // GRID**2) == second).sum() <= 2


@settings(max_examples=30, deadline=None)
@given(WORLDS)
def test_point_questions_need_few_tokens_and_summaries_the_whole_video(world):
    grid = (world.seconds, GRID, GRID)
    for question in questions(world, np.random.default_rng(0)):
        needles = evidence_tokens(question, grid)
        assert all(len(needle) and needle[-1] < np.prod(grid) for needle in needles)
        if question.kind == "summary":
            assert len(needles) == len(world.objects)
        elif question.kind == "order":
            assert len(needles) == 2
        elif question.kind != "count":
            assert len(needles) == (question.answer_text != "No")


@settings(max_examples=30, deadline=None)
@given(WORLDS, st.integers(0, 10**6))
def test_evidence_shows_what_the_answer_says(world, seed):
    for question in questions(world, np.random.default_rng(seed)):
        for sighting in (sighting for needle in question.evidence for sighting in needle):
            times = np.arange(sighting.start, sighting.end, 1 / FPS)
            shown = {
                (item.colour_at(time), item.shape)
                for time in times
                for item in world.visible(time)
                if item.box_at(time) == sighting.box
            }
            assert len(times) and (len(shown) == 1 or question.kind in ("count", "summary", "direction"))
            words = f"{question.query} {question.answer_text}"
            if question.kind in ("attribute", "existence", "change"):
                assert all(colour in words and shape in words for colour, shape in shown)


def test_evidence_at_a_coarser_grid():
    world = make_world(3, 8)
    fine = sighting_tokens(sightings(world.objects[0]), (8, 4, 4))
    coarse = sighting_tokens(sightings(world.objects[0]), (4, 2, 2), seconds_per_grid=2.0)
    time, row, column = np.unravel_index(fine, (8, 4, 4))
    assert set(np.ravel_multi_index((time // 2, row // 2, column // 2), (4, 2, 2))) == set(coarse)


def test_needle_recall_counts_the_needles_of_which_a_token_was_kept():
    needles = [np.array([3, 4]), np.array([9])]
    assert needle_recall([4, 7], needles) == 0.5
    assert needle_recall([3, 4, 9], needles) == 1.0
    assert needle_recall([1], []) is None


# --------------------------------------------------------------------------------------------------------------------
# Words and files
# --------------------------------------------------------------------------------------------------------------------


def test_texts_survive_the_tiny_tokenizer(pytestconfig):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(pytestconfig.rootpath / "hub_configs" / "qtsplus-tiny" / "tokenizer.json")
    )
    for seed in range(40):
        for question in ask_world(make_world(seed, 8)):
            for text in (question.question, question.answer):
                assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # What a question asks for by name is one token each, so that the selector can look for it.
    for word in (*COLOURS, *OBJECT_SHAPES):
        assert len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1, word


def test_splits_share_no_seed():
    ranges = sorted((seeds.start, seeds.stop) for seeds in SPLITS.values())
    assert all(stop <= start for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False))
    with pytest.raises(ValueError, match="split='dev'"):
        split_seed("dev", 0)
    with pytest.raises(ValueError, match="expected an index"):
        split_seed("test", len(SPLITS["test"]))


def test_a_video_file_shows_what_was_rendered(tmp_path):
    build_dataset(tmp_path, "test", 2, seconds=(4,), progress=False)
    for index in range(2):
        frames = render(split_world("test", index, (4,)))
        decoded, metadata = read_video(str(tmp_path / "test" / f"{index:06d}.mp4"), lambda count, fps: np.arange(count))
        assert decoded.shape == frames.shape
        assert metadata.fps == FPS
        difference = np.abs(np.asarray(decoded).astype(int) - frames)
        assert difference.mean() < 6 and np.percentile(difference, 99) < 40


def test_a_build_that_was_stopped_goes_on(tmp_path):
    path = Path(build_dataset(tmp_path, "validation", 3, seconds=(2, 4), progress=False))
    videos = sorted((tmp_path / "validation").glob("*.mp4"))
    assert [video.name for video in videos] == ["000000.mp4", "000001.mp4", "000002.mp4"]
    records = path.read_text(encoding="utf-8")
    content = videos[1].read_bytes()
    videos[1].unlink()
    untouched = videos[0].stat().st_mtime_ns
    build_dataset(tmp_path, "validation", 4, seconds=(2, 4), progress=False)
    assert videos[0].stat().st_mtime_ns == untouched
    assert videos[1].read_bytes() == content
    grown = path.read_text(encoding="utf-8")
    assert grown.startswith(records) and len(grown) > len(records)
    for line in grown.splitlines():
        record = json.loads(line)
        assert (tmp_path / record["video"]).is_file()
        assert record["seed"] in SPLITS["validation"] and record["seconds"] in (2, 4)
        assert record["answer_text"] == (
            record["answer"] if record["options"] is None else record["options"][LETTERS.index(record["answer"])]
        )


def test_the_same_arguments_give_the_same_bytes_on_any_number_of_processes(tmp_path):
    """Long enough to be cut into several jobs, and for the encoder to look ahead."""
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, workers in zip(folders, (1, 1, 2), strict=True):
        build_dataset(folder, "test", 12, seconds=(8, 16), workers=workers, progress=False)
    contents = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in folders
    ]
    assert len(contents[0]) == 14
    for content in contents[1:]:
        assert content.keys() == contents[0].keys()
        assert [name for name in content if content[name] != contents[0][name]] == []


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": (4,)}, r"train holds videos that were made with seconds=\[2\], not \[4\]: "),
        ({"max_objects": 3}, "made with max_objects=2, not 3: "),
        ({"seconds": (2, 4), "max_objects": 1}, r"seconds=\[2\], not \[2, 4\] and with max_objects=2, not 1"),
    ],
)
def test_other_arguments_never_meet_earlier_videos(change, words, tmp_path):
    made = {"split": "train", "size": 2, "seconds": (2,), "max_objects": 2, "progress": False}
    build_dataset(tmp_path, **made)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=words):
        build_dataset(tmp_path, **{**made, **change})
    assert files_of(tmp_path) == before
    # Another split of the same folder may have its own, and the wording of the questions is not in the videos.
    build_dataset(tmp_path, **{**made, **change, "split": "test"})
    build_dataset(tmp_path, **made, multiple_choice=0.0)


def test_videos_of_other_code_or_of_unknown_making_are_refused(tmp_path, monkeypatch):
    made = {"split": "train", "size": 1, "seconds": (2,), "max_objects": 2, "progress": False}
    build_dataset(tmp_path, **made)
    with monkeypatch.context() as patch:
        patch.setattr(tinyworld, "render", lambda world: render(world)[:, ::-1])
        with pytest.raises(ValueError, match="another version of this package"):
            build_dataset(tmp_path, **made)
    for content in ("[1]", "{", None):
        (tmp_path / "train" / "videos.json").unlink()
        if content is not None:
            (tmp_path / "train" / "videos.json").write_text(content)
        with pytest.raises(ValueError, match=r"no videos\.json says how they were made"):
            build_dataset(tmp_path, **made)
        (tmp_path / "train" / "videos.json").touch()
    (tmp_path / "train" / "000000.mp4").unlink()
    build_dataset(tmp_path, **made)  # nothing is left that could be of another kind


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seconds": (8, 500)}, "seconds=500"),
        ({"seconds": ()}, "seconds is empty"),
        ({"max_objects": 500}, "max_objects=500"),
        ({"size": 0}, "size=0"),
        ({"workers": 0}, "workers=0"),
        ({"multiple_choice": 1.5}, r"multiple_choice=1\.5"),
        ({"split": "dev"}, "split='dev'"),
    ],
)
def test_a_build_that_cannot_be_is_refused_before_it_writes(arguments, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        build_dataset(tmp_path / "new", **{"split": "train", "size": 1, "progress": False, **arguments})
    assert not (tmp_path / "new").exists()


def test_a_world_that_shows_a_shape_in_every_colour_still_has_questions():
    """No object of that shape is absent, so "Is there ..?" must ask for another one."""
    names = list(COLOURS)
    circles = tuple(
        WorldObject(name, "circle", 0, 8, (14.0 + 28 * place, 14.0), 24, later_colour=later, changes_at=4)
        for place, (name, later) in enumerate(zip(names[::2], names[1::2], strict=True))
    )
    world = replace(make_world(0, 8, 4), objects=circles)
    shown = {(colour, item.shape) for item in world.objects for colour in item.colours}
    assert shown == {(colour, "circle") for colour in COLOURS}
    asked = [q for seed in range(20) for q in questions(world, np.random.default_rng(seed)) if q.kind == "existence"]
    assert {q.answer_text for q in asked} == {"Yes", "No"}


def test_a_conversation_holds_all_that_is_asked_about_a_video(tmp_path):
    options = {"size": 2, "seconds": (2,), "max_objects": 2, "progress": False}
    single, together = (
        [
            json.loads(line)
            for line in Path(build_dataset(tmp_path / name, "train", **options, **kind)).read_text().splitlines()
        ]
        for name, kind in (("a", {}), ("b", {"conversations": True}))
    )
    assert len(together) == 2
    for record in together:
        asked = {(line["question"], line["answer"]) for line in single if line["video"] == record["video"]}
        turns = [tuple(turn) for turn in record["earlier"]] + [(record["question"], record["answer"])]
        assert len(turns) == len(asked) and set(turns) == asked


def test_tinyworlds_own_questions_pass(tmp_path):
    path = build_dataset(tmp_path, "train", 6, seconds=(2,), max_objects=4, progress=False)
    found = check_set(path)
    assert found.bad == [] and found.videos == 6
