"""What the learned benchmark asks by, and what it makes of the answers."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learned import policies
from benchmarks.learned.questions import QuestionSet, with_other_questions, with_questions_of_others
from benchmarks.learned.report import write_report
from benchmarks.learned.statistics import differences, question_driven, table_rows
from benchmarks.learned.tokens import object_tokens, oracle_order, recalls
from benchmarks.world.crowd import LABEL_WORDS, make_crowd, token_labels
from benchmarks.world.tinyworld import build_dataset
from qtsplus.data.records import VideoRecord


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    build_dataset(folder / "crowd", "test", 2, seconds=(2,), max_objects=20, progress=False, crowd=True)
    build_dataset(folder / "sparse", "test", 2, seconds=(3,), max_objects=2, progress=False)
    build_dataset(folder / "sparse", "train", 1, seconds=(3,), max_objects=2, progress=False)
    return folder


def test_a_set_knows_its_world(files):
    crowd, sparse = (QuestionSet.read(files / name / "test.jsonl") for name in ("crowd", "sparse"))
    assert crowd.crowd and not sparse.crowd
    assert set(crowd.worlds) == {record.video for record in crowd.records}
    assert all(len(world.objects) >= 20 for world in crowd.worlds.values())
    for questions in (crowd, sparse):
        for record, needles in zip(questions.records, questions.needles, strict=True):
            # The world made again shows what the record says.
            boxes = {tuple(seen.box) for needle in needles for seen in needle}
            world = questions.worlds[record.video]
            times = np.arange(0, world.seconds, 0.5)
            assert boxes <= {item.box_at(time) for item in world.objects for time in times}


def test_a_training_split_and_a_mixture_of_worlds_are_refused(files, tmp_path):
    with pytest.raises(ValueError, match="training split"):
        QuestionSet.read(files / "sparse/train.jsonl")
    lines = [(files / f"{name}/test.jsonl").read_text() for name in ("crowd", "sparse")]
    (tmp_path / "both.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match="crowded and sparse"):
        QuestionSet.read(tmp_path / "both.jsonl")
    record = json.loads(lines[1].splitlines()[-1])
    del record["max_objects"]
    (tmp_path / "old.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="lacks 'max_objects'"):
        QuestionSet.read(tmp_path / "old.jsonl")


def test_a_shuffled_question_is_about_another_video(files):
    records = QuestionSet.read(files / "sparse/test.jsonl").records
    shuffled = with_questions_of_others(records, seed=0)
    asked = {(record.video, record.query or record.question) for record in records}
    for own, other in zip(records, shuffled, strict=True):
        assert (own.question, own.answer, own.video) == (other.question, other.answer, other.video)
        assert any(query == other.query and video != own.video for video, query in asked)
    assert with_questions_of_others(records[:1], seed=0) == [None]


def test_another_question_of_the_same_video_looks_elsewhere():
    records = [VideoRecord(video, f"{video}{number}?", "!") for video in "ab" for number in range(3)]
    tokens = [[[0, 1]], [[1, 2]], [[3]], [[0]], [], [[0, 5]]]
    needles = [[np.array(needle) for needle in found] for found in tokens]
    others = with_other_questions(records, needles, seed=0)
    queries = [other and other.query for other in others]
    assert queries[0] == queries[1] == "a2?" and queries[2] in ("a0?", "a1?")
    # One without needles has nothing to look at; it may be asked by whatever looks somewhere.
    assert queries[3] is None and queries[4] in ("b0?", "b2?") and queries[5] is None
    assert [other.question for other in others if other] == ["a0?", "a1?", "a2?", "b1?"]


def test_object_tokens_are_those_with_a_label():
    world, grid = make_crowd(0, 4), (4, 6, 6)
    labelled = token_labels(world, grid)[..., 0].ravel() != LABEL_WORDS.index("nothing")
    np.testing.assert_array_equal(object_tokens(world, grid, 1.0), np.flatnonzero(labelled))


def test_recalls_of_needles_and_of_other_objects():
    needles, objects = [np.array([1, 2]), np.array([5, 6])], np.array([1, 2, 5, 6, 8, 9])
    assert recalls([0, 1, 9], needles, objects) == {"recall": 0.5, "token_recall": 0.25, "distractors": 0.5}
    assert recalls([0, 1, 9], [], objects) == {"recall": None, "token_recall": None, "distractors": 1 / 3}


def test_an_oracle_keeps_what_it_knows_first():
    needles, objects = [np.array([4]), np.array([7, 8])], np.array([2, 4, 7, 8])
    for seed in range(5):
        rng = np.random.default_rng(seed)
        order = oracle_order(policies.NEEDLES, needles, objects, 10, rng)
        assert set(order[:3]) == {4, 7, 8} and sorted(order) == list(range(10))
        order = oracle_order(policies.SALIENCE, needles, objects, 10, rng)
        assert set(order[:4]) == {2, 4, 7, 8} and sorted(order) == list(range(10))


VIDEOS = ["a", "a", "b", "b", "c", "c"]


def outcome(name, seed, correct, **more):
    return {"policy": policies.Policy(name, policies.DEFAULT, 0.1), "seed": seed, "correct": correct, **more}


def test_gains_are_over_the_same_questions_and_their_interval_over_videos():
    records = [VideoRecord(video, "?", "!", kind="when") for video in VIDEOS]
    found = [
        outcome(policies.DEFAULT, 0, [1, 1, 1, 1, 0, 1]),
        outcome(policies.DEFAULT, 1, [1, 1, 0, 1, 0, 1]),
        outcome("random", 0, [0, 0, 1, 1, 0, 1]),
        outcome("random", 1, [0, 0, 0, 1, 0, 1]),
    ]
    (row,) = differences(found, records, crowd=False)
    gain = row["gain"]["when_and_order"]
    # The videos' means are 1, 0 and 0: of three videos with t = 4.3, the interval is all that a gain can be.
    assert gain["mean"] == pytest.approx(1 / 3)
    assert (gain["low"], gain["high"]) == (-1, 1) and gain["p"] == pytest.approx(0.4226, abs=1e-4)


def shares(own, wrong, uniform, overlap, videos=VIDEOS):
    records = [VideoRecord(video, "?", "!", kind="attribute") for video in videos]
    wrong_policy = policies.Policy("w", policies.DEFAULT, 0.1, wrong_question=policies.SAME_VIDEO)
    found = [
        outcome(policies.DEFAULT, 0, own),
        outcome("uniform", 0, uniform),
        outcome(policies.SALIENCE, 0, uniform),
        {"policy": wrong_policy, "seed": 0, "correct": wrong, "jaccard": overlap},
    ]
    return {row["group"]: row for row in question_driven(found, records, crowd=True)}


def test_the_share_that_a_question_drives_counts_questions_with_a_wrong_one():
    rows = shares([1, 1, 1, 1, 0, 1], [0, 1, 0, 0, None, 0], [0, 0, 1, 0, 0, 0], [0.5, 1.0, 0.0, 0.5, None, 0.0])
    assert set(rows) == {"all", "point", "two_word"}
    for row in rows.values():
        assert row["questions"] == 5
        assert (row["own"], row["wrong"], row["uniform"]) == (1.0, 0.2, 0.2)
        assert row["share"]["mean"] == pytest.approx(1.0)
        assert row["share"]["low"] < 1 < row["share"]["high"] < 3
        assert row["disagreement"] == pytest.approx(1 - 2.0 / 5)


def test_a_share_has_an_interval_that_shrinks_with_videos_and_none_without_a_gain():
    own, wrong, uniform = [1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]

    def share_of(copies):
        videos = [f"{place}-{copy}" for copy in range(copies) for place in range(4)]
        overlap = [0.0] * 4 * copies
        return shares(own * copies, wrong * copies, uniform * copies, overlap, videos)["all"]["share"]

    few, many = share_of(5), share_of(80)
    assert few["mean"] == many["mean"] == pytest.approx(2 / 3)
    assert 0 < many["high"] - many["low"] < (few["high"] - few["low"]) / 3
    assert shares(own, wrong, own, [0.0] * 4, list("abcd"))["all"]["share"] == {}


def test_rows_leave_out_what_was_not_asked():
    measured = {"kept": [1, None, 3], "asked": [1, None, 3], "visual": [10, None, 10], "recall": [1.0, None, None]}
    rows = table_rows([outcome("random", 0, [True, None, False], **measured)], ["attribute", "when", "when"], True)
    assert [row["seed"] for row in rows] == [None, 0]
    row = rows[0]
    assert (row["questions"], row["accuracy"], row["kept"], row["kept_fraction"]) == (2, 0.5, 2.0, 0.2)
    assert row["needle_recall"] == 1.0 and row["token_recall"] is None
    assert {name: group["questions"] for name, group in row["groups"].items()} == {
        "all": 2,
        "point": 1,
        "two_word": 1,
        "when_and_order": 1,
    }


def test_the_committed_figures_give_the_committed_page(tmp_path):
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    rows, details = (
        json.loads((results / name).read_text(encoding="utf-8")) for name in ("learned.json", "learned-details.json")
    )
    write_report(rows, details, tmp_path)
    assert (tmp_path / "learned.md").read_text(encoding="utf-8") == (results / "learned.md").read_text(encoding="utf-8")
