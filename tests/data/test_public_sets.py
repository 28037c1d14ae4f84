"""The scripts in recipes/ that turn public sets into records, on small files in the published shapes."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from qtsplus.data.formats import iter_rows, read_records
from qtsplus.data.records import Caption
from qtsplus.evaluation.labelled import Sighting, labelled_questions

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

QUESTIONS = """video_id,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4
111,2697,640,480,why did the boy get up,unwrap it,1,CW,share it,sit down,unwrap it,play,point
222,1906,640,480,how does the man sell the watch,2,7,CH,1,2,3,4,5
111,2697,640,480,what does the dog do at the end,runs,3,TN,runs,barks,sleeps,jumps,eats
"""
SPANS = {"1": [[1.2, 5.8], [20.0, 23.5]], "3": [[80.1, 95], [97, 98]]}
MOMENTS = {"111": {"duration": 90, "location": SPANS, "fps": 29.97}}
# Two questions about the same moment, and a question that is asked twice.
ALONE = """
{"video": "a.mp4", "question": "Who?", "answer": "Ann", "evidence": [[{"start": 1, "end": 3}]]}
{"video": "a.mp4", "question": "Why?", "answer": "So", "evidence": [[{"start": 2, "end": 4}]]}
{"video": "b.mp4", "question": "How?", "answer": "So"}
{"video": "b.mp4", "question": "how?", "answer": "So"}
"""
REFUSED = """sharegptvideo.py tool.jsonl out.jsonl
controls.py alone.jsonl
nextgqa.py rows.jsonl out.jsonl
nextgqa.py cut.csv out.jsonl
nextgqa.py val.csv out.jsonl --moments val.csv
nextgqa.py val.csv out.jsonl --moments other.json
compare.py val.csv val.csv
compare.py own.json map.json
compare.py own.json fewer.json
compare.py own.json unjudged.json"""
PLACES = {"111": "0101/111", "222": "0016/222"}
CONVERSATION = {
    "video": "v_abc-Scene-011",
    "conversations": [
        {"from": "human", "value": "<video>\nWhat is the setting of the video?"},
        {"from": "gpt", "value": "A newsroom."},
    ],
    "id": "v_abc-Scene-011_1",
}


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Runs a script of recipes/ in a folder with the files of the sets; returns the file that it writes."""
    monkeypatch.chdir(tmp_path)
    Path("val.csv").write_text(QUESTIONS)
    Path("gsub_val.json").write_text(json.dumps(MOMENTS))
    Path("map.json").write_text(json.dumps(PLACES))
    Path("rows.jsonl").write_text(2 * (json.dumps(CONVERSATION) + "\n"))

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(RECIPES / script), run_name="__main__")
        return tmp_path / "out.jsonl"

    return run


def test_next_gqa_s_moments_are_evidence(convert):
    path = convert("nextgqa.py", "val.csv", "out.jsonl", "--videos", "map.json", "--moments", "gsub_val.json")
    first, second = labelled_questions(path)
    record = first.record
    assert record.video == str(path.parent / "0101/111")
    assert record.query == "Why did the boy get up?"
    lines = record.question.splitlines()
    assert lines == [record.query, "A. share it", "B. sit down", "C. unwrap it", "D. play", "E. point", lines[-1]]
    assert record.answer == "C"
    assert record.options == ("share it", "sit down", "unwrap it", "play", "point")
    assert first.needles == [[Sighting(1.2, 5.8), Sighting(20.0, 23.5)]]
    assert second.needles == [[Sighting(80.1, 90)]], "moments end with their video"
    assert read_records(path)[2].answer == "B", "NExT-GQA has the text of an answer, also of the answer 2"


def test_next_qa_has_answers_by_number_and_may_be_asked_without_options(convert):
    rows = QUESTIONS.replace("video_id", "video").replace(",runs,3,TN", ",0,3,TN").replace(",unwrap it,1", ",2,1")
    Path("train.csv").write_text(rows)
    _, record, counted = read_records(convert("nextgqa.py", "train.csv", "out.jsonl", "--open"))
    assert counted.answer == "3", "the number 2 is not the option with the text 2"
    assert (record.question, record.answer) == ("What does the dog do at the end?", "runs")
    assert record.options is None


def test_sharegptvideo_s_conversations_are_questions_or_captions(convert):
    (record,) = read_records(convert("sharegptvideo.py", "rows.jsonl", "out.jsonl", "--limit", "1"))
    assert (record.question, record.answer) == ("What is the setting of the video?", "A newsroom.")
    assert Path(record.video).name == "v_abc-Scene-011"
    assert record.fps == 2
    row, _ = iter_rows(convert("sharegptvideo.py", "rows.jsonl", "out.jsonl", "--captions"))
    assert row.record == Caption(vision_id="v_abc-Scene-011", caption="A newsroom.", fps=2, id=row.record.id)


def test_sets_that_cannot_be_used_are_refused_in_words(convert, capsys):
    Path("tool.jsonl").write_text('{"video": "a", "conversations": [{"from": "tool", "value": "{}"}]}')
    Path("alone.jsonl").write_text(ALONE)
    Path("cut.csv").write_text(QUESTIONS[:-6])
    Path("other.json").write_text(json.dumps({"333": MOMENTS["111"]}))
    Path("own.json").write_text(evaluation([True, False]))
    Path("fewer.json").write_text(evaluation([True]))
    gone = {"video": "1.mp4", "reason": "The judge is away.", "questions": 1}
    Path("unjudged.json").write_text(evaluation([True, False], gone))
    for command in REFUSED.splitlines():
        with pytest.raises(SystemExit):
            convert(*command.split())
    shown = capsys.readouterr().err
    assert "row 1 of tool.jsonl (a) cannot be used: conversations has turns of ['tool']" in shown
    assert "alone.jsonl needs several different questions about each video, and two videos at least" in shown
    assert "rows.jsonl has the columns" in shown
    assert "row 3 of cut.csv has not as many values as there are columns" in shown
    assert "val.csv is not JSON that can be read" in shown
    assert "other.json has no moment of a question of val.csv" in shown
    assert "map.json: answers" in shown
    assert "fewer.json has other questions than own.json" in shown
    assert "1 of 2 questions of unjudged.json could not be asked or judged" in shown


def evaluation(rights, *unreadable):
    """What `qtsplus eval --json` prints, of a question about each of so many videos."""
    answers = [{"video": f"{number}.mp4", "question": "Who?", "correct": right} for number, right in enumerate(rights)]
    return json.dumps({"answers": answers, "unreadable": unreadable})


def test_evaluations_are_compared_question_by_question(convert, capsys):
    """Of 40 videos 10 more are right and none less: an interval over 0, where two separate ones overlap."""
    Path("own.json").write_text(evaluation([number < 20 for number in range(40)]))
    Path("other.json").write_text(evaluation([number < 10 for number in range(40)]))
    convert("compare.py", "own.json", "other.json", "own.json")
    own, other, same = capsys.readouterr().out.splitlines()
    assert own == "own.json: 50.0% of 40 questions about 40 videos"
    assert other.startswith("other.json: 25.0%, +25.0% [+12.5%, ")
    assert same == "own.json: 50.0%, +0.0% [+0.0%, +0.0%]"


def test_questions_that_cannot_be_used_are_left_out_and_counted(convert, capsys):
    Path("val.csv").write_text(QUESTIONS + "111,2697,640,480,who,Max,9,TN,Ann,Sam,Bob,Joe,Sue\n")
    assert len(read_records(convert("nextgqa.py", "val.csv", "out.jsonl"))) == 3
    assert "Left out: 1, such as 9 about 111: its answer 'Max' is none of its options" in capsys.readouterr().err


def test_controls_select_by_another_question_of_the_same_video_and_of_another(convert):
    convert("nextgqa.py", "val.csv", "out.jsonl", "--moments", "gsub_val.json")
    own = read_records(convert("controls.py", "out.jsonl").with_name("out-own.jsonl"))
    assert len(own) == 2  # the third has no other question about its video
    for name, queries in (
        ("question", ["What does the dog do at the end?", "Why did the boy get up?"]),
        ("video", 2 * ["How does the man sell the watch?"]),
    ):
        control = read_records(Path(f"out-other-{name}.jsonl"))
        assert [record.query for record in control] == queries
        assert [record.question for record in control] == [record.question for record in own]
        assert [record.answer for record in control] == [record.answer for record in own]
