"""The paper's efficiency figure, from what the speed benchmark wrote."""

import json
from pathlib import Path

import pytest

from benchmarks.speed.efficiency import run_efficiency

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def write(path, **environment):
    def side(tokens, seconds):
        return {"visual_tokens_to_lm": tokens, "file_to_first_token": dict.fromkeys(("median", "low", "high"), seconds)}

    frames = [
        {"shape": "3b", "frames": frames, "stock": side(300 * frames, 0.1 * frames), "ours": side(33 * frames, 2.0)}
        for frames in (600, 100)
    ]
    path.write_text(json.dumps({"environment": {"processor": "X", "threads": 2, **environment}, "frames": frames}))
    return path


def test_a_gpu_and_a_cpu_stand_beside_each_other_by_name(tmp_path):
    files = [write(tmp_path / f"speed-{name}.json") for name in ("cpu", "b")]
    files.append(write(tmp_path / "speed-gpu.json", gpu="H100"))
    target = run_efficiency(files, tmp_path, name="both", command="efficiency")
    curves = json.loads(target.read_text())["curves"]
    assert set(curves) == {"3b on CPU (X, 2 threads)", "3b on CPU (X, 2 threads), speed-b.json", "3b on H100"}
    first, second = curves["3b on H100"]
    assert first["frames"] == 600 and first["embeddings"]["saved"] == pytest.approx(0.89)
    assert first["seconds"]["saved"] == pytest.approx(1 - 2 / 60) and second["seconds"]["saved"] == pytest.approx(0.8)
    page = target.with_suffix(".md").read_text()
    assert "| 3b on CPU (X, 2 threads) | 600 | 180,000 | 19,800 | 89.0% | 60 | 2 | 96.7% |" in page
    assert "Published" in page and target.with_suffix(".png").exists()


def test_the_committed_page_is_of_the_committed_speed(tmp_path):
    command = "python -m benchmarks efficiency benchmarks/results/speed-cpu.json"
    run_efficiency([RESULTS / "speed-cpu.json"], tmp_path, name="cpu", command=command)
    assert (tmp_path / "efficiency-cpu.md").read_text() == (RESULTS / "efficiency-cpu.md").read_text()
