"""Runs of lmms-eval: what ends them, what they leave, and that a stopped one ends like one that was not."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.harness import run as harness
from benchmarks.harness.record_tasks import write_task
from benchmarks.harness.run import PAPER, SHARES, resolve
from benchmarks.world.open_sets import build_open
from qtsplus.data.formats import read_records

NEEDS_HARNESS = pytest.mark.skipif(
    find_spec("lmms_eval") is None, reason='lmms-eval is not installed: pip install -e ".[eval]"'
)


def assert_refused(result, *words, code=2):
    assert result.exit_code == code, result.output
    assert all(word in result.stderr.splitlines()[-1] for word in words), result.stderr


# --------------------------------------------------------------------------------------------------------------------
# Without lmms-eval: a stand-in that leaves what it is told to
# --------------------------------------------------------------------------------------------------------------------


def left_by_harness(folder: Path, answers, effective: int, name: str) -> None:
    """What lmms-eval leaves of a task `crowd`; `answers` are (score, failed) of each question."""
    (folder / "model").mkdir(parents=True)
    results = {
        "results": {"crowd": {"alias": "crowd", "exact_match,none": 0.5, "exact_match_stderr,none": "N/A"}},
        "higher_is_better": {"crowd": {"exact_match": True}},
        "n-samples": {"crowd": {"original": 9, "effective": effective}},
    }
    (folder / "model" / "1_results.json").write_text(json.dumps(results))
    lines = [
        {
            "doc_id": index,
            "exact_match": score,
            "token_counts": [
                {"video": f"{index // 2}.mp4", "visual_tokens": 288, "kept_visual_tokens": 29, "failed": failed}
            ],
        }
        for index, (score, failed) in enumerate(answers)
    ]
    (folder / "model" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def evaluate(tmp_path, monkeypatch, tiny_published):
    """`evaluate --tasks crowd` with a harness that runs `code` and leaves `answers`."""

    def call(answers=None, effective=2, code="", *arguments, name="1_samples_crowd.jsonl"):
        def command(out):
            if answers is not None:
                left_by_harness(out / "harness", answers, effective, name)
            return [sys.executable, "-c", code]

        def run(*popen, **options):
            return original(command(tmp_path / "out"), **options)

        original = subprocess.run
        monkeypatch.setattr(harness.subprocess, "run", run)
        monkeypatch.setattr(harness, "find_spec", lambda name: True)
        monkeypatch.setattr(harness, "version", lambda name: "0")
        options = ["--tasks", "crowd", "--model", str(tiny_published), "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, ["evaluate", *options, *arguments])
        monkeypatch.setattr(harness.subprocess, "run", original)
        return result

    return call


def test_a_run_leaves_one_file_with_all_it_found(evaluate, tmp_path):
    result = evaluate([(1.0, None), (0.0, None)])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out" / "run.json").read_text())
    assert document["tasks"]["crowd"]["metrics"] == {"exact_match": 50.0}
    assert [sample["scores"] for sample in document["tasks"]["crowd"]["samples"]] == [
        {"exact_match": 1.0},
        {"exact_match": 0.0},
    ]
    assert document["settings"]["tasks"] == "crowd" and "lmms-eval" in document["versions"]
    assert re.search(r"exact_match\W+2\W+1\W+50.00\W+10.1%", result.stdout), result.stdout


def test_what_its_math_verify_lacks_comes_with_advice(tmp_path):
    log = tmp_path / "harness.log"
    log.write_text("Traceback\nModuleNotFoundError: No module named 'latex2sympy2_extended'\n")
    assert 'pip install --upgrade "math-verify>=0.8"' in harness._last_error(log)
    log.write_text("Traceback\nModuleNotFoundError: No module named 'lmms_evil'\n")
    assert harness._last_error(log) == "ModuleNotFoundError: No module named 'lmms_evil'"


def test_what_the_harness_does_not_say_ends_the_run(evaluate):
    assert_refused(evaluate(), "left 0 results", "harness.log", code=1)


def test_a_harness_that_fails_ends_the_run(evaluate):
    failing = "import sys; print('ValueError: no such dataset'); sys.exit(3)"
    assert_refused(evaluate([(1.0, None)] * 2, 2, failing), "exit code 3", "no such dataset", code=1)


def test_a_missing_sample_ends_the_run(evaluate):
    assert_refused(evaluate([(1.0, None)], 2), "1 of 2 samples of crowd", code=1)


def test_failed_samples_are_listed_and_the_exit_code_says_so(evaluate, tmp_path):
    result = evaluate([(1.0, None), (0.0, "no frame could be decoded")])
    assert_refused(result, "1 question about 0.mp4", "wrong", "no frame could be decoded", code=1)
    assert (tmp_path / "out" / "run.json").exists()


def test_a_finished_run_that_is_run_again_breaks_no_report(evaluate, tmp_path):
    """The harness puts the time into the names of its files; a report links what stays."""
    made = CliRunner()
    for time_of_run in ("1", "2"):
        assert evaluate([(1.0, None), (0.0, None)], name=f"{time_of_run}_samples_crowd.jsonl").exit_code == 0
        if time_of_run == "1":
            report = ["report", str(tmp_path / "out"), "--out", str(tmp_path / "report.md")]
            assert made.invoke(app, report).exit_code == 0
    (link,) = re.findall(r"\]\((.*)\)", (tmp_path / "report.md").read_text())
    assert (tmp_path / link).read_text().count("doc_id") == 2


def test_nothing_that_a_run_did_not_write_is_lost(evaluate, tmp_path):
    (tmp_path / "out" / "tasks").mkdir(parents=True)
    (tmp_path / "out" / "tasks" / "mine.yaml").write_text("mine")
    assert_refused(evaluate([(1.0, None), (0.0, None)]), "holds tasks, which is not of a run")
    assert (tmp_path / "out" / "tasks" / "mine.yaml").read_text() == "mine"
    (tmp_path / "out" / "settings.json").write_text("[]")
    assert_refused(evaluate([(1.0, None), (0.0, None)]), "is of a run with other settings")


def test_a_folder_belongs_to_the_settings_of_its_run(evaluate):
    answers = [(1.0, None), (0.0, None)]
    assert evaluate(answers).exit_code == 0
    assert evaluate(answers).exit_code == 0, "a finished run may be run again"
    assert_refused(evaluate(answers, 2, "", "--retention", "0.2"), "other settings", "--out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "--tasks", "videomme,,lvbench"], ["videomme,,lvbench"]),
        (["evaluate", "--tasks", "crowd", "--selection", "best"], ["'best'", "uniform"]),
        (["evaluate", "--tasks", "crowd", "--retention", "2"], ["retention is 2"]),
        (["evaluate", "--tasks", "crowd", "--fps", "nan"], ["Got fps=nan"]),
        (["evaluate", "--tasks", "missing.jsonl"], ["missing.jsonl"]),
        (["evaluate", "--tasks", "crowd", "--out", "a,b"], ["takes no comma"]),
        (["report"], []),
        (["report", "missing"], ["run.json", "missing"]),
        (["evaluate", "--tasks", "crowd", "--selection", "all", "--retention", "0.1"], ["keeps every visual token"]),
        (["evaluate", "--tasks", "crowd", "--num-frames", "4", "--max-frames", "2"], ["Got num_frames"]),
        (["evaluate", "--tasks", "a/x.jsonl,b/x.jsonl"], ["Two files of records are named x"]),
    ],
)
def test_bad_input_ends_in_one_line(arguments, words, tiny_published, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: True)
    monkeypatch.chdir(tmp_path)
    model = [] if arguments[0] == "report" else ["--model", str(tiny_published)]
    assert_refused(CliRunner().invoke(app, [*arguments, *model]), *words)


def test_without_the_harness_the_command_says_how_to_get_it(tiny_published, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    options = ["--tasks", "videomme", "--model", str(tiny_published), "--out", str(tmp_path / "out")]
    assert_refused(CliRunner().invoke(app, ["evaluate", *options]), 'pip install -e ".[eval]"', "in a clone")


def test_the_papers_benchmarks_have_a_name_together():
    assert resolve("paper,lvbench, cgbench") == [*PAPER, "cgbench"]


def test_each_benchmark_logs_its_scores_in_its_own_way():
    assert harness._score({"pred_answer": "B", "answer": "B"}) == 1  # Video-MME, MVBench, MLVU
    assert harness._score({"parsed_pred": "A", "answer": "B"}) == 0  # LongVideoBench, Video-MMMU
    assert harness._score({"rating": 1, "answer": "x"}) == 1  # TempCompass
    assert harness._score(True) == 1  # LVBench
    assert harness._score({"score": 0.0}) == 0  # CG-Bench
    assert harness._score({"parsed_pred": ["3"], "answer": ["3", "three"]}) is None


# --------------------------------------------------------------------------------------------------------------------
# With it
# --------------------------------------------------------------------------------------------------------------------


@NEEDS_HARNESS
def test_the_papers_benchmarks_and_our_metrics_are_those_of_the_harness():
    (folder,) = find_spec("lmms_eval").submodule_search_locations
    files = [path for path in Path(folder, "tasks").rglob("*") if path.name.endswith(("yaml", "yml"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    names, metrics = (set(re.findall(rf"{word}: [\"']?(\w+)", text)) for word in (r"(?m)^(?:task|group)", "metric"))
    assert set(PAPER) <= names and metrics >= SHARES


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}


@NEEDS_HARNESS
def test_a_task_of_records_runs_in_lmms_eval(tiny_published, tmp_path, environment):
    """As a user of lmms-eval runs it, without our command."""
    path = build_open(tmp_path / "world", "harness", 1, 8, variant="plain")
    task = write_task(path, tmp_path / "tasks")
    command = [sys.executable, "-m", "benchmarks.harness", "--model", "qtsplus", "--tasks", task, "--limit", "4"]
    arguments = [f"pretrained={tiny_published}", "retention=0.1", "device=cpu"]
    command += ["--model_args", ",".join(arguments), "--include_path", str(tmp_path / "tasks"), "--batch_size", "2"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples", "--verbosity", "DEBUG"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = harness.collect(tmp_path / "out", tmp_path / "log")[task]
    assert [sample["kept_visual_tokens"] / sample["visual_tokens"] for sample in found["samples"]] == [29 / 288] * 4
    assert found["metrics"]["exact_match"] == 25 * sum(sample["scores"]["exact_match"] for sample in found["samples"])


@pytest.fixture
def records(tmp_path):
    """Questions about three videos, of which one is corrupt."""
    path = build_open(tmp_path / "world", "harness", 3, 8, variant="plain")
    broken = Path(str(read_records(path)[-1].video))
    broken.write_bytes(broken.read_bytes()[:300])
    return path


@pytest.mark.slow
@NEEDS_HARNESS
def test_killed_and_started_again_with_two_processes_the_table_is_the_same(
    records, tiny_published, tmp_path, environment
):
    """The one with nothing in between, in one process and without batches, tells what the table should be."""

    def command(out, *arguments):
        options = ["--tasks", str(records), "--model", str(tiny_published), "--retention", "0.1", "--device", "cpu"]
        return [sys.executable, "-m", "benchmarks", "evaluate", *options, "--out", str(tmp_path / out), *arguments]

    def end(*started):
        done = subprocess.run(command(*started), env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        assert f"{records.stem}: 16 questions about 000002.mp4 failed and count as wrong" in done.stderr
        return json.loads((tmp_path / started[0] / "run.json").read_text())["tasks"]

    whole = end("whole")
    started = subprocess.Popen(command("killed"), env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    log = tmp_path / "killed" / "answers" / "answers-0.jsonl"
    while not (log.exists() and log.read_bytes().count(b"\n") >= 4):
        assert started.poll() is None, "it ended before it could be killed"
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    before = log.read_bytes()
    assert not (tmp_path / "killed" / "run.json").exists() and before.count(b"\n") < 48

    assert end("killed", "--processes", "2", "--batch-size", "4") == whole
    assert log.read_bytes().startswith(before), "what was answered is kept"
    assert sum(sample["scores"]["exact_match"] for sample in whole[records.stem]["samples"]) > 0
