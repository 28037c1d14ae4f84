"""A method of one's own, by a name that is typed, works with every folder; by a name that is stored it runs nothing."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from qtsplus import ask, encode, load
from qtsplus.cli import app
from qtsplus.model.methods_qtsplus import METHODS

MINE = """
from pathlib import Path
import torch

Path(__file__).with_name("ran").touch()
seven = 7


def latest(candidates, n):
    return torch.arange(candidates.num_tokens)[-n:]


def failing(candidates, n):
    return n + None


def leaving(candidates, n):
    raise SystemExit("too few")


def refusing(candidates, n):
    raise ValueError("too many")


def missing(candidates, n):
    return open("scores.pt")


@torch.no_grad()
def multiplying(candidates, n):
    return torch.einsum("ij,jk", torch.ones(2), torch.ones(2))
"""


@pytest.fixture
def mine(tmp_path):
    """A file with a method, which leaves a trace when it runs."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    yield file
    for name in [name for name in METHODS if ":" in name]:
        METHODS.pop(name)


@pytest.fixture
def folder(tiny_published, tmp_path):
    """A folder that was made before the method."""
    return shutil.copytree(tiny_published, tmp_path / "model")


def with_selection(folder, name):
    config = json.loads((folder / "config.json").read_text())
    config["qtsplus_config"]["selection"] = name
    (folder / "config.json").write_text(json.dumps(config))


def run(*arguments, **options):
    return CliRunner().invoke(app, list(map(str, arguments)), **options)


def test_in_a_call(mine, folder, tiny_mp4):
    model, processor = load(folder)
    video = encode(model, processor, tiny_mp4)
    options = {"retention": 0.25, "max_new_tokens": 1}

    def kept(selection):
        return ask(model, processor, video, "What?", selection=selection, **options).keep_map

    by_name = kept(f"{mine}:latest")
    assert by_name.flatten()[-16:].all()
    assert by_name.sum() == 16
    by_function = kept(lambda candidates, n: torch.arange(candidates.num_tokens)[-n:])
    assert torch.equal(by_function, by_name)


def test_on_the_command_line(mine, folder, tiny_mp4, tmp_path):
    own = ["--model", folder, "--selection", f"{mine}:latest", "--retention", "0.25"]
    one_token = ["--json", "--max-new-tokens", "1"]
    answer = json.loads(run("ask", tiny_mp4, "What?", *one_token, *own).stdout)
    assert answer["kept_tokens"] == 16
    assert begin_of_evidence(answer) == 3
    turn = json.loads(run("chat", tiny_mp4, *one_token, *own, input="What?\n").stdout)
    assert begin_of_evidence(turn) == 3
    records = tmp_path / "records.jsonl"
    record = {"video": str(tiny_mp4), "question": "What?", "answer": "A circle.", "kind": "mark"}
    records.write_text(json.dumps(record))
    out = tmp_path / "answers.jsonl"
    run("batch", records, "--out", out, *own)
    row = json.loads(out.read_text())
    assert row["evidence"] == answer["evidence"]
    report = json.loads(run("eval", records, "--json", *own).stdout)
    assert report["kept"] == pytest.approx(0.25)
    for method, words in {
        "failing": "line 14 of {mine}: TypeError",
        "leaving": "line 18 of {mine}: SystemExit: too few",
        "refusing": "line 22 of {mine}: ValueError: too many",
        "missing": "line 26 of {mine}: FileNotFoundError: [Errno 2] No such file or directory: 'scores.pt'",
        "multiplying": "line 31 of {mine}: RuntimeError: ",
    }.items():
        failed = tmp_path / f"{method}.jsonl"
        run("batch", records, "--out", failed, *own, "--selection", f"{mine}:{method}")
        assert f"mine.py:{method}' failed in {words.format(mine=mine)}" in failed.read_text()


def begin_of_evidence(answer):
    return min([moment["start"] for moment in answer["evidence"]])


def test_in_a_recipe_and_by_convert(mine, folder, tiny_stock, tiny_mp4, tmp_path):
    name = f"{mine}:latest"
    record = {"video": str(tiny_mp4), "question": "What?", "answer": "A circle.", "source": "vqa"}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
        model:
          weights: {folder}
          selector:
            selection: {name}
        data:
          train_files: [{tmp_path}/train.jsonl]
          processor_kwargs:
            fps: 1
        training:
          output_dir: {tmp_path}/run
          max_steps: 1
          use_cpu: true
          report_to: none
          save_strategy: "no"
          retention_range: [0.1, 0.3]
        """
    )
    trained = run("train", recipe)
    assert trained.exit_code == 0, trained.output
    converted = run("convert", tiny_stock, "--out", tmp_path / "new", "--set", f"selection={name}")
    assert converted.exit_code == 0, converted.output
    METHODS.pop(name)
    for result in ("run", "new"):
        model = tmp_path / result
        question = ["ask", tiny_mp4, "What?", "--model", model, "--max-new-tokens", "1"]
        refused = run(*question)
        assert refused.exit_code == 2, refused.output
        assert f"selection={name!r}" in refused.stderr, refused.output
        with_another = run(*question, "--selection", "uniform")
        assert with_another.exit_code == 0  # nothing else needs it
        assert run("publish", model, "--to", tmp_path / f"hub-{result}").exit_code == 0
        assert run(*question, "--selection", name, "--retention", "0.1").exit_code == 0
        METHODS.pop(name)


@pytest.mark.parametrize("name", ["os:system", "mine.py:latest", "{mine}:latest", "mine:latest"])
def test_what_a_folder_names_is_never_imported(name, mine, folder, tiny_mp4, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with_selection(folder, name.format(mine=mine))
    result = run("ask", tiny_mp4, "What?", "--model", folder)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2, result.output
    assert "A stored name is never imported" in line, result.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("best", "expected one of ('qtsplus', "),
        ("none.py:latest", "No such file"),
        ("{mine}:earliest", "cannot be imported: KeyError('earliest')"),
        ("{mine}:seven", "TypeError"),
        ("{mine}", "expected one of"),
        ("os:getcwd", "expected MODULE:FUNCTION or FILE.py:FUNCTION, a function of the candidates and a count"),
        (":latest", "cannot be imported"),
        ("no_such_module:latest", "No module named 'no_such_module'"),
        ("broken.py:latest", "was never closed"),
        ("divides.py:latest", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_name_of_nothing_is_one_line(name, words, mine, tiny_mp4, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def latest(")
    (tmp_path / "divides.py").write_text("1 / 0")
    result = run("ask", tiny_mp4, "What?", "--selection", name.format(mine=mine))
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2, result.output
    assert words in line, result.output
