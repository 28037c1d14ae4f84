"""From captions to a model that trains on the sets, by the commands alone."""

import json
import sys

import yaml
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.synthesis.inputs import iter_records
from clips import render_clip
from qtsplus.cli import app as qtsplus
from qtsplus.data.records import Choice, FreeAnswer
from scripted_server import KEY, files_with_key, scripted_server


def command(program, *arguments):
    result = CliRunner().invoke(program, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.stderr[-2000:], result.exception)
    return result.stdout + result.stderr


def test_captions_to_training(tmp_path, tiny_published, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    worlds, sets = tmp_path / "worlds", tmp_path / "sets"
    worlds.mkdir()
    for seed in range(6):
        render_clip(worlds / f"v{seed}.mp4", seconds=2, seed=seed)
    captions = tmp_path / "captions.jsonl"
    rows = [{"vision_id": f"v{seed}", "caption": f"{3 + seed} discs cross the picture."} for seed in range(6)]
    captions.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "server").mkdir()
    rules = [{"contains": "<caption>", "then": ["429", "malformed", "500", "truncated", "options", "good"]}]
    with scripted_server(tmp_path / "server", rules=rules, answer="It is red.") as (url, log):
        endpoint = ["--endpoint", url, "--teacher", "scripted"]
        told = [command(app, "make", "vscq1", captions, "--out", sets / "vscq1", *endpoint)]
        videos = [*endpoint, "--media-root", worlds, "--frames", "2"]
        told.append(command(app, "make", "vscq2", sets / "vscq1" / "vscq1.jsonl", "--out", sets / "vscq2", *videos))
        told.append(command(app, "make", "vqa", sets / "vscq2" / "vscq2.jsonl", "--out", sets / "vqa", *videos))
    choices = list(iter_records(sets / "vscq1" / "vscq1.jsonl"))
    assert choices and all(isinstance(choice, Choice) for choice in choices)

    screened = list(iter_records(sets / "vscq2" / "vscq2.jsonl"))
    dropped = [json.loads(line) for line in (sets / "vscq2" / "dropped.jsonl").read_text().splitlines()]
    assert len(screened) + len(dropped) == len(choices)
    assert screened and set(choice.id for choice in screened) <= {choice.id for choice in choices}
    assert all(row["said"] != row["answer"] for row in dropped)

    answers = list(iter_records(sets / "vqa" / "vqa.jsonl"))
    assert answers and all(isinstance(answer, FreeAnswer) for answer in answers)
    assert {answer.question for answer in answers} <= {choice.question for choice in screened}

    files = [str(sets / "vscq2" / "vscq2.jsonl"), str(sets / "vqa" / "vqa.jsonl")]
    training = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "per_device_train_batch_size": 2}
    recipe = {
        "model": {"weights": str(tiny_published)},
        "data": {"train_files": files, "media_root": str(worlds)},
        "training": {**training, "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command(qtsplus, "train", tmp_path / "recipe.yaml")
    assert (tmp_path / "run" / "model.safetensors").exists()

    assert KEY not in "".join(told)
    assert files_with_key(tmp_path) == []


def test_the_packages_of_endpoints_are_named(tmp_path, monkeypatch):
    for module in ("questions", "endpoint"):
        monkeypatch.delitem(sys.modules, f"benchmarks.synthesis.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "openai", None)
    arguments = ["captions.jsonl", "--out", "out", "--endpoint", "http://x/v1", "--teacher", "m"]
    result = CliRunner().invoke(app, ["make", "vscq1", *arguments])
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
        result = CliRunner().invoke(app, ["make", *map(str, arguments)])
    assert result.exit_code == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("qtsplus: All 1 items failed, because The server answered 400")
    assert "the same command" in line
    assert not (tmp_path / "out" / "vscq1.jsonl").exists()
