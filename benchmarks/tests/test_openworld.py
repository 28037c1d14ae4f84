"""The world without a grid: its needles are exact, its answers follow from its pixels, and it comes in every size."""

import json
from collections import Counter, defaultdict
from dataclasses import replace

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.world.clip import read_video
from benchmarks.world.open_questions import OPEN_PLAN, WORDINGS, in_any_words, in_words, open_questions
from benchmarks.world.open_sets import VARIANTS, build_open
from benchmarks.world.open_tokens import OPEN_CONTEXT, OPEN_WORDS, count_pixels, name_tokens
from benchmarks.world.openworld import OPEN_SIZES, STAYS, draw_owners, make_open, render_open
from benchmarks.world.scene import CELL, FPS
from benchmarks.world.splits import split_seed
from benchmarks.world.token_words import UNNAMED, read_token_words
from qtsplus.cli.demonstration import CLIP, QUESTIONS

SEEDS = st.integers(0, 10**6)


def ask(world):
    return open_questions(world, count_pixels(world), np.random.default_rng(world.seed))


def tokens_of(changed: np.ndarray, grid: tuple[int, int, int]) -> list[int]:
    """The tokens of a grid in which a pixel `[T, H, W]` is true."""
    steps, rows, columns = grid
    cells = changed.reshape(steps, FPS, rows, CELL, columns, CELL).any((1, 3, 5))
    return np.flatnonzero(cells).tolist()


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, seconds=st.integers(1, 9), size=st.sampled_from(OPEN_SIZES))
def test_only_its_needle_changes_when_a_thing_is_left_out(seed, seconds, size):
    """The grain is left out, which could hide a difference of one."""
    world = replace(make_open(seed, seconds, size=size), grain=0, light=1.0, contrast=1.0)
    shown, whole = count_pixels(world), render_open(world)
    assert whole.shape == (seconds * FPS, size[1], size[0], 3)
    found = needles = 0
    for number, thing in enumerate(world.things):
        without = render_open(world, without=thing)
        changed = tokens_of((whole != without).any(-1), world.grid)
        needle = shown.needle(number).tolist()
        assert set(changed) <= set(needle)
        found, needles = found + len(changed), needles + len(needle)
    # What shows a pixel of a thing that looks like what is below, as red on red, is rare.
    assert found >= 0.9 * needles


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, seconds=st.integers(3, 12))
def test_answers_follow_from_the_pixels(seed, seconds):
    """From which thing every pixel shows alone, frame by frame."""
    world = make_open(seed, seconds)
    owners = draw_owners(world)
    seen = {
        thing.name: [frame for frame in range(world.frames) if (owners[frame] // 2 == number).any()]
        for number, thing in enumerate(world.things)
    }
    shapes = defaultdict(list)
    for thing in world.things:
        shapes[thing.shape].append(thing)
    for question in ask(world):
        name = " ".join(question.text.rstrip("?").removesuffix(" there").split()[-2:])
        if question.kind == "existence":
            assert (question.answer == "Yes") == (name in seen) == bool(question.needles)
        elif question.kind == "stay":
            share = len(seen[name]) / world.frames
            assert question.answer == STAYS[2 if share == 1 else 1 if share > 0.3 else 0]
        elif question.kind == "mark":
            (thing,) = [thing for thing in world.things if thing.name == name]
            assert question.answer == thing.mark and (owners == 2 * world.things.index(thing) + 1).any()
        elif question.kind == "colours":
            (thing,) = shapes[question.text.split()[-2]]
            frames = [thing.colour_at(frame) for frame in seen[thing.name]]
            assert list(dict.fromkeys(frames)) == question.answer.split()
        elif question.kind == "crossing":
            assert question.answer == crossing_by_pixels(world, owners)[0 if "first" in question.text else -1]
        else:
            assert question.answer.split() == [name.split()[0] for name in crossing_by_pixels(world, owners)]


def crossing_by_pixels(world, owners) -> list[str]:
    """The things whose middle, by the boxes of their pixels, comes to the other side; the first to do so first."""
    crossings = []
    for number, thing in enumerate(world.things):
        sides = []
        for frame in range(thing.start, thing.stop):
            columns = thing.boxes(world.frames)[frame][[0, 2]]
            drawn = np.flatnonzero((owners[frame] // 2 == number).any(0))
            assert not len(drawn) or columns[0] <= drawn[0] <= drawn[-1] < columns[1]
            sides.append(columns.mean() * 2 > world.size[0])
        turns = np.flatnonzero(np.diff(np.array(sides, int)))
        if len(turns):
            crossings.append((thing.start + turns[0], thing.name))
    return [name for _, name in sorted(crossings)]


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, seconds=st.integers(1, 8))
def test_a_token_says_what_most_of_it_shows(seed, seconds):
    world = make_open(seed, seconds)
    shown = count_pixels(world)
    named = name_tokens(world, shown)
    assert named.labels.shape == (*world.grid, 6) and named.things.shape == world.grid
    for place in np.ndindex(*world.grid):
        number, labels = named.things[place], named.labels[place]
        if number < 0:
            assert set(labels[:4].tolist()) in ({0}, {UNNAMED})
            assert labels[0] == UNNAMED or shown.bodies[(slice(None), *place)].max(initial=0) < 0.03 * FPS * CELL**2
            continue
        thing = world.things[number]
        assert shown.bodies[(number, *place)] == shown.bodies[(slice(None), *place)].max()
        assert OPEN_WORDS[labels[1]] == thing.shape
        assert labels[0] == UNNAMED or OPEN_WORDS[labels[0]] in thing.colours
        assert labels[2] in (UNNAMED, 0) or OPEN_WORDS[labels[2]] == thing.mark
        assert labels[4] == UNNAMED or OPEN_WORDS[labels[4]] in OPEN_CONTEXT[0]
        if labels[5] > 0:
            at = thing.colours.index(OPEN_WORDS[labels[0]])
            assert OPEN_WORDS[labels[5]] == thing.colours[at - 1]


def test_a_seed_gives_the_same_world_again():
    one, same, other = (make_open(seed, 5) for seed in (3, 3, 4))
    assert one == same != other
    assert (render_open(one) == render_open(same)).all()
    with pytest.raises(ValueError, match="seconds=0: expected a whole number from 1"):
        make_open(1, 0)
    with pytest.raises(ValueError, match=r"size=\(10, 10\): expected one of"):
        make_open(1, 5, size=(10, 10))


def test_no_answer_can_be_guessed_and_needles_go_from_one_token_to_a_hundred():
    answers, needles = defaultdict(Counter), []
    for seed in range(150):
        for question in ask(make_open(seed, 8)):
            answers[question.kind][question.answer] += 1
            needles.append(len(question.needles))
    assert set(answers) == set(OPEN_PLAN)
    guesses = {"mark": 0.33, "existence": 0.5, "stay": 0.36, "colours": 0.05, "crossing": 0.08, "order": 0.08}
    for kind, most in guesses.items():
        assert max(answers[kind].values()) / answers[kind].total() <= most, kind
    assert min(size for size in needles if size) == 1 and max(needles) >= 100


def test_training_asks_in_every_wording_but_the_last():
    rng, said = np.random.default_rng(0), defaultdict(set)
    for question in ask(make_open(4, 8)):
        for _ in range(400):
            said[question.kind, question.text].add(in_any_words(question.kind, question.text, rng))
    assert {kind for kind, _ in said} == set(OPEN_PLAN)
    for (kind, text), found in said.items():
        trained = {in_words(kind, text, number) for number in range(len(WORDINGS[kind]) - 1)}
        assert found == trained | {words.lower() for words in trained} and text in trained
        assert in_words(kind, text, -1).lower() not in {words.lower() for words in found}


def test_a_set_on_disk_holds_what_its_records_say(tmp_path):
    path = build_open(tmp_path, "test", 2, 4, variant="letterboxed")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {record["video"] for record in records} == {"test/000000.mp4", "test/000001.mp4"}
    record = records[0]
    world = VARIANTS["letterboxed"](record["seed"], record["seconds"])
    with av.open(str(tmp_path / record["video"])) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    drawn = render_open(world)
    assert frames.shape == drawn.shape and np.abs(frames.astype(int) - drawn).mean() < 12
    assert frames[:, :20].mean() < 12 and frames[:, 60:-60].mean() > 40
    labels = read_token_words(tmp_path / record["token_words"])
    assert (labels.things == name_tokens(world, count_pixels(world)).things).all()
    asked = {
        question.text: question
        for question in open_questions(
            world, count_pixels(world), np.random.default_rng([record["seed"], record["seconds"], 14])
        )
    }
    assert all(
        tuple(row["needles"][0]) == asked[row["question"]].needles for row in records if row["video"] == record["video"]
    )

    before = (tmp_path / record["video"]).stat().st_mtime_ns
    whole = path.read_bytes()
    assert build_open(tmp_path, "test", 2, 4, variant="letterboxed").read_bytes() == whole
    assert (tmp_path / record["video"]).stat().st_mtime_ns == before


def test_shifted_and_dark_videos_are_asked_the_same():
    plain, shifted, dark = (VARIANTS[name](11_000_000, 8) for name in ("plain", "shift14", "dark"))
    # Grain apart, the picture itself has moved.
    one, other = (draw_owners(world) for world in (plain, shifted))
    assert (one[:, :-14, :-14] == other[:, 14:, 14:]).all() and (one >= 0).sum() == (other >= 0).sum()
    assert dark.things == plain.things and render_open(dark).mean() < 0.7 * render_open(plain).mean()
    texts = [
        [(question.text, question.answer) for question in ask(world) if question.kind != "crossing"]
        for world in (plain, shifted, dark)  # the middle of the frame stays where it is
    ]
    assert texts[0] == texts[1] == texts[2]


def test_the_clip_of_the_demo_is_a_world_that_training_never_sees():
    world = make_open(split_seed("validation", 3525), 8)
    frames, _ = read_video(str(CLIP), lambda count, fps: list(range(count)))
    assert np.abs(frames.astype(int) - render_open(world)).mean() < 9  # as H.264 leaves it
    rng, plan = np.random.default_rng(0), dict.fromkeys(OPEN_PLAN, 100)
    asked = {question.text: question.answer for question in open_questions(world, count_pixels(world), rng, plan)}
    assert all(asked[question] == answer for question, answer in QUESTIONS)
