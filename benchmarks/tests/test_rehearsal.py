"""The rehearsal with a tiny model: every step is taken and shown, and an interrupted run goes on."""

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.files import read_result
from benchmarks.rehearsal import run, tasks
from benchmarks.rehearsal.steps import Found, Step
from benchmarks.rehearsal.stock import SPECIAL_TOKENS, make_tokenizer, read_ranks
from qtsplus.cli import app as qtsplus_app

USAGE = {"seconds": 2.0, "processor_seconds": 3.0, "peak_gb": 1.0}


def rehearse(folder: Path, *options: str):
    command = ["rehearsal", "--shape", "tiny", "--work", str(folder / "work"), "--out", str(folder / "out")]
    return CliRunner().invoke(app, [*command, *options])


def take_here(step, folder):
    """A step in this process."""
    module, name, *arguments = step.command
    if module == "benchmarks.rehearsal.tasks":
        return USAGE, json.dumps(getattr(tasks, name)(**json.loads(arguments[0])))
    result = CliRunner().invoke(qtsplus_app, [name, *arguments])
    assert result.exit_code == 0, result.output
    return USAGE, result.stdout


def test_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_run", take_here)
    result = rehearse(tmp_path)
    assert result.exit_code == 0, result.output
    document = read_result(tmp_path / "out" / "rehearsal-tiny.json")
    assert {"convert", "every token kept", "calibrate", "LoRA", "load again"} <= set(document["steps"])
    assert all(entry["peak_gb"] == 1.0 and entry["checked"] for entry in document["steps"].values())
    assert document["steps"]["ask"]["least_gb"] > 0
    table = (tmp_path / "out" / "rehearsal-tiny.md").read_text()
    assert all(f"| {name} | " in table for name in document["steps"])
    assert str(tmp_path) not in table + json.dumps(document)
    left = {path.name for path in (tmp_path / "work").iterdir() if path.is_dir()}
    assert "model" not in left and "stock" not in left  # the disk holds two models at a time


def planned(monkeypatch, *plan: Step) -> None:
    monkeypatch.setattr(run, "all_steps", lambda place: list(plan))


def nothing(output, done):
    return Found("nothing")


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    planned(monkeypatch, *(Step(name, [], nothing) for name in ("one", "two", "three")))
    taken = []

    def take(step, folder):
        taken.append(step.name)
        if taken == ["one", "two"]:
            raise KeyboardInterrupt
        return USAGE, ""

    monkeypatch.setattr(run, "_run", take)
    assert rehearse(tmp_path).exit_code == 130
    assert rehearse(tmp_path).exit_code == 0
    assert taken == ["one", "two", "two", "three"]


def test_a_process_is_measured(tmp_path, monkeypatch):
    """This one fills 300 MB."""
    fill = ["timeit", "-n", "1", "-r", "1", "b'x' * 300_000_000"]
    planned(monkeypatch, Step("fill", fill, lambda output, done: Found(output.split()[0])))
    assert rehearse(tmp_path).exit_code == 0
    entry = read_result(tmp_path / "out" / "rehearsal-tiny.json")["steps"]["fill"]
    assert entry["checked"] == "1" and entry["seconds"] > 0
    assert entry["peak_gb"] > 0.3


def refuse(output, done):
    raise ValueError("logits differ")


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (Step("broken", ["no_such_module"], nothing), "No module named no_such_module"),
        (Step("wrong", ["timeit", "-n", "1", "pass"], refuse), "logits differ"),
    ],
)
def test_a_step_that_fails_ends_the_run(tmp_path, monkeypatch, step, reason):
    planned(monkeypatch, step)
    result = rehearse(tmp_path)
    assert result.exit_code == 1
    assert reason in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_too_little_disk_leaves_a_step_out(tmp_path, monkeypatch):
    planned(monkeypatch, Step("large", ["no_such_module"], nothing, gigabytes=1e9))
    assert rehearse(tmp_path).exit_code == 0
    assert "left out: less than 1e+09 GB are free" in (tmp_path / "out" / "rehearsal-tiny.md").read_text()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--shape", "99b"], "no shape"),
        (["--shape", "3b"], "--vocabulary"),
        (["--shape", "3b", "--vocabulary", "nowhere.whl"], "no vocabularies"),
        (["--vocabulary", "nowhere.whl"], "of its own"),
        ([], "other files"),
    ],
)
def test_bad_input(tmp_path, options, reason):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine.txt").touch()
    result = rehearse(tmp_path, *options)
    assert result.exit_code == 2 and reason in result.stderr and len(result.stderr.splitlines()) == 1
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine.txt"]


def merged_by_rank(text: bytes, ranks: dict[bytes, int]) -> list[int]:
    """As tiktoken does: the pair of the lowest rank first."""
    parts = [bytes([byte]) for byte in text]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_a_vocabulary_of_tiktoken():
    words = (b"er", b"us", b"user", b"in", b" t", b" th", b" the", "ü".encode(), b"ing", b" thing")
    lines = [*(bytes([byte]) for byte in range(256)), *words]
    content = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(lines))
    ranks = read_ranks(content)
    tokenizer = make_tokenizer(ranks)
    for word in ("user", " thing", "users", " these", "über", "ing"):
        assert tokenizer.encode(word) == merged_by_rank(word.encode(), ranks)
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(len(ranks), len(ranks) + len(SPECIAL_TOKENS)))
    assert tokenizer.encode("<|im_start|>user") == [ids[1], ranks[b"user"]]


def test_a_token_that_no_two_tokens_make_stands_in_the_vocabulary_only():
    """As 201 of the newest vocabulary: what they would be merged of is missing."""
    ranks = {**{bytes([byte]): byte for byte in range(256)}, b"abc": 256}
    tokenizer = make_tokenizer(ranks)
    assert tokenizer.convert_tokens_to_ids("abc") == 256
    assert tokenizer.encode("abc") == [ranks[b"a"], ranks[b"b"], ranks[b"c"]]
