"""QTS-VSCQ2 and QTS-VQA: what a video teacher is sent, the screen and the filters."""

import json
from functools import partial

import pytest
from PIL import Image

from benchmarks.synthesis.endpoint import Endpoint
from benchmarks.synthesis.engine import Job, run_job
from benchmarks.synthesis.video_steps import (
    VideoTeacher,
    answer_fault,
    read_letter,
    screen,
    spread_frames,
    write_answers,
    write_summaries,
)
from qtsplus.data.records import Caption, Choice, VideoRecord, parse_record
from scripted_server import KEY, scripted_server


def choice(question, answer="A", vision_id="clip.mp4", **more):
    options = {"A": "red", "B": "blue", "C": "green", "D": "grey"}
    return Choice(vision_id=vision_id, id=question, question=question, options=options, answer=answer, **more)


def make(name, step, url, records, find, out):
    teacher = VideoTeacher(Endpoint(url, "teacher", KEY, timeout=5.0), find, frames=4)
    return run_job(Job(name, lambda: records, partial(step, teacher), teacher.endpoint, teacher.settings()), out)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" b.", "B"),
        ("(C) green", "C"),
        ("**D**", "D"),
        ("The answer is B.", "B"),
        ("The correct option is: (c)", "C"),
        ("Answer: D", "D"),
        ("It shows a dog, so I choose B.", "B"),
        ("<think>A or B? A.</think>B", "B"),
        ("A", "A"),
        ("A. red", "A"),
        ("A dog", None),
        ("A dog, so it must be C.", "C"),
        ("B or C", "B"),
        ("It may be B or C.", None),
        ("I cannot tell.", None),
        ("Because", None),
        ("", None),
    ],
)
def test_letters_are_read(text, letter):
    assert read_letter(text) == letter


def test_the_screen(tmp_path, tiny_mp4):
    """One question for each fate: right, wrong, undecided, and without a video."""
    records = [
        choice("Right?", "B"),
        choice("Wrong?", "D"),
        choice("Undecided?", "A"),
        choice("Without a video?", "A", vision_id="missing.mp4"),
    ]
    letters = {"Right?": "B", "Wrong?": "A"}
    rules = [{"contains": "Undecided?", "then": ["prose"]}]

    def find(name):
        return str(tiny_mp4.parent / name)

    with scripted_server(tmp_path, letters=letters, rules=rules) as (url, log):
        kept = make("vscq2", screen, url, records, find, tmp_path / "out")
        requests = rows(log)
    assert rows(kept) == [records[0].row()]
    dropped = {row["id"]: (row["reason"], row["said"]) for row in rows(tmp_path / "out" / "dropped.jsonl")}
    assert dropped == {"Wrong?": ("wrong: A for D", "A"), "Undecided?": ("no letter", "I cannot tell.")}
    (failed,) = rows(tmp_path / "out" / "failed.jsonl")
    assert failed["id"] == "Without a video?"
    assert "The video cannot be read: There is no video at" in failed["reasons"][0]
    assert [request["media"] for request in requests] == [{"text": 2, "image_url": 4}] * 3


def test_frames_are_spread(tmp_path, tiny_mp4):
    assert spread_frames(str(tiny_mp4), 5).shape == (5, 112, 112, 3)
    for index in range(7):
        Image.new("RGB", (28, 28), (index, 0, 0)).save(tmp_path / f"{index}.png")
    frames = spread_frames(str(tmp_path), 3)
    assert frames[:, 0, 0, 0].tolist() == [0, 2, 4]
    assert len(spread_frames(str(tmp_path), 50)) == 7


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("A red ball.", None),
        ("", "too short: 0 words"),
        ("...", "too short: 0 words"),
        ("No, no, no.", None),
        ("word " * 9, "repeats itself"),
        ("one two three " * 10, "too long: 30 words"),
        ("the dog runs and the dog runs and the dog runs and", "repeats itself"),
        ("The man opens the door, walks in, takes off his coat and sits down at the table.", None),
        ("狗在草地上跑，然後坐在樹下休息。", None),
    ],
)
def test_filters_of_answers(text, fault):
    assert answer_fault(text, 20) == fault


def test_answers(tmp_path, tiny_mp4):
    records = [choice("Fine?", type="object"), choice("Repeats?"), choice("Cut?")]
    rules = [{"contains": "Repeats?", "then": ["repeats"]}, {"contains": "Cut?", "then": ["truncated"]}]
    with scripted_server(tmp_path, rules=rules, answer="<think>Hm.</think>A red ball rolls.") as (url, log):
        kept = make("vqa", write_answers, url, records, lambda name: str(tiny_mp4), tmp_path / "out")
        asked = [request["text"] for request in rows(log)]
    told = {"vision_id": "clip.mp4", "id": "Fine?", "question": "Fine?", "type": "object"}
    assert rows(kept) == [{**told, "answer": "A red ball rolls."}]
    dropped = {row["id"]: row["reason"] for row in rows(tmp_path / "out" / "dropped.jsonl")}
    assert dropped == {"Repeats?": "repeats itself", "Cut?": "cut off"}
    assert not any("A. red" in text for text in asked)


@pytest.mark.parametrize(
    ("said", "kept", "reason"),
    [
        (
            "1. A ball rolls in.\n2) A dog takes it.\n- Both leave.",
            "A ball rolls in.\nA dog takes it.\nBoth leave.",
            None,
        ),
        ("A dog runs.\nA dog runs.", None, "repeats itself"),
        ("<think>What is there?</think>\n", None, "no event"),
        ("word " * 9, None, "repeats itself"),
    ],
)
def test_summaries_are_events_a_line_each(tmp_path, tiny_mp4, said, kept, reason):
    records = [Caption(vision_id="clip.mp4", id="c", caption="Anything.")]
    with scripted_server(tmp_path, answer=said) as (url, log):
        made = make("summaries", write_summaries, url, records, lambda name: str(tiny_mp4), tmp_path / "out")
        (asked,) = rows(log)
    assert "Anything" not in asked["text"] and "in order" in asked["text"]
    parsed = [parse_record(row) for row in rows(made)]
    question = "Summarise the video: what happens, in order?"
    assert parsed == ([VideoRecord("clip.mp4", question, kept, kind="events", id="c")] if kept else [])
    assert [row["reason"] for row in rows(tmp_path / "out" / "dropped.jsonl")] == ([reason] if reason else [])
