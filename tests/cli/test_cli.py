"""`qtsplus` as a user runs it: results on standard output, bad input as one line and exit code 2."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image
from typer.testing import CliRunner

import qtsplus
from clips import write_records
from qtsplus.asking.evidence import Interval
from qtsplus.cli import app
from qtsplus.cli.asking import place, print_answer
from qtsplus.cli.demonstration import CLIP, run_demo
from qtsplus.hub import loading
from refusals import fill

QUESTION = "What moves?"


@pytest.fixture
def ask(tiny_published):
    """Runs `qtsplus ask` on the tiny model."""

    def run(*arguments):
        return invoke("ask", *arguments, "--model", tiny_published)

    return run


def invoke(*line):
    return CliRunner().invoke(app, [str(word) for word in line])


def read_json(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def frame_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frames")
    for index in range(6):
        Image.new("RGB", (56, 84), (40 * index, 90, 200)).save(folder / f"frame{index}.png")
    return folder


def assert_refused(result, *words):
    assert result.exit_code == 2
    assert result.stdout == ""
    (error,) = result.stderr.splitlines()
    assert error.startswith("qtsplus: "), result.stderr
    for word in words:
        assert word in error


def test_ask_prints_one_json_object_and_nothing_else(tiny_mp4, tmp_path):
    (tmp_path / "home").touch()  # the bundled model needs nothing of the user's
    home = str(tmp_path / "home")
    environment = os.environ | {"HOME": home, "HF_HOME": home}
    result = subprocess.run(
        [sys.executable, "-m", "qtsplus.cli", "ask", str(tiny_mp4), QUESTION, "--json", "--max-new-tokens", "4"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    assert "bundled tiny model" in result.stderr, "what answers has to be said"
    answer = json.loads(result.stdout)
    about_video = {"video", "frames", "seconds_of_video", "unheard", "largest_gap", "trained_seconds", "warnings"}
    about_tokens = {"visual_tokens", "kept_tokens", "rho", "evidence", "seen", "seen_threshold"}
    assert set(answer) == {"answer", "timings"} | about_video | about_tokens
    assert answer["video"] == str(tiny_mp4)
    assert answer["frames"] == 8  # 4 s at the processor's 2 frames per second
    assert answer["seconds_of_video"] == pytest.approx(4)
    assert answer["largest_gap"] == pytest.approx(0.5)
    assert 1 <= answer["kept_tokens"] < answer["visual_tokens"]
    weights = [interval["weight"] for interval in answer["evidence"]]
    assert 0 < sum(weights) < 1 + 1e-6
    for interval in answer["evidence"]:
        assert set(interval) == {"video", "start", "end", "weight", "box", "pixels"}
        assert 0 <= interval["start"] < interval["end"] <= 4
    assert set(answer["timings"]) == {"load", "encode", "first_token", "generate"}
    assert all(seconds > 0 for seconds in answer["timings"].values())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--retention", "0.25"], {"rho": pytest.approx(0.25), "visual_tokens": 64, "kept_tokens": 16}),
        (["--max-visual-tokens", "1"], {"kept_tokens": 1}),
        (["--fps", "4"], {"frames": 16, "seconds_of_video": pytest.approx(4)}),
    ],
)
def test_an_option_does_what_it_says(ask, tiny_mp4, options, expected):
    answer = read_json(ask(tiny_mp4, QUESTION, "--json", *options))
    assert {name: answer[name] for name in expected} == expected


def test_a_folder_of_frames_lasts_as_its_rate_says(ask, frame_folder):
    answer = read_json(ask(frame_folder, QUESTION, "--json", "--fps", "0.5"))
    assert answer["frames"] == 6
    assert answer["seconds_of_video"] == pytest.approx(12)


def test_an_address_is_asked_about_like_a_file(ask, tiny_mp4):
    handler = partial(SimpleHTTPRequestHandler, directory=str(tiny_mp4.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{tiny_mp4.name}"
        result = ask(address, QUESTION, "--json", "--max-new-tokens", "2")
        server.shutdown()
    assert read_json(result)["video"] == address


@pytest.mark.parametrize(("name", "revision"), [("org/name", None), ("org/name@0123abc", "0123abc")])
def test_a_model_on_the_hub_is_loaded_at_its_revision(tiny_mp4, monkeypatch, name, revision):
    def load(*arguments, **options):
        assert arguments == ("org/name", None, "auto")
        assert options == {"revision": revision}
        raise ValueError("stop here")

    monkeypatch.setattr(loading, "load", load)
    assert_refused(invoke("ask", tiny_mp4, QUESTION, "--model", name), "stop here")


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ([], "of the relevance"),
        (["--selection", "uniform"], "of the kept tokens"),
    ],
)
def test_the_human_output_names_tokens_seconds_and_stages(ask, tiny_mp4, options, share):
    result = ask(tiny_mp4, QUESTION, *options)
    assert result.exit_code == 0, result.stderr
    for words in ("visual tokens", "4.0 s", share, "load", "encode", "first token", "generate"):
        assert words in result.stdout


MODEL = ["--model", "{model}"]
ASK = ["ask", "{video}", QUESTION, *MODEL]
REFUSED = [
    (["ask", "{missing}.mp4", QUESTION, *MODEL], ["no video at"]),
    (["ask", "{cut}", QUESTION, *MODEL], ["/cut'"]),
    (["ask", "{empty}", QUESTION, *MODEL], ["/empty'"]),
    (["ask", "{frames}", QUESTION, *MODEL], ["fps="]),
    (["ask", "{empty_folder}", QUESTION, *MODEL, "--fps", "1"], ["holds no frames"]),
    ([*ASK, "--retention", "0"], ["--retention is 0", "(0, 1]"]),
    ([*ASK, "--retention", "1.5"], ["--retention is 1.5", "(0, 1]"]),
    ([*ASK, "--retention", "nan"], ["--retention is nan", "(0, 1]"]),
    ([*ASK, "--device", "toaster"], ["'toaster' cannot be used"]),
    ([*ASK, "--device", "cuda:99"], ["'cuda:99' cannot be used"]),
    (["ask", "{video}", QUESTION, "--model", "{missing}"], ["missing"]),
    (["index", "{empty_folder}", "--out", "{out}", "--model", "{missing}"], ["There is no video in"]),
    (["publish", "qtsplus-99b", "--to", "{out}"], ["qtsplus-99b", "qtsplus-tiny"]),
    (["eval", "{records}", "--selection", "best"], ["best", "uniform"]),
]


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=str)
def test_what_is_refused_is_named(corpus, line, words):
    filled = [fill(argument, corpus) for argument in line]
    assert_refused(invoke(*filled), *words)
    assert not Path(corpus["out"]).exists()


DASHES = ["ask {} What?", "chat a.mp4 {}", "index {} --out=out", "data check {}", "train {} --dry-run"]


@pytest.mark.parametrize("line", DASHES)
def test_a_file_whose_name_begins_with_a_dash_is_no_option(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-dash").touch()
    assert_refused(invoke(*line.format("-dash").split()), "'-dash'", "write ./-dash for the file")
    assert "There is no file '-dash'" not in invoke("data", "check", "--", "-dash").stderr
    assert "for the file" not in invoke("index", "none", "--out", "-dash").stderr


def test_the_version():
    assert invoke("--version").stdout == f"qtsplus {qtsplus.__version__}\n"


def test_the_weights_dtype_can_be_chosen(ask, tiny_mp4):
    result = ask(tiny_mp4, QUESTION, "--json", "--dtype", "bfloat16", "--max-new-tokens", "2")
    assert result.exit_code == 0, result.stderr


def test_the_demo_answers_two_questions_rightly_from_different_tokens(tmp_path):
    answers = run_demo(tmp_path)
    for question, answer in answers:
        assert answer.answer == question.answer
    one, other = (answer.keep_map for _, answer in answers)
    assert (one & other).sum() < 0.5 * one.sum()
    for number in (1, 2):
        with Image.open(tmp_path / f"evidence-{number}.png") as picture:
            assert picture.height > 200


def test_the_demo_prints_what_is_true_and_replaces_its_own_files(tmp_path):
    for _ in range(2):
        result = invoke("demo", "--out", tmp_path / "demo")
        assert result.exit_code == 0, result.output
        told = re.findall(r"\(In truth: ([\w ]+)\)\n([\w ]+)\n", result.stdout)
        assert len(told) == 2
        for truth, answer in told:
            assert truth == answer


@pytest.mark.parametrize("name", ["clip.mp4", "evidence-1.png", "thesis.tex"])
def test_the_demo_replaces_no_other_files(tmp_path, name):
    own = tmp_path / "folder" / name
    own.parent.mkdir()
    own.write_text("mine")
    assert_refused(invoke("demo", "--out", own.parent), "folder", "another folder")
    assert list(own.parent.iterdir()) == [own]
    assert own.read_text() == "mine"


def test_eval_counts_matching_answers_from_real_videos(tmp_path, tiny_published):
    records = write_records(tmp_path, 3, seconds=8)
    line = ["eval", records, "--retention", "0.1", "--json", "--model", tiny_published]
    ours = read_json(invoke(*line))
    uniform = read_json(invoke(*line, "--selection", "uniform"))
    questions = [row["questions"] for row in ours["kinds"].values()]
    assert ours["questions"] == sum(questions)
    assert uniform["questions"] == sum(questions)
    assert ours["kept"] == pytest.approx(29 / 288)
    assert uniform["low"] < uniform["accuracy"] < uniform["high"]
    by_question = ours["kinds"]["attribute"]["accuracy"]
    regardless = uniform["kinds"]["attribute"]["accuracy"]
    assert by_question > regardless + 0.3


@pytest.fixture
def records(tmp_path, tiny_mp4, frame_folder):
    """Two questions about a video, one about a file that is none, one about a missing one, one about frames."""
    (tmp_path / "broken.mp4").write_bytes(tiny_mp4.read_bytes()[:200])
    names = (str(tiny_mp4), str(tiny_mp4), "broken.mp4", "missing.mp4", str(frame_folder))
    fields = {"question": QUESTION, "answer": "red", "kind": "colour"}
    lines = [{"video": name} | fields for name in names]
    lines[-1]["fps"] = 2

    def write(lines=lines):
        (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return str(tmp_path / "records.jsonl")

    return write, lines


def test_eval_goes_on_after_unreadable_videos_and_lists_them(records, tiny_published):
    write, _ = records
    file = write()
    summary = read_json(invoke("eval", file, "--model", tiny_published, "--json"))
    assert summary["questions"] == 5
    assert summary["accuracy"] <= 3 / 5
    names = ["broken.mp4", "missing.mp4"]
    for unreadable, name in zip(summary["unreadable"], names, strict=True):
        assert unreadable["video"].endswith(name)
        assert unreadable["questions"] == 1
        assert unreadable["reason"]
    assert len(summary["answers"]) == 5
    first = summary["answers"][0]
    assert first["question"] == QUESTION
    assert first["said"]
    assert first["said"] == summary["answers"][-1]["said"]
    assert first["correct"] == (first["said"] == first["answer"])

    shown = invoke("eval", file, "--model", tiny_published)
    assert "accuracy" in shown.stdout
    assert "95% interval" in shown.stdout
    assert "1 question about" in shown.stderr


@pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
def test_eval_of_nothing_readable_is_a_failed_run(records, tiny_published, options):
    write, lines = records
    result = invoke("eval", write(lines[2:4]), "--model", tiny_published, *options)
    assert result.exit_code == 1
    assert result.stdout == ""
    broken, missing, last = result.stderr.splitlines()[-3:]
    assert "broken.mp4 counted as wrong: " in broken
    assert "missing.mp4 counted as wrong: " in missing
    assert "no question of" in last


def test_eval_asks_for_the_rate_of_a_folder(records, tiny_published):
    write, lines = records
    del lines[-1]["fps"]
    line = ["eval", write(lines[-1:]), "--model", tiny_published]
    assert_refused(invoke(*line), "frames0", '"fps"')
    assert read_json(invoke(*line, "--fps", "2", "--json"))["questions"] == 1


def test_an_answer_that_rests_on_a_whole_video_fills_no_screen(loaded, capsys):
    answer = qtsplus.ask(*loaded, CLIP, "What?", max_new_tokens=1)
    evidence = [Interval(number, number + 1, 0.01) for number in range(200)]
    print_answer(replace(answer, evidence=evidence))
    shown = capsys.readouterr().out
    assert shown.count("of the relevance") == 10
    assert "and in others, which --json lists" in shown


@pytest.mark.parametrize("command", ["ask", "chat", "watch", "batch", "index", "convert"])
def test_the_name_of_a_video_does_not_move_the_cursor(command, tiny_mp4, tiny_published, shared_model, tmp_path):
    name = "a\x1b[31m\u202e\nb"
    videos = tmp_path / "videos"
    videos.mkdir()
    video = videos / f"{name}.mp4"
    broken = videos / f"{name}.avi"
    shutil.copy(tiny_mp4, video)
    broken.write_bytes(b"no video")
    lines = {
        "ask": [broken, "Who?"],
        "chat": [video],
        "watch": [video, "Who?"],
        "batch": [broken, "--out", tmp_path / "out"],
        "index": [videos, "--out", tmp_path / "library"],
        "convert": [videos / name, "--out", tmp_path / name],
    }
    line = [command] + [str(word) for word in lines[command]]
    if command != "convert":
        line += ["--model", str(tiny_published)]
    result = CliRunner().invoke(app, line, input="Who?\n")
    said = result.stdout + result.stderr
    assert "a\\x1b[31m\\u202e" in said
    assert "\x1b" not in said
    assert "\u202e" not in said


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ((0, 0, 1, 0.9), "all over the frame"),
        ((0.4, 0.4, 0.6, 0.6), "middle centre"),
        ((0, 0, 0.2, 0.2), "top left"),
    ],
)
def test_a_region_in_words(box, words):
    assert place(box) == words
