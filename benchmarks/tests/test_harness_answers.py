"""What the plugin of lmms-eval keeps and refuses, without lmms-eval."""

import pytest

from benchmarks.harness.answers import AnswerLog, SampleAnswer
from benchmarks.harness.loading import Options


def test_answers_of_all_processes_are_found_by_the_next(tmp_path):
    asked, generation = {"video": "1.mp4", "prompt": "What?"}, {"max_new_tokens": 16}
    key = AnswerLog(None, 0, {"retention": 0.1}).key("task", 1, asked, generation)
    for rank in range(2):
        AnswerLog(tmp_path, rank, {}).add({f"{rank}": SampleAnswer(text=f"answer {rank}")})
    with (tmp_path / "answers-0.jsonl").open("a") as file:
        file.write('{"key": "cut')
    log = AnswerLog(tmp_path, 0, {})
    log.add({key: SampleAnswer(text="yes", kept_visual_tokens=3), "failed": SampleAnswer(text="", failed="no video")})
    assert log.found["failed"].failed == "no video"
    expected = {
        "0": SampleAnswer(text="answer 0"),
        "1": SampleAnswer(text="answer 1"),
        key: SampleAnswer(text="yes", kept_visual_tokens=3),
    }
    assert AnswerLog(tmp_path, 5, {}).found == expected, "what failed is tried again"
    (tmp_path / "answers-7.jsonl").write_text('{"key": "0", "text": "of another program"}\n')
    with pytest.raises(ValueError, match="choose another folder"):
        AnswerLog(tmp_path, 0, {})
    same = AnswerLog(None, 1, {"retention": 0.1})
    assert same.key("task", 1, dict(asked), generation) == key
    assert AnswerLog(None, 0, {"retention": 0.2}).key("task", 1, asked, generation) != key
    assert same.key("task", 1, {**asked, "video": "2.mp4"}, generation) != key
    assert same.key("task", 1, asked, {"max_new_tokens": 8}) != key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention": 2}, "retention=2: expected a fraction"),
        ({"selection": "best"}, "'best'.*uniform"),
        ({"max_visual_tokens": 0}, "Got max_visual_tokens=0; expected"),
        ({"fps": 0}, "Got fps=0"),
        ({"fps": 1, "num_frames": 4}, "Got num_frames with fps or max_frames"),
        ({"max_frames": 1, "num_frames": 4}, "Got num_frames with fps or max_frames"),
        ({"max_pixels": -4}, "Got max_pixels=-4"),
        ({"selection": "all", "retention": 0.1}, 'selection="all" keeps every visual token'),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)
