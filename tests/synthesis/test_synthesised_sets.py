"""From TinyWorld's captions to a model that trains on the sets, by the commands alone."""

import json
import sys

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.world.tinyworld import build_dataset
from qtsplus.cli import app
from qtsplus.data.formats import iter_records
from qtsplus.data.records import Answer, Choice
from qtsplus.hub.convert import convert
from qtsplus.synthesis.local_teacher import load_teacher
from scripted_server import KEY, scripted_server


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.stderr[-2000:], result.exception)
    return result.stdout + result.stderr


def test_captions_to_training(tmp_path, tiny_published, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    worlds, sets = tmp_path / "worlds", tmp_path / "sets"
    captions = build_dataset(worlds, "train", 6, seconds=(2,), progress=False)
    (tmp_path / "server").mkdir()
    rules = [{"contains": "<caption>", "then": ["429", "malformed", "500", "truncated", "options", "good"]}]
    with scripted_server(tmp_path / "server", rules=rules) as (url, log):
        endpoint = ["--endpoint", url, "--teacher", "scripted"]
        told = [command("data", "vscq1", captions, "--out", sets / "vscq1", *endpoint)]
    choices = list(iter_records(sets / "vscq1" / "vscq1.jsonl"))
    assert choices and all(isinstance(choice, Choice) for choice in choices)

    local = ["--model", tiny_published, "--media-root", worlds, "--batch-size", "4"]
    told.append(command("data", "vscq2", sets / "vscq1" / "vscq1.jsonl", "--out", sets / "vscq2", *local))
    screened = list(iter_records(sets / "vscq2" / "vscq2.jsonl"))
    dropped = [json.loads(line) for line in (sets / "vscq2" / "dropped.jsonl").read_text().splitlines()]
    assert len(screened) + len(dropped) == len(choices)
    assert screened and set(choice.id for choice in screened) <= {choice.id for choice in choices}
    assert all(row["seen"]["letter"] != row["answer"] for row in dropped)

    told.append(command("data", "vqa", sets / "vscq2" / "vscq2.jsonl", "--out", sets / "vqa", *local))
    answers = list(iter_records(sets / "vqa" / "vqa.jsonl"))
    assert answers and all(isinstance(answer, Answer) for answer in answers)
    assert {answer.question for answer in answers} <= {choice.question for choice in screened}

    files = [str(sets / "vscq2" / "vscq2.jsonl"), str(sets / "vqa" / "vqa.jsonl")]
    training = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "per_device_train_batch_size": 2}
    recipe = {
        "model": {"weights": str(tiny_published)},
        "data": {"train_files": files, "media_root": str(worlds)},
        "training": {**training, "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command("train", tmp_path / "recipe.yaml")
    assert (tmp_path / "run" / "model.safetensors").exists()

    assert KEY not in "".join(told)
    planted = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert planted == []


def test_a_stock_teacher_reads_all_tokens(tmp_path, tiny_published, tiny_mp4):
    """The stock model gives the verdicts of the QTSplus model that keeps all tokens and re-encodes none."""
    convert(tiny_published, tmp_path / "stock")
    rows = [
        {
            "vision_id": tiny_mp4.name,
            "id": str(number),
            "question": f"What colour is shape {number}?",
            "options": {"A": "red", "B": "blue", "C": "green", "D": "white"},
            "answer": "ABCD"[number % 4],
        }
        for number in range(8)
    ]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    media = ["--media-root", tiny_mp4.parent]
    for index in (1, 2):
        shard = ["--shard", f"{index}/2"]
        command("data", "vscq2", questions, "--out", tmp_path / "out", "--model", tmp_path / "stock", *media, *shard)
    assert "8 items: " in command("data", "merge", tmp_path / "out")
    kept = len((tmp_path / "out" / "vscq2.jsonl").read_text().splitlines())
    dropped = len((tmp_path / "out" / "dropped.jsonl").read_text().splitlines())
    assert kept + dropped == 8
    model, _ = load_teacher(str(tmp_path / "stock"), "cpu")
    assert model.config.qtsplus_config.reencode_layers == 0


def test_the_packages_of_endpoints_are_named(tmp_path, monkeypatch):
    for module in ("questions", "endpoint"):
        monkeypatch.delitem(sys.modules, f"qtsplus.synthesis.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "openai", None)
    arguments = ["captions.jsonl", "--out", "out", "--endpoint", "http://x/v1", "--teacher", "m"]
    result = CliRunner().invoke(app, ["data", "vscq1", *arguments])
    assert result.exit_code == 2
    assert result.stderr == "qtsplus: the package openai is not installed: pip install -e '.[data]' in a clone\n"


def test_a_run_of_which_nothing_comes_ends_with_1_and_its_reasons(tmp_path):
    (tmp_path / "captions.jsonl").write_text('{"vision_id": "v", "caption": "A dog runs."}\n')
    with scripted_server(tmp_path, rules=[{"contains": "A dog", "then": ["400"]}]) as (url, log):
        arguments = [
            "vscq1",
            tmp_path / "captions.jsonl",
            "--out",
            tmp_path / "out",
            "--endpoint",
            url,
            "--teacher",
            "m",
        ]
        result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("qtsplus: All 1 items failed, because The server answered 400") and "--retry-failed" in line
    assert not (tmp_path / "out" / "vscq1.jsonl").exists()


SERVER = ["--endpoint", "http://127.0.0.1:9/v1", "--teacher", "m"]
VSCQ1 = ["vscq1", "captions.jsonl", *SERVER]
VQA = ["vqa", "questions.jsonl"]
HERE = [*VQA, "--model", "nowhere"]
THERE = [*VQA, *SERVER]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vscq1", "captions.jsonl"], "no teacher: give --endpoint URL and --teacher NAME"),
        (["vscq1", "captions.jsonl", "--endpoint", "", "--teacher", "m"], "--endpoint is empty"),
        (["vscq1", "captions.jsonl", "--endpoint", "ftp://x", "--teacher", "m"], "no http(s) address"),
        (["vscq1", "captions.jsonl", "--endpoint", "http://x:99999/v1", "--teacher", "m"], "no http(s) address"),
        ([*VSCQ1, "--per-caption", "10"], "1 to 9"),
        ([*VSCQ1, "--extra-body", "3"], "JSON object"),
        ([*VSCQ1, "--shard", "3/2"], "such as 2/8"),
        ([*VSCQ1, "--timeout", "0"], "timeout is 0"),
        ([*VSCQ1, "--timeout", "1e12"], "timeout is 1e+12"),
        ([*VSCQ1, "--out", ""], "is empty"),
        ([*VSCQ1, "--out", "captions.jsonl"], "is a file; expected a folder"),
        (["vscq1", "", *SERVER], "is empty"),
        (["vscq1", "missing.jsonl", *SERVER], "There is no file"),
        (["vscq2", "captions.jsonl", *SERVER], "is no single-choice question"),
        ([*HERE], "nowhere"),
        ([*HERE, "--shard", "3/2"], "such as 2/8"),
        ([*HERE, "--out", "captions.jsonl"], "is a file; expected a folder"),
        ([*HERE, "--endpoint", "http://x/v1"], "--endpoint has no effect here: --model"),
        ([*HERE, "--timeout", "3"], "--timeout has no effect here: --model"),
        ([*HERE, "--concurrency", "3"], "--concurrency has no effect here: --model"),
        ([*HERE, "--frames", "3"], "--frames has no effect here: --model"),
        ([*VQA, "--model", ""], "--model is empty"),
        (
            [*THERE, "--fps", "-1", "--device", "tpu"],
            "--device has no effect here: it is about",
        ),
        ([*THERE, "--batch-size", "4"], "--batch-size has no effect here"),
        ([*THERE, "--media-root", "nowhere"], "no folder"),
        ([*THERE, "--media-root", ""], "is empty"),
        (["merge", "."], "There is no shard"),
        (["merge", ""], "is empty"),
    ],
)
def test_bad_command_lines(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "captions.jsonl").write_text('{"vision_id": "v", "caption": "A dog runs."}\n')
    options = {"A": "red", "B": "blue", "C": "green", "D": "grey"}
    question = {"vision_id": "v", "question": "What?", "options": options, "answer": "A"}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question))
    out = [] if arguments[0] == "merge" or "--out" in arguments else ["--out", "out"]
    result = CliRunner().invoke(app, ["data", *arguments, *out])
    assert result.exit_code == 2, result.exception
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "journal.jsonl").exists()


@pytest.mark.parametrize("option", ["--concurrency=1000000000", "--frames=1000000000", "--limit=0", "--batch-size=0"])
def test_absurd_numbers_are_refused(tmp_path, option):
    result = CliRunner().invoke(app, ["data", *THERE, "--out", str(tmp_path / "out"), option])
    assert result.exit_code == 2 and "should be" in " ".join(result.stderr.split()), result.stderr
    assert not (tmp_path / "out").exists()
