"""The world of real words, with drawings and films made here: nothing is downloaded."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.bases import REAL
from benchmarks.real import work
from benchmarks.real.base import IDS, make_config
from benchmarks.real.clips import Clip, clip_scene, join
from benchmarks.real.fetch import ELSEWHERE, SPLITS
from benchmarks.real.labels import Lesson, calibrate_seen, make_lessons, measure_seen, teach
from benchmarks.real.measure import RealTest, of_same_videos, over_videos, ways_elsewhere, with_another_thing
from benchmarks.real.questions import FURTHER, OTHER_WORDS, WORDINGS, YES_OR_NO, Question, ask_scene, join_things
from benchmarks.real.reading import Packer, Reader, answer_loss
from benchmarks.real.records import sightings
from benchmarks.real.words import KINDS, NAMES, OTHER_DRAWINGS, OTHER_THINGS
from benchmarks.real.world import make_scene, render
from qtsplus.evaluation.labelled import Sighting, sighting_tokens
from qtsplus.model.configuration_qtsplus import QTSplusConfig
from qtsplus.model.selector_qtsplus import QTSplusSelector

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?<|>_.,:; \n"


class Pictures:
    """Discs as drawings and noise as films."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.names, self.sets = list(NAMES), ["trained"] * len(NAMES)
        ring = np.linspace(-1, 1, 128)
        self.rgba = rng.integers(0, 256, (len(NAMES), 1, 1, 4), np.uint8).repeat(128, 1).repeat(128, 2)
        self.rgba[..., 3] = 255 * (ring[:, None] ** 2 + ring**2 < 1)
        films = [film for split in SPLITS.values() for film in split]
        self.films = {film: rng.integers(0, 256, (6, 240, 320, 3), np.uint8) for film in films}

    def of(self, *sets):
        return list(range(len(NAMES)))


@pytest.fixture(scope="module")
def pictures():
    return Pictures()


def test_what_is_never_trained_is_not_trained():
    assert not set(OTHER_THINGS) & set(NAMES) and set(OTHER_DRAWINGS) <= set(NAMES)
    for kind, (trained, held_out) in WORDINGS.items():
        assert not {*trained, *FURTHER[kind]} & set(held_out) and not set(trained) & set(FURTHER[kind])
    films = [film for split in ("train", "validation", "test") for film in SPLITS[split]]
    assert len(films) == len(set(films)) and not set(SPLITS["train"]) & set(ELSEWHERE)
    assert not set(SPLITS["varied"]) & {*SPLITS["test"], *SPLITS["validation"]}


@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_true(pictures, held_out):
    asked = set()
    for seed in range(20):
        scene, _, _ = clip_scene(pictures, seed, seconds=4)
        shown = {thing.name for thing in scene.things}
        questions = ask_scene(scene, 12, seed, held_out)
        assert questions == ask_scene(scene, 12, seed, held_out)
        for question in questions:
            asked.add(question.kind)
            assert set(question.about) <= shown
            if question.kind in ("kind", "which", "first"):
                assert question.answer.removeprefix("The ") == question.about[0]
            if question.kind in ("present", "absent", "some"):
                assert (question.answer == "Yes") == (bool(question.about) != (question.kind == "absent"))
            if question.kind == "first":
                starts = {thing.name: thing.start for thing in scene.things}
                assert starts[question.about[0]] < starts[question.about[1]]
    assert asked == set(WORDINGS)


def test_what_the_film_itself_shows_is_not_asked_as_missing(pictures):
    asked = [
        question
        for seed in range(60)
        for question in ask_scene(clip_scene(pictures, seed, "test", 4)[0], 12, seed, held_out=bool(seed % 2))
    ]
    for question in asked:
        if question.kind in ("present", "absent", "some") and not question.about:
            named = re.search(r"\b(vehicle|building|bus|a living creature)\b", question.question)
            assert question.doubtful or not named
        assert not (question.doubtful and question.kind in ("present", "absent", "some") and question.about)
    assert {one.kind for one in asked if one.doubtful} == {"present", "absent", "some", "kind", "which", "first"}
    assert {bool(OTHER_WORDS.search(one.question)) for one in asked if one.other_words} == {True}


def test_a_disguise_is_that_of_the_whole_clip(pictures):
    """And of half of the scenes, whose things are where they would be without it."""
    scenes = [make_scene(pictures, seed, 2, "varied", size=(112, 112)) for seed in range(20)]
    assert 4 < sum(scene.disguised for scene in scenes) < 16
    scene = replace(next(scene for scene in scenes if scene.disguised), grain=0, quality=100, things=())
    still = replace(scene, film="still")
    pictures.films["still"] = pictures.films[scene.film][:1].repeat(6, 0)
    frames, plain = (render(one, pictures)[0] for one in (still, replace(still, disguised=False)))
    assert np.array_equal(frames[0], frames[-1]) and not np.array_equal(frames, plain)


def test_an_overview_names_each_thing_of_its_parts_once():
    for seed in range(20):
        (question,) = join(seed).questions
        lines = question.question.split("\n")[1:]
        things = re.findall(r"the ([\w ]+?)(?=,| and |$)", " and ".join(lines).lower())
        assert len(lines) > 1
        assert question.answer == join_things(list(dict.fromkeys(things)))


@pytest.mark.parametrize("crowd", [False, True])
def test_a_thing_is_where_its_sightings_say(pictures, crowd):
    for seed in range(8):
        scene, frames, shown = clip_scene(pictures, seed, "test", 4, crowd)
        assert (
            len(frames) == scene.frames and shown.shape == scene.grid and set(KINDS) >= {t.name for t in scene.things}
        )
        assert set(np.unique(shown[shown >= 0])) == set(range(len(scene.things)))
        for place, thing in enumerate(scene.things):
            own = shown == place
            assert set(np.argwhere(own)[:, 0]) <= set(range(thing.start // 2, (thing.stop + 1) // 2))
            seen = [Sighting(**sighting) for sighting in sightings(own)]
            assert sighting_tokens(seen, scene.grid, range(scene.grid[0] + 1)).tolist() == np.flatnonzero(own).tolist()


def test_another_question_of_the_video_rests_on_something_else():
    rows = [{"video": video, "question": f"{video}{k}", "evidence": [[k // 2]]} for video in "ab" for k in range(4)]
    rows.append({"video": "c", "question": "c0", "evidence": []})
    asked = of_same_videos(Rows(rows))  # type: ignore[arg-type]
    for row, other in zip(rows[:8], asked[:8], strict=True):
        assert other[0] == row["video"] and int(other[1]) // 2 != row["evidence"][0][0]
    assert asked[8][0] != "c"


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)


def tokenizer(text, **_):
    return {"input_ids": [20 + LETTERS.index(letter) for letter in text]}


def small_base() -> Qwen2_5_VLForConditionalGeneration:
    config = make_config().to_dict()
    config["text_config"] |= {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config["text_config"] |= {"num_attention_heads": 1, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 2}
    config["vision_config"] |= {"depth": 1, "out_hidden_size": 64, "fullatt_block_indexes": [0]}
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config)).eval()


def test_a_packed_question_is_read_as_alone(monkeypatch):
    """One row holds a video and all its questions; the base reads each as a prompt of its own."""
    monkeypatch.setattr(work, "HALVES", False)
    base = small_base()
    reader, packer = Reader(base), Packer(tokenizer)
    grid = (2, 2, 3)
    places = torch.from_numpy(np.stack(np.unravel_index(np.arange(12), grid), 1))
    asked = tuple(Question("list", text, answer) for text, answer in (("What?", "Dogs"), ("Who is it?", "A cat")))
    clip = Clip(torch.randn(12, 64), places, 3, asked)
    packed = packer.pack([clip])
    with torch.no_grad():
        scores, said = reader(packed)
        loss, right = answer_loss((scores, said), packed)
    assert loss > 0 and [len(row) for row in right] == [2]
    begin = 0
    for question in asked:
        alone = packer.pack([SimpleNamespace(**{**vars(clip), "questions": (question,)})])
        ids = alone["input_ids"]
        kinds = (ids == IDS["<|video_pad|>"]).int() * 2
        positions, _ = base.model.get_rope_index(ids, kinds, video_grid_thw=torch.tensor([[2, 4, 6]]))
        assert torch.equal(positions, alone["positions"])
        with torch.no_grad():
            expected, _ = reader(alone)
        torch.testing.assert_close(scores[begin : begin + len(expected)], expected, rtol=1e-4, atol=1e-5)
        begin += len(expected)
    assert begin == len(scores)


def test_the_trained_parts_fit_their_model():
    """The language model itself is fetched when the model is built; what was taught here is small and committed."""
    path = REAL / "parts.safetensors"
    assert path.stat().st_size <= 12e6
    with torch.device("meta"):
        base = Qwen2_5_VLForConditionalGeneration(make_config())
        reader = Reader(base)
    expected = {f"tower.{name}": weight.shape for name, weight in base.model.visual.state_dict().items()}
    expected |= {f"lora.{name}": weight.shape for name, weight in reader.trained().items()}
    assert {name: part.shape for name, part in load_file(path).items()} == expected


def test_every_fourth_lesson_shows_nothing(pictures):
    lessons = make_lessons(pictures, small_base(), tokenizer, "varied", 8)
    for number, lesson in enumerate(lessons):
        is_plain = number % 4 == 3
        shown = [bool(needles.any()) for needles in lesson.needles]
        assert any(shown) != is_plain and len(lesson.queries) == len(shown)
        assert is_plain or all(shown[place] for place, kind in enumerate(lesson.kinds) if kind not in YES_OR_NO)


def test_labels_teach_a_selector_what_is_there():
    torch.manual_seed(0)
    config = QTSplusConfig(reduction="mean", null_token=True, reencode_layers=0)
    selector = QTSplusSelector(config, 64, 1, 1, mrope_section=(8, 12, 12))
    names = torch.randn(4, 64)
    lessons = []
    for shown in (0, 1, 2, 3, None):
        tokens = 0.1 * torch.randn(6, 64)
        needles = torch.zeros(4, 6, dtype=torch.bool)
        if shown is not None:
            tokens[2] = names[shown]
            needles[shown, 2] = True
        lessons.append(Lesson(tokens, [*names[:, None]], [*needles], ["present"] * 4))
    teach(selector, lessons, 0, steps=100)
    threshold, area = calibrate_seen(selector, lessons)
    assert 0 < threshold < 1 and area > 0.9
    rows = measure_seen(selector, {"bikes": lessons}, threshold)
    assert [rows["all"][answer] for answer in ("there", "missing", "missing, plain")] == [4, 12, 4]
    assert rows["all"]["area on plain videos"] > 0.9
    low, high = rows["all"]["interval in crowds"]
    assert low <= rows["all"]["area in crowds"] <= high


def test_figures_elsewhere_are_means_over_the_videos():
    result = {}
    for video in ELSEWHERE:
        clips = [f"{video} 0", f"{video} 1"]
        result[f"video-{video}, 8 tokens"] = {"right": 50.0, "rights": "10", "clips": clips}
    result["video-bikes, all tokens"] = {"right": 0.0, "rights": "0", "clips": ["bikes 0"]}
    assert ways_elsewhere(result) == [", 8 tokens"], "all tokens are not asked of all videos yet"
    crowds = over_videos(result, ", 8 tokens")
    assert crowds["right"] == 50.0 and crowds["over videos"] == [50.0, 50.0] and crowds["questions"] == 10


def test_another_thing_is_asked_for():
    rows = [{"question": "Is there a dog?"}, {"question": "which is there, the Car or the bus?"}, {"question": "What?"}]
    first, second, third = with_another_thing(SimpleNamespace(rows=rows))  # type: ignore[arg-type]
    assert first.startswith("Is there a ") and first.endswith("?") and "dog" not in first
    assert "the car" not in second.lower() and "bus" not in second and third == "What?"


def test_a_question_about_what_is_not_there_is_asked_too(tmp_path):
    path = tmp_path / "test.jsonl"
    row = {"video": "clip.mp4", "question": "Is there a cat?", "answer": "No", "kind": "absent", "evidence": []}
    path.write_text(json.dumps(row))
    processor = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0), prompt_ids=lambda _: [0])
    asked = RealTest(None, processor, path)
    assert [record.question for record in asked.records] == ["Is there a cat?"] and asked.counted.tolist() == [True]
