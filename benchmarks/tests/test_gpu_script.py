"""benchmarks/gpu.sh: a stand-in for Python shows what it calls and when; at toy size the real one runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.speed import memory, scaling, speed, training_step
from benchmarks.speed.shapes import find_shape

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
KINDS = ("speed", "memory", "scaling")
OTHERS = ("internvl2.5-8b", "llava-video-7b", "qwen3-vl-8b", "qwen3.5-9b")
STEPS = [
    *("device", "speed-3b", "memory-3b", "scaling-3b", "train-3b", "frames-3b"),
    *(f"{kind}-{shape}" for shape in OTHERS for kind in KINDS),
]
# Is told what to do with a step by a file beside its results; notes its arguments.
STAND_IN = r"""#!/usr/bin/env bash
[[ $1 == - ]] && exit 0   # what is needed is there
shift
[[ $1 == benchmarks.* ]] && shift
echo "$*" >>"$CALLS"
case $* in
    *"$FAILS"*) echo "no luck"; exit 1 ;;
    *"$STOPS"*) exit 130 ;;
    *"$LASTS"*) trap 'exit 130' INT; for _ in {1..100}; do sleep 0.1; done ;;
esac
if [[ $1 == benchmarks ]]; then
    kind=${2/training-step/train}
    while (($#)); do
        case $1 in --out) out=$2 ;; --shape) shape=${2/#3b/gpu} ;; esac
        shift
    done
    mkdir -p "$out"; echo '{}' >"$out/$kind-$shape.json"
else
    echo '{}' >"$1"
fi
"""


@pytest.fixture
def gpu(tmp_path):
    """Runs the script with the stand-in; returns it and what was called."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*arguments, fails="nothing fails", lasts="nothing lasts", stops="nothing stops"):
        calls.write_text("")
        told = {"FAILS": fails, "LASTS": lasts, "STOPS": stops}
        environment = {**os.environ, "PYTHON": str(python), "CALLS": str(calls), **told}
        done = script(*arguments, "--out", str(tmp_path / "out"), environment=environment)
        return done, calls.read_text().splitlines()

    return run


def script(*arguments, environment=None):
    return subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True)


def test_every_step_once(gpu, tmp_path):
    first, calls = gpu()
    assert first.returncode == 0, first.stdout + first.stderr
    assert len(calls) == len(STEPS)
    plan, _ = first.stdout.split("To run: 18 steps")
    assert [line.split()[0] for line in plan.splitlines()[1:]] == STEPS
    assert plan.count(" about ") == len(STEPS)
    for kind in KINDS:
        shapes = [
            call.split("--shape ")[1]
            for call in calls
            if call.startswith(f"benchmarks {kind}") and "frames" not in call
        ]
        assert shapes == ["3b", *OTHERS]
    assert {
        "out/speed-gpu.json",
        "out/frames/speed-gpu.json",
        "out/memory-qwen3-vl-8b.json",
        "out/gpu-device.json",
    } <= {str(path.relative_to(tmp_path)) for path in (tmp_path / "out").rglob("*")}
    again, calls = gpu()
    assert again.returncode == 0 and calls == []
    assert "To run: 0 steps" in again.stdout
    listed = gpu("--list")[0].stdout.splitlines()
    assert [line.split(":")[0] for line in listed] == STEPS and all(line.endswith(".json") for line in listed)


def test_a_step_that_fails_hides_no_other_and_is_run_again(gpu, tmp_path):
    done, calls = gpu(fails="benchmarks memory")
    assert done.returncode == 1 and len(calls) == len(STEPS)
    assert done.stdout.splitlines()[-1 - len(OTHERS) :] == [f"failed: memory-{shape}" for shape in ("3b", *OTHERS)]
    assert "no luck" in (tmp_path / "out/gpu.log").read_text()
    done, calls = gpu("memory-3b", "speed-3b")
    assert done.returncode == 0 and len(calls) == 1 and "benchmarks memory" in calls[0]


def test_a_step_that_takes_too_long_is_interrupted_and_said(gpu):
    done, calls = gpu("--seconds", "1", "scaling-3b", "train-3b", lasts="benchmarks scaling")
    assert done.returncode == 3 and len(calls) == 2
    assert done.stdout.splitlines()[-1].endswith("run again: scaling-3b")
    done, _ = gpu("--seconds", "1", "scaling-3b", "memory-3b", lasts="benchmarks scaling", fails="benchmarks memory")
    assert done.returncode == 1, "a failure outweighs"


def test_ctrl_c_starts_no_further_step(gpu):
    done, calls = gpu(stops="benchmarks speed")
    assert done.returncode == 130
    assert len(calls) == 2


def test_minutes_are_a_deadline_for_all_steps(gpu):
    done, calls = gpu("--minutes", "0.4", lasts="benchmarks speed")  # 24 s, of which 15 are for an orderly end
    assert done.returncode == 3
    assert len(calls) == 2
    left = [line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("ran out of time")]
    assert left == STEPS[1:]
    done, calls = gpu("--minutes", "10")
    assert done.returncode == 0
    assert len(calls) == len(left)


@pytest.mark.parametrize("wrong", [["speed-5b"], ["--fast"], ["--seconds", "0"], ["--minutes", "0"], ["--out"]])
def test_bad_arguments(wrong):
    done = script(*wrong)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("gpu.sh: ")


def test_it_looks_for_all_that_the_package_needs():
    modules = {"pillow": "PIL", "text2num": "text_to_num"}
    brought = {"numpy", "huggingface_hub", "filelock", "jinja2", "typing_extensions"}
    needs = re.search(r'^NEEDS="(.*)"$', SCRIPT.read_text(), re.MULTILINE)[1].split()
    pyproject = (SCRIPT.parents[1] / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    packages = re.findall(r'^ *"([\w.]+)', block, re.MULTILINE)
    assert {modules.get(name, name) for name in packages} - {"torch", "transformers"} - brought <= set(needs)


def real(*arguments):
    return script(*arguments, environment={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})


def test_without_a_gpu_it_says_so(tmp_path):
    done = script(
        *("--out", str(tmp_path / "out"), "device"),
        environment={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2 and "PyTorch finds no GPU" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run(tmp_path):
    done = real("--dry-run", "--out", str(tmp_path), "device")
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "gpu-device.json").read_text())
    assert set(outcomes["tests"].values()) == {"passed"} and outcomes["counts"]["passed"] == len(outcomes["tests"])


@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_the_command_takes_what_the_steps_give_it(gpu, tmp_path, monkeypatch, mode):
    (tmp_path / "result.json").write_text('{"figures": {}}')
    given = []

    def note(shape, out, **settings):
        given.append((find_shape(shape).name, settings.pop("repeats"), settings.get("device")))
        return tmp_path / "result.json"

    for module, kind in ((speed, "speed"), (memory, "memory"), (scaling, "scaling"), (training_step, "train")):
        monkeypatch.setattr(module, f"run_{kind}", note)
    _, calls = gpu(*mode)
    for call in calls:
        if call.startswith("benchmarks"):
            result = CliRunner().invoke(app, call.split()[1:])
            assert result.exit_code == 0, result.output
    shapes = ("tiny", *(f"{shape}-tiny" for shape in OTHERS)) if mode else ("3b", *OTHERS)
    assert len(given) == len(STEPS) - 1 and {shape for shape, _, _ in given} == set(shapes)
    assert {(repeats, device) for _, repeats, device in given} == ({(1, "cpu")} if mode else {(3, None), (1, None)})


def measured(folder):
    """What the finished steps measured; the summary of the speed gains the memory that a later step measures."""
    results = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for result in results.values():
        result.pop("summary", None)
    return results


@pytest.mark.slow
def test_every_step_dry(tmp_path):
    done = real("--dry-run", "--out", str(tmp_path), "--minutes", "1.5")
    assert done.returncode == 3, done.stdout + done.stderr
    results = measured(tmp_path)
    done = real("--dry-run", "--out", str(tmp_path), "--seconds", "3600")
    assert done.returncode == 0, done.stdout + done.stderr
    assert results.items() <= measured(tmp_path).items()
    written = {path.stem for path in tmp_path.glob("*.json")}
    shapes = ("tiny", *(f"{shape}-tiny" for shape in OTHERS))
    assert written >= {
        "gpu-device",
        "train-tiny",
        *(f"{kind}-{shape}" for kind in KINDS for shape in shapes),
    }
    assert (tmp_path / "frames/frames-tiny.png").exists()
