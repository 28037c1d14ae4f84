"""Answers of a set of questions, about videos that are encoded once."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from clips import write_records
from qtsplus.asking.answers import answer_questions
from qtsplus.asking.choice import Choice
from qtsplus.data.formats import read_records
from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.evaluate import Outcome, evaluate_records, tally
from qtsplus.model.sampling_qtsplus import Sampling
from qtsplus.training.models import make_model


@pytest.fixture(scope="module")
def evaluate(tiny_processor):
    """`evaluate_records` of one model."""
    model = make_model("qtsplus-tiny", None).eval()
    return partial(evaluate_records, model, tiny_processor)


@pytest.fixture
def record(tiny_mp4) -> VideoRecord:
    return VideoRecord(str(tiny_mp4), "What?", "red")


def test_the_batch_decides_nothing_and_records_keep_their_order(evaluate, tmp_path):
    records = list(read_records(write_records(tmp_path, 2, seconds=3, objects=5)))
    outcomes = evaluate(records, choice=Choice(retention=0.2), batch_size=5)
    assert [outcome.record for outcome in outcomes] == records
    for outcome in outcomes:
        assert 0 < outcome.kept_tokens < outcome.visual_tokens
    in_other_batches = evaluate(records[::2] + records[1::2], choice=Choice(retention=0.2), batch_size=9)
    assert in_other_batches == outcomes[::2] + outcomes[1::2]


def test_a_selection_is_of_one_call(evaluate, record):
    (own,) = evaluate([record], choice=Choice(retention=0.1))
    (everything,) = evaluate([record], choice=Choice(selection="all"))
    (again,) = evaluate([record], choice=Choice(retention=0.1))
    assert everything.kept_tokens == everything.visual_tokens
    assert own.kept_tokens == again.kept_tokens < everything.kept_tokens


def test_frames_are_sampled_as_is_said_and_by_the_rate_of_a_record(evaluate, record):
    (all_frames,) = evaluate([record])
    fewer, own_rate = evaluate([record, replace(record, fps=2)], sampling=Sampling(fps=1))
    (fewest,) = evaluate([record], sampling=Sampling(max_frames=2))
    assert fewest.visual_tokens < fewer.visual_tokens < all_frames.visual_tokens
    assert own_rate.visual_tokens == all_frames.visual_tokens


def test_a_question_longer_than_the_models_positions_is_refused_at_once(evaluate):
    record = VideoRecord("nowhere.mp4", "x " * 20_000, "red")
    with pytest.raises(ValueError, match="The question has .* tokens; expected fewer than the model's"):
        evaluate([record])


def test_an_unreadable_video_is_one_wrong_answer_among_the_others(evaluate, record, tmp_path):
    missing = VideoRecord(str(tmp_path / "missing.mp4"), "What?", "red")
    alone = evaluate([record, record])
    mixed = evaluate([missing, record, missing, record])
    assert mixed[1::2] == alone
    for outcome in mixed[::2]:
        assert not outcome.correct
        assert "missing.mp4" in outcome.unreadable
    summary = tally(mixed)
    assert summary["kept"] == tally(alone)["kept"]
    (unreadable,) = summary["unreadable"]
    assert unreadable["questions"] == 2


def test_a_method_that_fails_for_one_video_is_one_wrong_answer(evaluate, record, tiny_mp4, tmp_path):
    other = tmp_path / "other.mp4"
    shutil.copy(tiny_mp4, other)
    calls = []

    def method(candidates, n):
        calls.append(n)
        if len(calls) == 2:
            raise ValueError("This video is too much.")
        return torch.arange(n)

    records = [record, VideoRecord(str(other), "What?", "red")]
    first, second = evaluate(records, choice=Choice(retention=0.1, selection=method))
    assert first.unreadable is None
    assert second.unreadable == "This video is too much."


def test_a_question_is_asked_in_its_conversation_and_not_by_its_batch(
    evaluate,
    record,
    tiny_processor,
    tiny_mp4,
    monkeypatch,
):
    turn = ("What is there?", "A red circle.")
    later = VideoRecord(str(tiny_mp4), "And now?", "x " * 9, earlier=(turn,))
    longest = len(tiny_processor.text_ids(later.answer)) + 2
    asked = []

    def noting(model, processor, videos, questions, *, turns, **options):
        assert options["max_new_tokens"] == longest
        for question in questions:
            asked.append((question, turns))
        return answer_questions(model, processor, videos, questions, turns=turns, **options)

    monkeypatch.setattr("qtsplus.asking.session.answer_questions", noting)
    first, second, third = evaluate([record, later, record], choice=Choice(retention=0.1))
    assert asked == [("What?", ()), ("And now?", turn)]
    assert first == third
    assert second.record is later


@pytest.mark.parametrize(
    ("right", "videos", "low", "high"),
    [
        (0, 5, 0.0, 0.4345),  # ten questions about five videos say less
        (5, 1, 0.0546, 0.9454),  # one video says next to nothing
    ],
)
def test_the_interval_of_a_set_is_over_its_videos(right, videos, low, high):
    outcomes = []
    for index in range(10):
        record = VideoRecord(f"{index % videos}.mp4", "?", "!", kind="kind")
        outcomes.append(Outcome(record, correct=index < right))
    summary = tally(outcomes)
    assert summary["questions"] == 10
    assert summary["videos"] == videos
    assert summary["accuracy"] == right / 10
    assert summary["low"] == pytest.approx(low, abs=1e-4)
    assert summary["high"] == pytest.approx(high, abs=1e-4)
    assert summary["kinds"]["kind"]["high"] == summary["high"]
